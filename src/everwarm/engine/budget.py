"""What fits into the KV budget at once."""

from collections.abc import Sequence
from typing import Protocol

from everwarm.errors import CapacityError
from everwarm.kv.index.index import Index


class HasBlocks(Protocol):
    """Something that takes up blocks."""

    blocks: int


class Budget:
    """The blocks that fit into memory, and how many sequences are computed at once."""

    def __init__(self, index: Index, most_running: int) -> None:
        self._index = index
        self._most_running = most_running

    def blocks(self, tokens: int) -> int:
        """Blocks for so many tokens and a little more. Raises CapacityError if there can never be enough."""
        needed, most = -(-tokens // self._index.block_tokens) + 1, self._index.most_blocks
        if most is not None and needed > most:
            raise CapacityError(f"{needed} blocks of KV are needed, the budget holds {most}: give a larger --kv-budget")
        return needed

    def fits(self, inside: Sequence[HasBlocks], new: HasBlocks) -> bool:
        """Whether another one fits beside those that are inside. One alone always does."""
        if len(inside) >= self._most_running:
            return False
        most = self._index.most_blocks
        return most is None or not inside or sum(one.blocks for one in inside) + new.blocks <= most
