"""Loading a model for a command: its settings, and a bar while it is packed for the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from everwarm.cli.console import bytes_bar
from everwarm.cli.options import LoadSettings

if TYPE_CHECKING:
    from everwarm.llm import LLM


@contextmanager
def loaded(model: str, settings: LoadSettings) -> Iterator["LLM"]:
    """The model, closed when the command ends."""
    from everwarm.llm import load

    with bytes_bar() as bar:
        llm = load(model, **settings, progress=lambda done, total: bar("packing the weights, once", done, total))
    with llm:
        yield llm
