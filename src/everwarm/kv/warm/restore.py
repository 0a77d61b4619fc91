"""Bringing blocks back from disk into memory, several at a time, each verified before its first use.

Reading is not always the shorter way: a few tokens on a slow disk are sooner computed again. Both speeds are measured
as they occur. Only reading counts as reading, not the wait for memory before it; and each time reading is refused, its
estimate shrinks, so that a disk that was busy once is tried again.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait

from everwarm.errors import CapacityError
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import SequenceKV
from everwarm.kv.index.tree import Node
from everwarm.kv.receipt import Cause, Receipt, Why
from everwarm.kv.warm.tier import WarmTier

READERS = 2
FORGET = 0.8
"""What is left of the estimate of reading after a refusal: a disk ten times too slow is tried every eleventh time."""
MOST_JUMP = 4.0
"""A measurement counts as at most so many times the estimate: one hiccup is not the disk's speed."""
_executor: ThreadPoolExecutor | None = None


class Speed:
    """Seconds per unit, as measured: a mean in which the latest counts a quarter."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def measured(self, units: float, seconds: float) -> None:
        if units > 0:
            each = seconds / units
            if self.seconds is None:
                self.seconds = each
            else:
                self.seconds = 0.75 * self.seconds + 0.25 * min(each, MOST_JUMP * self.seconds)

    def doubt(self) -> None:
        """It was relied on without being measured again."""
        if self.seconds is not None:
            self.seconds *= FORGET


class Restorer:
    """Restores blocks of one model, and knows how fast that is."""

    def __init__(self, index: Index, tier: WarmTier | None, *, always: bool = False) -> None:
        """`always`: also what could be computed sooner."""
        self._index, self._tier, self._always = index, tier, always
        self.read_speed, self.compute_speed = Speed(), Speed()  # seconds per block; per token

    def restore(
        self, kv: SequenceKV, nodes: list[Node], receipt: Receipt, *, always: bool = False
    ) -> tuple[int, Why | None]:
        """Make `nodes` the blocks of an empty sequence, reading what is not in memory. Returns how many of them it has,
        and why not more.
        """
        started = time.perf_counter()
        index, pool = self._index, self._index.pool
        held = index.hold_all(nodes)
        missing = [i for i in range(len(nodes)) if i not in held]
        usable = len(nodes)
        why: Why | None = None
        if missing and not always and not self._worth_it(len(missing), len(nodes) - missing[0]):
            usable, why = missing[0], Why(Cause.RECOMPUTED, "computing is faster than reading")
            missing = []
        read: list[int] = []
        try:
            if missing:
                try:
                    read = pool.allocate_many(len(missing), clear=False)
                except CapacityError as full:
                    usable, why, missing = missing[0], Why(Cause.RECOMPUTED, str(full)), []
            reading = time.perf_counter()
            failures = self._read_all([(nodes[i], block) for i, block in zip(missing, read, strict=True)], receipt)
            reading_s = time.perf_counter() - reading
        except BaseException:
            pool.drop([*held.values(), *read])
            raise
        done = 0
        for i, block, failure in zip(missing, read, failures, strict=True):
            if failure is None:
                done += 1
                held[i] = index.made_hot(nodes[i], block)
            else:
                pool.drop([block])
                if i < usable:
                    usable, why = i, failure
        kv.adopt([held.pop(i) for i in range(usable)], usable * index.block_tokens)
        pool.drop(held.values())
        if done:
            self.read_speed.measured(done, reading_s)
            self._count(receipt, done, time.perf_counter() - started)
        receipt.tier = "warm" if any(i < usable for i in missing) else "hot"
        return usable, why

    def _count(self, receipt: Receipt, blocks: int, seconds: float) -> None:
        counts, size = self._index.counts, blocks * self._index.block_bytes
        receipt.restored_blocks, receipt.restored_bytes, receipt.restore_s = blocks, size, seconds
        counts.events["restored_blocks"] += blocks
        counts.events["restored_bytes"] += size
        counts.seconds["restore"] += seconds

    def _worth_it(self, missing: int, from_gap: int) -> bool:
        """Whether reading the missing blocks is faster than computing all blocks from the first missing one on."""
        read, compute = self.read_speed.seconds, self.compute_speed.seconds
        if self._always or read is None or compute is None:
            return True
        if missing * read <= from_gap * self._index.block_tokens * compute:
            return True
        self.read_speed.doubt()
        return False

    def _read_all(self, wanted: list[tuple[Node, int]], receipt: Receipt) -> list[Why | None]:
        """For each block None, or what was wrong with it."""
        failures: list[Why | None] = [None] * len(wanted)
        spent: list[tuple[float, float]] = []  # reading, verifying
        readers = READERS if len(wanted) >= 4 else 1
        stripes = [range(first, len(wanted), readers) for first in range(readers)]

        def read_stripe(numbers: range) -> None:  # a few long jobs: handing over each block costs as much as verifying
            for number in numbers:
                started = time.perf_counter()
                verifying, failures[number] = self._read(*wanted[number])
                spent.append((time.perf_counter() - started - verifying, verifying))

        others = [_readers().submit(read_stripe, stripe) for stripe in stripes[1:]]
        try:
            read_stripe(stripes[0])
        finally:
            wait(others)  # they write into blocks of the pool
        for other in others:
            other.result()
        receipt.read_s, receipt.verify_s = sum(each[0] for each in spent), sum(each[1] for each in spent)
        return failures

    def _read(self, node: Node, block: int) -> tuple[float, Why | None]:
        if self._tier is None:  # dropped from memory between the look-up and now
            return 0.0, node.lost or Why(Cause.EVICTED, "nothing is saved")
        return self._tier.fetch(node, block)


def _readers() -> ThreadPoolExecutor:
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(READERS, "everwarm-reader")
    return _executor
