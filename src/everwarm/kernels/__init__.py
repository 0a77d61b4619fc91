"""Arithmetic. Knows arrays and shapes, nothing of files, models or text.

`choose` picks the backend and says why, so that `everwarm doctor` can tell. A new backend is a file with a class that
does what `backend.Backend` says, and a line in `BACKENDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from everwarm.errors import ConfigError
from everwarm.kernels.backend import Backend
from everwarm.kernels.native import NativeBackend, detect_cpu, supported_isas
from everwarm.kernels.reference import ReferenceBackend

__all__ = ["BACKENDS", "Backend", "ChosenBackend", "Options", "choose", "detect_cpu", "make", "supported_isas"]


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """Which backend computes, with which instructions, and why."""

    backend: str
    isa: str
    why: str


def choose(backend: str, isa: str) -> ChosenBackend:
    """`backend` is auto, native or reference; `isa` is auto or the name of an instruction set."""
    supported = supported_isas()
    if isa != "auto" and isa not in supported:
        raise ConfigError(f"instruction set {isa}: this processor has {', '.join(supported)}")
    if backend == "reference":
        return ChosenBackend("reference", "blas", "asked for")
    best = supported[0] if isa == "auto" else isa
    if isa != "auto":
        why = "asked for"
    elif best == "portable":
        why = "this processor has neither AVX2 with FMA nor AVX-512 VNNI: portable code, slower"
    else:
        why = f"the best of what this processor has: {', '.join(supported)}"
    return ChosenBackend("native", best, why)


@dataclass(frozen=True, slots=True)
class Options:
    """What a backend is made with."""

    isa: str
    threads: int | None  # None: the backend's own choice
    cores: int
    kv_type: str


BACKENDS: dict[str, Callable[[Options], Backend]] = {
    "native": lambda options: NativeBackend(options.isa, options.threads or options.cores, options.kv_type),
    "reference": lambda options: ReferenceBackend(options.threads),
}


def make(choice: ChosenBackend, threads: int | None, cores: int, kv_type: str) -> Backend:
    """The backend that was chosen."""
    return BACKENDS[choice.backend](Options(choice.isa, threads, cores, kv_type))
