"""Blocks in memory, each with a count of its owners, under a byte budget; and sequences that grow in them.

A block that has more than one owner is never written: a sequence copies it first. When the budget is full, the
`Reclaimer` is asked to let go of blocks that no sequence uses.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from everwarm.errors import CapacityError
from everwarm.kernels.backend import U8, BlockMemory, HostBlocks

T = TypeVar("T")

MOST_SPARE = 512 << 20
"""Bytes of released memory that are kept for the next blocks: filling fresh memory takes twice as long or more."""


class Reclaimer(Protocol):
    """Whoever keeps blocks that no sequence uses, and can let go of them."""

    def reclaim(self, blocks: int) -> None:
        """Let go of so many blocks, if possible. Called with the pool's lock held."""

    def wait(self) -> bool:
        """Wait until more can be let go of; False if nothing is on its way. Called without the lock."""


class BlockPool:
    """Who owns which block. `lock` guards it, and all that is decided from its counts."""

    def __init__(self, memory: BlockMemory, budget: int | None = None, reclaimer: Reclaimer | None = None) -> None:
        self.memory = memory
        self.lock = threading.RLock()
        self._reclaimer = reclaimer
        self._charged = 0
        self.block_tokens, self.block_bytes = memory.block_tokens, memory.block_bytes
        self.resize(budget)
        self._owners: dict[int, int] = {}

    def resize(self, budget: int | None) -> None:
        self.budget = budget
        self._most_spare = min(MOST_SPARE, MOST_SPARE if budget is None else budget // 8) // self.block_bytes

    def charge(self, size: int) -> None:
        """So many bytes of the budget are taken by something else: by what is needed to find blocks."""
        self._charged = size

    @property
    def most_blocks(self) -> int | None:
        """What fits into the budget beside what is needed to find it, which is charged with half of it at most."""
        if self.budget is None:
            return None
        return (self.budget - min(self._charged, self.budget // 2)) // self.block_bytes

    @property
    def in_use(self) -> int:
        return len(self._owners)

    @property
    def bytes_in_use(self) -> int:
        return len(self._owners) * self.block_bytes

    def allocate(self, clear: bool = True) -> int:
        """A block with one owner. Raises CapacityError if the budget is taken by sequences that run."""
        return self.allocate_many(1, clear)[0]

    def allocate_many(self, count: int, clear: bool = True, wait: bool = True) -> list[int]:
        """All of them or none. With `wait` it may wait for blocks to be written: don't call it with `lock` held."""
        waited = wait
        while True:
            with self.lock:
                if self._make_fit(count):
                    return self._take(count, clear)
            if not waited:
                raise CapacityError(
                    f"KV budget: {self.budget:,} bytes hold {self.most_blocks} blocks of {self.block_tokens} tokens, "
                    f"{self.in_use} are in use and {count} more are needed: give a larger --kv-budget"
                )
            # If not: the last that could help may have ended just now.
            waited = self._reclaimer is not None and self._reclaimer.wait()

    def _make_fit(self, count: int) -> bool:
        most = self.most_blocks
        if most is not None and self.in_use + count > most:
            if self._reclaimer is not None:
                self._reclaimer.reclaim(self.in_use + count - most)
            return self.in_use + count <= most
        return True

    def _take(self, count: int, clear: bool) -> list[int]:
        blocks = [self.memory.allocate(clear) for _ in range(count)]
        self._owners.update(dict.fromkeys(blocks, 1))
        if (most := self.most_blocks) is not None:  # spare memory counts, too
            self.memory.trim(max(0, min(self._most_spare, most - self.in_use)))
        return blocks

    def hold(self, block: int) -> int:
        """One more owner."""
        with self.lock:
            self._owners[block] += 1
        return block

    def drop(self, blocks: Iterable[int]) -> None:
        """One owner fewer for each; what has none left is released."""
        with self.lock:
            for block in blocks:
                self._owners[block] -= 1
                if self._owners[block] == 0:
                    del self._owners[block]
                    self.memory.release(block)
            if self.memory.spare > self._most_spare:
                self.memory.trim(self._most_spare)

    def owners(self, block: int) -> int:
        with self.lock:
            return self._owners.get(block, 0)

    def read(self, block: int) -> U8:
        """Its bytes, to be read: in place where they are in the memory of the host, else a copy."""
        view = self.memory.host_view(block)
        if view is None:
            view = np.empty(self.block_bytes, np.uint8)
            self.memory.read_block(block, view)
        return view

    def fill(self, block: int, read: Callable[[U8], T]) -> T:
        """Have a function write all of its bytes, in place or into a buffer that is then copied; what it returns."""
        view = self.memory.host_view(block)
        buffer = np.empty(self.block_bytes, np.uint8) if view is None else view
        result = read(buffer)
        if view is None:
            self.memory.write_block(block, buffer)
        return result

    def copy(self, block: int, wait: bool = True) -> int:
        """Another block with the same bytes."""
        own = self.allocate_many(1, clear=False, wait=wait)[0]
        self.memory.copy_block(block, own)
        return own


class SequenceKV:
    """Keys and values of one sequence: it owns each of its blocks, perhaps together with others."""

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self.pool = pool
        self.capacity = capacity
        self.length = 0
        self.blocks: list[int] = []

    def reserve(self, tokens: int, wait: bool = True) -> None:
        """Blocks for this many tokens in all; those from `length` on belong to this sequence alone."""
        assert tokens <= self.capacity, f"{tokens} tokens in a KV cache for {self.capacity}"
        size = self.pool.block_tokens
        first = self.length // size
        if self.length % size and tokens > self.length and self.pool.owners(self.blocks[first]) > 1:
            shared, self.blocks[first] = self.blocks[first], self.pool.copy(self.blocks[first], wait)
            self.pool.drop([shared])
        missing = -(-tokens // size) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.allocate_many(missing, wait=wait)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length
        kept = -(-length // self.pool.block_tokens)
        self.pool.drop(self.blocks[kept:])
        del self.blocks[kept:]

    def adopt(self, blocks: list[int], length: int) -> None:
        """Begin with blocks that are known and held for this sequence."""
        assert not self.blocks, "only an empty sequence can begin"
        self.blocks, self.length = blocks, length

    def go_on_with(self, blocks: list[int]) -> None:
        """Take over full blocks that are known and held for this sequence: they hold what it would compute next. What
        it has of the first of them is given up.
        """
        full = self.length // self.pool.block_tokens
        self.pool.drop(self.blocks[full:])
        self.blocks[full:] = blocks
        self.length = len(self.blocks) * self.pool.block_tokens

    def close(self) -> None:
        """Give the blocks back. What else owns them keeps them."""
        self.pool.drop(self.blocks)
        self.blocks, self.length = [], 0


class HeapBlocks(HostBlocks):
    """A `BlockMemory` of plain bytes: for stores that are opened without a model."""

    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.layer_bytes = [block_bytes]
        self._blocks: dict[int, U8] = {}
        self._next = 0

    @property
    def in_use(self) -> int:
        return len(self._blocks)

    @property
    def spare(self) -> int:
        return 0

    def allocate(self, clear: bool = True) -> int:
        self._next += 1
        self._blocks[self._next] = (np.zeros if clear else np.empty)(self.block_bytes, np.uint8)
        return self._next

    def release(self, block: int) -> None:
        del self._blocks[block]

    def trim(self, keep: int) -> None:
        """Memory goes back when a block is released."""

    def host_view(self, block: int) -> U8:
        return self._blocks[block]
