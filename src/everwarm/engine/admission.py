"""Room in the KV budget, handed out in the order of asking: nobody restores or computes what can't stay in memory.

How much a request will need is unknown; it asks for its prompt and a little more. If that was too little, the engine
preempts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from everwarm.engine.budget import Budget
from everwarm.errors import CancelledError
from everwarm.waiting import Cancellation, Line


@dataclass(slots=True, eq=False)
class Room:
    """Somebody's share of the budget, while it is held."""

    admission: "Admission"
    priority: int
    cancelled: Cancellation
    size_bytes: int = 0

    def enter(self, tokens: int) -> None:
        """Wait until so many tokens, and a little more, fit beside those that run. Raises CapacityError if there can
        never be enough room, CancelledError.
        """
        self.admission.enter(self, tokens)

    def grow(self, size_bytes: int) -> None:
        """It has become more than was asked for: nobody new comes in for it."""
        self.size_bytes = max(self.size_bytes, size_bytes)

    def leave(self) -> None:
        """Give it up; once is enough."""
        self.admission.leave(self)


class Admission:
    """Who has room, and who waits for it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._line = Line[Room](budget.fits)

    @property
    def waiting(self) -> int:
        return self._line.waiting

    @property
    def inside(self) -> int:
        return len(self._line.inside)

    @contextmanager
    def room(self, tokens: int, priority: int, cancelled: Cancellation) -> Iterator[Room]:
        """Wait for room as `Room.enter` does; it is given up at the end."""
        room = Room(self, priority, cancelled)
        room.enter(tokens)
        try:
            yield room
        finally:
            room.leave()

    def enter(self, room: Room, tokens: int) -> None:
        room.size_bytes = self._budget.bytes_for(tokens)
        if not self._line.enter(room, room.priority, room.cancelled):
            raise CancelledError("cancelled while waiting for memory")

    def leave(self, room: Room) -> None:
        self._line.leave(room)
