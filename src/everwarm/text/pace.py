"""Long work on text gives way to others.

Python runs one thread at a time, and switches only every 5 ms if nobody gives way: each time the engine or the event
loop wants to go on, it would wait that long. Work on text that can be long is done in slices of about a millisecond.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE = 4096
"""Words or matches, which take a few hundred nanoseconds each."""

HELD_UP_S = 0.02
"""Some words are so long that a slice takes longer than this: then others have as much time before the next."""


def give_way() -> None:
    """Let other threads run, if any wants to."""
    time.sleep(0)


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items; now and then others may run."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % SLICE == 0:
            give_way()


def in_slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items, some at a time; between two slices others may run."""
    for start in range(0, len(items), SLICE):
        began = time.thread_time()
        yield items[start : start + SLICE]
        spent = time.thread_time() - began
        if spent > HELD_UP_S:
            time.sleep(spent)
        elif start + SLICE < len(items):
            give_way()
