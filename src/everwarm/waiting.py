"""Waiting in line, and hearing that there is nothing to wait for any more. Nobody polls, nobody overtakes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class Cancellation:
    """Said once, by any thread; wakes whoever waits for something else meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = False
        self._sleepers: list[Callable[[], None]] = []

    def set(self) -> None:
        with self._lock:
            self._said = True
            sleepers = list(self._sleepers)
        for wake in sleepers:
            wake()

    def is_set(self) -> bool:
        return self._said

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called when it is said, or at once if it was said before."""
        with self._lock:
            self._sleepers.append(wake)
        if self._said:
            wake()
        try:
            yield
        finally:
            with self._lock:
                self._sleepers.remove(wake)


@dataclass(slots=True, eq=False)
class _Place(Generic[T]):
    """Somebody's place in a line."""

    one: T
    priority: int
    woken: threading.Event = field(default_factory=threading.Event)


class Line(Generic[T]):
    """Whoever is first goes in as soon as `fits(inside, one)`: the more important first, of equals who came first.
    Without `fits`, one at a time.
    """

    __slots__ = ("_fits", "_lock", "_waiting", "inside")

    def __init__(self, fits: Callable[[Sequence[T], T], bool] | None = None) -> None:
        self._fits = fits
        self._lock = threading.Lock()
        self._waiting: list[_Place[T]] = []  # in their order
        self.inside: list[T] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, one: T, priority: int = 0, cancelled: Cancellation | None = None) -> bool:
        """Wait until it is in. False if that was cancelled."""
        place = _Place(one, priority)
        with self._lock:
            before = next((i for i, other in enumerate(self._waiting) if other.priority < priority), len(self._waiting))
            self._waiting.insert(before, place)
            self._let_in()
        try:
            with (cancelled or Cancellation()).waking(place.woken.set):
                place.woken.wait()
        except BaseException:  # Ctrl-C
            if not self._give_up(place):
                self.leave(one)
            raise
        return not self._give_up(place)

    def try_enter(self, one: T) -> bool:
        """Go in if that is possible at once."""
        with self._lock:
            if self._waiting or not self._has_room_for(one):
                return False
            self.inside.append(one)
            return True

    def leave(self, one: T) -> None:
        """Once is enough."""
        with self._lock:
            if one in self.inside:
                self.inside.remove(one)
                self._let_in()

    def _give_up(self, place: _Place[T]) -> bool:
        """Whether it was still waiting."""
        with self._lock:
            if place not in self._waiting:
                return False
            self._waiting.remove(place)
            self._let_in()  # it may have kept others from going in
            return True

    def _let_in(self) -> None:
        while self._waiting and self._has_room_for(self._waiting[0].one):
            place = self._waiting.pop(0)
            self.inside.append(place.one)
            place.woken.set()

    def _has_room_for(self, one: T) -> bool:
        return not self.inside if self._fits is None else self._fits(self.inside, one)
