"""Room in the KV budget, handed out in the order of asking: nobody restores or computes what can't stay in memory.

What a request may need at most is unknown; it asks for its prompt and a little more. If that was too little, the engine
preempts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everwarm.errors import CancelledError, CapacityError
from everwarm.waiting import Cancellation, Line


@dataclass(slots=True, eq=False)
class Room:
    """Somebody's share of the budget, while it is held."""

    admission: "Admission"
    priority: int
    cancelled: Cancellation
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
        self._line = Line[Room](self._fits)

    @property
    def waiting(self) -> int:
        return self._line.waiting

    @property
    def inside(self) -> int:
        return len(self._line.inside)

    def enter(self, room: Room) -> None:
        most = self._most_blocks()
        if most is not None and room.blocks > most:
            raise CapacityError(
                f"{room.blocks} blocks of KV are needed, the budget holds {most}: give a larger --kv-budget"
            )
        if not self._line.enter(room, room.priority, room.cancelled):
            raise CancelledError("cancelled while waiting for memory")

    def leave(self, room: Room) -> None:
        self._line.leave(room)

    def _fits(self, inside: Sequence[Room], room: Room) -> bool:
        if len(inside) >= self._most_running:
            return False
        most = self._most_blocks()
        return most is None or not inside or sum(one.blocks for one in inside) + room.blocks <= most
