"""Arithmetic. Knows arrays and shapes, nothing of files, models or text.

`choose` picks the backend and says why, so that `everwarm doctor` can tell.
"""

from dataclasses import dataclass

from everwarm.errors import ConfigError
from everwarm.kernels import _native
from everwarm.kernels.backend import Backend
from everwarm.kernels.native import NativeBackend
from everwarm.kernels.reference import ReferenceBackend


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend computes, with which instructions, and why."""

    backend: str
    isa: str
    why: str


def choose(backend: str, isa: str) -> Choice:
    """`backend` is auto, native or reference; `isa` is auto or the name of an instruction set."""
    supported = _native.supported_isas()
    if isa != "auto" and isa not in supported:
        raise ConfigError(f"instruction set {isa}: this processor has {', '.join(supported)}")
    if backend == "reference":
        return Choice("reference", "blas", "asked for")
    best = supported[0] if isa == "auto" else isa
    if isa != "auto":
        why = "asked for"
    elif best == "portable":
        why = "this processor has neither AVX2 with FMA nor AVX-512 VNNI: portable code, slower"
    else:
        why = f"the best of what this processor has: {', '.join(supported)}"
    return Choice("native", best, why)


def make(choice: Choice, threads: int | None, cores: int, kv_type: str) -> Backend:
    """The backend that was chosen."""
    if choice.backend == "reference":
        return ReferenceBackend(threads)
    return NativeBackend(choice.isa, threads or cores, kv_type)
