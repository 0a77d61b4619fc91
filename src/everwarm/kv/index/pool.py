"""Blocks in memory, each with a count of its owners, under a byte budget; and sequences that grow in them.

A block that has more than one owner is never written: a sequence copies it first. When the budget is full, the
`Reclaimer` is asked to let go of blocks that no sequence uses.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from everwarm.errors import CapacityError
from everwarm.kernels.backend import U8, BlockMemory, HostBlocks

T = TypeVar("T")

MOST_SPARE = 512 << 20
"""Bytes of released memory that are kept for the next blocks: filling fresh memory takes twice as long or more."""


class Reclaimer(Protocol):
    """Whoever keeps blocks that no sequence uses, and can let go of them."""

    def reclaim(self, size: int) -> None:
        """Let go of so many bytes, if possible. Called with the ledger's lock held."""

    def wait(self) -> bool:
        """Wait until more can be let go of; False if nothing is on its way. Called without the lock."""


class Ledger:
    """What all blocks take, of whatever kind, under one budget. `lock` guards it, the pools, and all that is decided
    from their counts.
    """

    def __init__(self, budget: int | None = None, reclaimer: Reclaimer | None = None) -> None:
        self.lock = threading.RLock()
        self.budget = budget
        self.reclaimer = reclaimer
        self.used = 0  # bytes of blocks
        self.charged = 0  # bytes of what is needed to find blocks
        self.pools: list[BlockPool] = []

    @property
    def most(self) -> int | None:
        """Bytes of blocks that fit beside what is needed to find them, which is charged with half of it at most."""
        return None if self.budget is None else self.budget - min(self.charged, self.budget // 2)

    @property
    def free(self) -> int | None:
        return None if self.most is None else self.most - self.used

    def make_fit(self, size: int) -> bool:
        """Whether so many more bytes fit; what nobody uses is let go of for them. With `lock` held."""
        free = self.free
        if free is not None and size > free:
            if self.reclaimer is not None:
                self.reclaimer.reclaim(size - free)
            free = self.free
            return free is None or size <= free
        return True

    def trim(self) -> None:
        """Memory that is kept for later counts, too. With `lock` held."""
        free = self.free
        if free is not None:
            for pool in self.pools:
                free -= pool.trim(max(0, free))


class BlockPool:
    """Who owns which block of one kind."""

    def __init__(
        self,
        memory: BlockMemory,
        budget: int | None = None,
        reclaimer: Reclaimer | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """With a `ledger`, the budget and the reclaimer are that one's."""
        self.memory = memory
        self.ledger = Ledger(budget, reclaimer) if ledger is None else ledger
        self.ledger.pools.append(self)
        self.lock = self.ledger.lock
        self.block_tokens, self.block_bytes = memory.block_tokens, memory.block_bytes
        self._owners: dict[int, int] = {}

    @property
    def _most_spare(self) -> int:
        budget = self.ledger.budget
        return min(MOST_SPARE, MOST_SPARE if budget is None else budget // 8) // self.block_bytes

    @property
    def in_use(self) -> int:
        return len(self._owners)

    def allocate(self, clear: bool = True) -> int:
        """A block with one owner. Raises CapacityError if the budget is taken by sequences that run."""
        return self.allocate_many(1, clear)[0]

    def allocate_many(self, count: int, clear: bool = True, wait: bool = True) -> list[int]:
        """All of them or none. With `wait` it may wait for blocks to be written: don't call it with `lock` held."""
        ledger, waited = self.ledger, wait
        while True:
            with self.lock:
                if ledger.make_fit(count * self.block_bytes):
                    return self._take(count, clear)
            if not waited:
                raise CapacityError(
                    f"KV budget: of {ledger.budget:,} bytes {ledger.used + ledger.charged:,} are in use, and {count} "
                    f"more blocks of {self.block_bytes:,} bytes are needed: give a larger --kv-budget"
                )
            # If not: the last that could help may have ended just now.
            waited = ledger.reclaimer is not None and ledger.reclaimer.wait()

    def _take(self, count: int, clear: bool) -> list[int]:
        blocks = [self.memory.allocate(clear) for _ in range(count)]
        self._owners.update(dict.fromkeys(blocks, 1))
        self.ledger.used += count * self.block_bytes
        self.ledger.trim()
        return blocks

    def trim(self, most: int) -> int:
        """Keep at most so many bytes of released memory for later; how many are kept. With `lock` held."""
        self.memory.trim(min(self._most_spare, most // self.block_bytes))
        return self.memory.spare * self.block_bytes

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
                    self.ledger.used -= self.block_bytes
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


@dataclass(frozen=True, slots=True)
class Windows:
    """Where layers keep keys and values of which they see only the last."""

    pool: BlockPool
    reach: int  # so many tokens back, the own one included

    def first(self, position: int) -> int:
        """The first block that a token at this position sees something of."""
        return max(0, position + 1 - self.reach) // self.pool.block_tokens

    def numbers(self, position: int) -> range:
        """The blocks that have to be there in order to go on at a position."""
        return range(self.first(position), -(-position // self.pool.block_tokens))


GONE = -1


class SequenceKV:
    """Keys and values of one sequence: it owns each of its blocks, perhaps together with others."""

    def __init__(
        self, pool: BlockPool, capacity: int, windows: Windows | None = None, states: BlockPool | None = None
    ) -> None:
        """`states`: where layers with a state keep it."""
        self.pool = pool
        self.capacity = capacity
        self.state = GONE  # that of `length` tokens, where the model has states; GONE: nothing was computed yet
        self._states = states
        self.length = 0
        self.blocks: list[int] = []
        self.windows: list[int] = []  # as many as `blocks`, where the model has windows; GONE: out of sight
        self._windows = windows
        self._seen = 0  # blocks of windows before this one are gone

    @property
    def size_bytes(self) -> int:
        size = len(self.blocks) * self.pool.block_bytes
        if self._windows is not None:
            size += sum(block != GONE for block in self.windows[self._seen :]) * self._windows.pool.block_bytes
        return size + (self._states.block_bytes if self._states is not None and self.state != GONE else 0)

    def reserve(self, tokens: int, wait: bool = True) -> None:
        """Blocks for this many tokens in all; those from `length` on belong to this sequence alone."""
        assert tokens <= self.capacity, f"{tokens} tokens in a KV cache for {self.capacity}"
        self._reserve(self.pool, self.blocks, tokens, wait)
        if self._windows is not None:
            self._forget_unseen(self._windows)
            self._reserve(self._windows.pool, self.windows, tokens, wait)
        if self._states is not None and tokens > self.length:
            self._own_state(self._states, wait)

    def _own_state(self, states: BlockPool, wait: bool) -> None:
        """The state is changed where it lies: somebody else's is copied first."""
        if self.state == GONE:
            assert not self.length, "a state was lost"
            self.state = states.allocate_many(1, wait=wait)[0]
        elif states.owners(self.state) > 1:
            shared, self.state = self.state, states.copy(self.state, wait)
            states.drop([shared])

    def _reserve(self, pool: BlockPool, blocks: list[int], tokens: int, wait: bool) -> None:
        size = pool.block_tokens
        first = self.length // size
        if self.length % size and tokens > self.length and pool.owners(blocks[first]) > 1:
            shared, blocks[first] = blocks[first], pool.copy(blocks[first], wait)
            pool.drop([shared])
        missing = -(-tokens // size) - len(blocks)
        if missing > 0:
            blocks += pool.allocate_many(missing, wait=wait)

    def _forget_unseen(self, windows: Windows) -> None:
        """One block more than is seen stays: a history may end at the last full block."""
        first = max(0, windows.first(self.length) - 1)
        if first > self._seen:
            windows.pool.drop(block for block in self.windows[self._seen : first] if block != GONE)
            self.windows[self._seen : first] = [GONE] * (first - self._seen)
            self._seen = first

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. Where there are windows, those before must still be seen."""
        assert 0 <= length <= self.length
        assert self._states is None or length in (0, self.length), "a state can't be taken back"
        self.length = length
        if not length:
            self._drop_state()
        kept = -(-length // self.pool.block_tokens)
        self._cut(kept)

    def _cut(self, kept: int) -> None:
        self.pool.drop(self.blocks[kept:])
        del self.blocks[kept:]
        if self._windows is not None:
            self._windows.pool.drop(block for block in self.windows[kept:] if block != GONE)
            del self.windows[kept:]

    def adopt(
        self, blocks: list[int], length: int, windows: Mapping[int, int] | None = None, state: int = GONE
    ) -> None:
        """Begin with blocks that are known and held for this sequence; those of windows by number."""
        assert not self.blocks, "only an empty sequence can begin"
        self.blocks, self.length = blocks, length
        self._adopt_windows(windows or {})
        self._drop_state()
        self.state = state

    def go_on_with(self, blocks: list[int], windows: Mapping[int, int] | None = None, state: int = GONE) -> None:
        """Take over full blocks that are known and held for this sequence: they hold what it would compute next. What
        it has of the first of them is given up; and its windows, for those that it needs from now on.
        """
        self._cut(self.length // self.pool.block_tokens)
        self.blocks += blocks
        self.length = len(self.blocks) * self.pool.block_tokens
        self._adopt_windows(windows or {})
        self._drop_state()
        self.state = state

    def use_state(self, block: int) -> None:
        """The same state, perhaps in another block, which is held for this sequence instead of its own."""
        self.state = block

    def _drop_state(self) -> None:
        if self._states is not None and self.state != GONE:
            self._states.drop([self.state])
            self.state = GONE

    def _adopt_windows(self, windows: Mapping[int, int]) -> None:
        if self._windows is not None:
            self._windows.pool.drop(block for block in self.windows if block != GONE)
            self.windows = [windows.get(number, GONE) for number in range(len(self.blocks))]
            self._seen = min(windows, default=0)

    def close(self) -> None:
        """Give the blocks back. What else owns them keeps them."""
        self._cut(0)
        self._drop_state()
        self.length = self._seen = 0


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
