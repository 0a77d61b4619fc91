"""Loading a model for a command: its settings, and a bar while it is packed for the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from everwarm import config
from everwarm.cli.console import bytes_bar
from everwarm.settings import Settings

if TYPE_CHECKING:
    from everwarm.llm import LLM


@contextmanager
def loaded(model: str, settings: Settings) -> Iterator["LLM"]:
    """The model, closed when the command ends."""
    from everwarm.llm import LLM
    from everwarm.pull import resolve

    with bytes_bar() as bar:
        path = resolve(model, config.home())
        llm = LLM(path, settings, lambda done, total: bar("packing the weights, once", done, total))
    with llm:
        yield llm
