"""Room in the KV budget, handed out in the order of asking: nobody restores or computes what can't stay in memory.

How much a request will need is unknown; it asks for its prompt and a little more. If that was too little, the engine
preempts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from everwarm.errors import CancelledError, CapacityError
from everwarm.kv.pool import BlockPool
from everwarm.waiting import Cancellation, Line


@dataclass(slots=True, eq=False)
class Room:
    """Somebody's share of the budget, while it is held."""

    admission: "Admission"
    priority: int
    cancelled: Cancellation
    blocks: int = 0

    def enter(self, tokens: int) -> None:
        """Wait until so many tokens, and a little more, fit beside those that run. Raises CapacityError if there can
        never be enough room, CancelledError.
        """
        self.admission.enter(self, tokens)

    def grow(self, blocks: int) -> None:
        """It has become more than was asked for: nobody new comes in for it."""
        self.blocks = max(self.blocks, blocks)

    def leave(self) -> None:
        """Give it up; once is enough."""
        self.admission.leave(self)


class Admission:
    """Who has room, and who waits for it."""

    def __init__(self, pool: BlockPool, most_running: int) -> None:
        self._pool = pool
        self._most_running = most_running
        self._line = Line[Room](self._fits)

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
        room.blocks = -(-tokens // self._pool.block_tokens) + 1
        most = self._pool.most_blocks
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
        most = self._pool.most_blocks
        return most is None or not inside or sum(one.blocks for one in inside) + room.blocks <= most
