"""What fits into the KV budget at once."""

from collections.abc import Sequence
from typing import Protocol

from everwarm.errors import CapacityError
from everwarm.kv.index.index import Index


class TakesMemory(Protocol):
    """Something that takes up memory for blocks."""

    size_bytes: int


class Budget:
    """The bytes of blocks that fit into memory, and how many sequences are computed at once."""

    def __init__(self, index: Index, most_running: int) -> None:
        self._index = index
        self._most_running = most_running

    def bytes_for(self, tokens: int) -> int:
        """What so many tokens and a little more take. Raises CapacityError if there can never be enough."""
        needed, most = self._index.bytes_for(tokens), self._index.most_bytes
        if most is not None and needed > most:
            raise CapacityError(
                f"{needed:,} bytes of KV are needed for {tokens:,} tokens, the budget holds {most:,}: give a larger "
                "--kv-budget"
            )
        return needed

    def fits(self, inside: Sequence[TakesMemory], new: TakesMemory) -> bool:
        """Whether another one fits beside those that are inside. One alone always does."""
        if len(inside) >= self._most_running:
            return False
        most = self._index.most_bytes
        return most is None or not inside or sum(one.size_bytes for one in inside) + new.size_bytes <= most
