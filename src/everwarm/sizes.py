"""Sizes in bytes: read from text such as `8GiB`, or given as a share of a whole such as `75%`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b|%)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {unit + "i": 1024**power for power, unit in enumerate("kmgt", start=1)}


@dataclass(frozen=True, slots=True)
class Share:
    """A size relative to a whole that is known only later: `75%`."""

    fraction: float

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%"


Size: TypeAlias = int | Share


def parse_size(text: object) -> Size:
    """Read `8GiB`, `512MB`, `1.5g`, `75%` or a plain number of bytes. Raises ValueError if it is none of these."""
    if isinstance(text, Share):
        return text
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError("a size can't be negative")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError("expected a size such as 8GiB, 512MB or 75%")
    number, unit = float(match[1]), (match[2] or "").lower()
    if unit == "%":
        if number > 100:
            raise ValueError("a share can't be more than 100%")
        return Share(number / 100)
    if number > 1e18:
        raise ValueError("that is more than any machine has")
    return int(number * _UNITS[unit if unit == "b" else unit.removesuffix("b")])


def show_size(size: Size) -> str:
    """As `parse_size` reads it: in the largest unit of which it is a whole multiple."""
    if isinstance(size, Share):
        return str(size)
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)


def in_bytes(size: Size, whole: Callable[[], int]) -> int:
    """The number of bytes. `whole` is called only if the size is a share of it."""
    return int(size.fraction * whole()) if isinstance(size, Share) else size
