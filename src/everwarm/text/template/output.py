"""What a template writes, piece by piece: a long output gives way to other threads, and can be stopped."""

from collections.abc import Callable, Iterable

from everwarm.text.pace import give_way

FIRST_LOOK = 1 << 16
"""Characters before an output counts as long."""

_SOME = 256
"""Pieces that are made in about a millisecond."""


def collected(pieces: Iterable[str], watch: Callable[[str], None] | None = None) -> str:
    """All of it. `watch` is shown all that has been written, each time it has doubled, and may raise."""
    parts: list[str] = []
    size, next_look = 0, FIRST_LOOK
    for number, piece in enumerate(pieces, start=1):
        parts.append(piece)
        size += len(piece)
        if number % _SOME == 0:
            give_way()
        if watch is not None and size >= next_look:
            next_look = 2 * size
            parts = ["".join(parts)]
            watch(parts[0])
    return "".join(parts)
