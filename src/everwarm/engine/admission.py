"""Room in the KV budget, handed out in the order of asking: nobody restores or computes what can't stay in memory.

What a request may need at most is unknown; it asks for its prompt and a little more. If that was too little, the engine
preempts.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from everwarm.errors import CancelledError, CapacityError


@dataclass(slots=True, eq=False)
class Room:
    """Somebody's share of the budget, while it is held."""

    admission: "Admission"
    priority: int
    cancelled: Callable[[], bool]
    blocks: int = 0

    def enter(self, blocks: int) -> None:
        """Wait for so much room. Raises CapacityError if there can never be enough, CancelledError."""
        self.blocks = blocks
        self.admission.enter(self)

    def grow(self, blocks: int) -> None:
        """It has become more than was asked for: nobody new comes in for it."""
        self.blocks = max(self.blocks, blocks)

    def leave(self) -> None:
        """Give it up; once is enough."""
        self.admission.leave(self)


class Admission:
    """Who is inside, and who waits."""

    def __init__(self, most_blocks: Callable[[], int | None], most_running: int) -> None:
        self._most_blocks = most_blocks
        self._most_running = most_running
        self._changed = threading.Condition()
        self._inside: list[Room] = []
        self._waiting: list[Room] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def inside(self) -> int:
        return len(self._inside)

    def enter(self, room: Room) -> None:
        with self._changed:
            most = self._most_blocks()
            if most is not None and room.blocks > most:
                raise CapacityError(
                    f"{room.blocks} blocks of KV are needed, the budget holds {most}: give a larger --kv-budget"
                )
            self._waiting.append(room)
            try:
                while not self._may_enter(room):
                    if room.cancelled():
                        raise CancelledError("cancelled while waiting for memory")
                    self._changed.wait(0.05)
                self._inside.append(room)
            finally:
                self._waiting.remove(room)
                self._changed.notify_all()

    def leave(self, room: Room) -> None:
        with self._changed:
            if room in self._inside:
                self._inside.remove(room)
                self._changed.notify_all()

    def _may_enter(self, room: Room) -> bool:
        first = max(self._waiting, key=lambda one: one.priority)  # of equals, who came first
        if first is not room or len(self._inside) >= self._most_running:
            return False
        most = self._most_blocks()
        return most is None or not self._inside or sum(one.blocks for one in self._inside) + room.blocks <= most
