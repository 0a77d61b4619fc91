"""Arithmetic. Knows arrays and shapes, nothing of files, models or text.

`choose` picks the backend and says why, so that `everwarm doctor` can tell.
"""

from dataclasses import dataclass

from everwarm.kernels import reference


@dataclass(frozen=True, slots=True)
class Backend:
    """Who computes, and the reason it was chosen."""

    name: str
    exact: bool
    why: str


def choose(wanted: str = "auto") -> Backend:
    """`wanted` is `auto` or a backend's name; it was checked where it came in."""
    why = "asked for" if wanted == "reference" else "NumPy and BLAS on any processor; native kernels are not built yet"
    return Backend("reference", reference.EXACT, why)
