"""Loading a model for a command: its settings, and a bar while it is packed for the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from everwarm.cli.console import bytes_bar

if TYPE_CHECKING:
    from everwarm.llm import LLM


@contextmanager
def loaded(
    model: str,
    backend: str | None,
    isa: str | None,
    threads: int | None,
    kv_type: str | None,
    no_pack: bool,
    verify: str | None,
) -> Iterator["LLM"]:
    """The model, closed when the command ends."""
    from everwarm.llm import load

    with bytes_bar() as bar:
        llm = load(
            model,
            backend=backend,
            isa=isa,
            threads=threads,
            kv_type=kv_type,
            pack="off" if no_pack else None,
            verify=verify,
            progress=lambda done, total: bar("packing the weights, once", done, total),
        )
    with llm:
        yield llm
