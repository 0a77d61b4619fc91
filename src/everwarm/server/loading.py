"""From the name of a model to one that takes requests: fetched, loaded, in memory, verified, its agents known."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from everwarm import config
from everwarm.server.process import Progress
from everwarm.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from everwarm.llm import LLM
    from everwarm.server.keys import Keys
    from everwarm.server.origin import Origins
    from everwarm.server.page.routes import PageOptions
    from everwarm.server.serving import Limits

_log = logging.getLogger(__name__)


class ServedModel:
    """A model behind its application."""

    def __init__(self, llm: "LLM", app: "FastAPI") -> None:
        self.llm = llm
        self.app = app

    async def drain(self, grace_s: float) -> None:
        await self.app.state.serving.drain(grace_s)

    def close(self) -> None:
        """Save what is not on disk yet; free everything."""
        self.app.state.serving.close()
        self.llm.close()


def load_model(
    model: str,
    progress: Progress,
    settings: Settings,
    limits: "Limits",
    keys: "Keys",
    origins: "Origins",
    pull: bool,
    alias: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    page: "PageOptions | None" = None,
) -> ServedModel:
    """Everything that has to be done before the first request; with `pull`, the model is fetched if it is missing.
    `alias`: names that it is served under, instead of its own. `sampling`: for requests that don't say how.
    `page`: how the page is served.
    """
    if pull:
        from everwarm.pull import pull as fetch

        fetch(model, config.home(), progress=lambda stage, done, total: progress.say(f"{stage} {model}", done, total))
    from everwarm.llm import LLM
    from everwarm.pull import resolve
    from everwarm.server.app import create_app

    progress.say("opening the model")
    path = resolve(model, config.home())
    llm = LLM(path, settings, lambda done, total: progress.say("packing the weights, once", done, total))
    try:
        preload(llm, progress)
        progress.say("looking through the agents")
        _ = llm.agents
        llm.warm_up()
        names = tuple(alias) or (model if pull else llm.path.stem,)
        return ServedModel(llm, create_app(llm, names[0], limits, keys, origins, names, sampling, page))
    except BaseException:
        llm.close()
        raise


def preload(llm: "LLM", progress: Progress, again_s: float = 1.0) -> None:
    """Bring the weights into memory until it is verified that they are there."""
    while True:
        llm.weights.preload(progress=lambda done, total: progress.say("bringing the weights into memory", done, total))
        progress.say("verifying that the weights are in memory")
        problems = llm.weights.verify()
        if not problems:
            return
        worst = f"tensor {problems[0].tensor} {problems[0].what}"
        _log.warning("%d weights are not in memory as they should be: %s", len(problems), worst)
        progress.say(f"waiting for memory: {worst}; a smaller --weight-budget may help")
        time.sleep(again_s)
