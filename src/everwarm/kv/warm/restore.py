"""Bringing blocks back from disk into memory, several at a time, each verified before its first use.

Reading is not always the shorter way: a few tokens on a slow disk are sooner computed again. Both speeds are measured
as they occur. Only reading counts as reading, not the wait for memory before it; and each time reading is refused, its
estimate shrinks, so that a disk that was busy once is tried again.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait

from everwarm.errors import CapacityError
from everwarm.kv.index.index import Index, Resume
from everwarm.kv.index.pool import GONE, SequenceKV
from everwarm.kv.index.tree import Node, is_hot
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


class _Held:
    """Blocks that are held for a sequence which is about to begin with them."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._blocks: dict[int, tuple[Node, int]] = {}
        self.read: set[int] = set()  # of these, those that came from disk
        self.read_bytes = 0

    def hold(self, nodes: list[Node]) -> list[Node]:
        """Hold what is in memory. Returns the others."""
        for node in nodes:
            if id(node) not in self._blocks and (block := self._index.hold(node)) is not None:
                self._blocks[id(node)] = node, block
        return [node for node in nodes if id(node) not in self._blocks]

    def add(self, node: Node, block: int) -> None:
        """It was read, and is held."""
        self._blocks[id(node)] = node, block
        self.read.add(id(node))
        self.read_bytes += self._index.pool_of(node).block_bytes

    def taken(self, plan: Resume) -> tuple[list[int], int, dict[int, int], int]:
        """What a sequence begins with. These blocks are its own from now on."""
        blocks = [self._blocks.pop(id(node))[1] for node in plan.path]
        windows = {number: self._blocks.pop(id(node))[1] for number, node in plan.windows.items()}
        state = GONE if plan.state is None else self._blocks.pop(id(plan.state))[1]
        return blocks, plan.position, windows, state

    def drop_rest(self) -> None:
        for node, block in self._blocks.values():
            self._index.drop(node, block)


class Restorer:
    """Restores blocks of one model, and knows how fast that is."""

    def __init__(self, index: Index, tier: WarmTier | None, *, always: bool = False) -> None:
        """`always`: also what could be computed sooner."""
        self._index, self._tier, self._always = index, tier, always
        self.read_speed, self.compute_speed = Speed(), Speed()  # seconds per byte; per token

    def restore(
        self, kv: SequenceKV, path: list[Node], wanted: int, receipt: Receipt, *, always: bool = False
    ) -> Why | None:
        """Let an empty sequence begin with the blocks of `path`, reading what is not in memory: as many tokens as
        possible, at most `wanted`. Returns why not all of them.
        """
        started = time.perf_counter()
        index, held = self._index, _Held(self._index)
        failed: set[int] = set()
        why: Why | None = None
        try:
            while True:
                with index.lock:
                    plan = index.resume(path, wanted, without=failed)
                    if why is None and not always and any(node.block is None for node in plan.nodes):
                        hot = index.resume(path, wanted, is_hot)
                        if not self._worth_it(plan, hot):
                            plan, why = hot, Why(Cause.RECOMPUTED, "computing is faster than reading")
                    missing = held.hold(plan.nodes)
                if not missing:
                    break
                problem = self._fetch(missing, held, failed, receipt)
                why = why or problem
            kv.adopt(*held.taken(plan))
        finally:
            held.drop_rest()
        if held.read_bytes:
            receipt.restored_blocks = len(held.read)
            self._count(receipt, held.read_bytes, time.perf_counter() - started)
        receipt.tier = "warm" if any(id(node) in held.read for node in plan.nodes) else "hot"
        return why

    def _fetch(self, nodes: list[Node], held: "_Held", failed: set[int], receipt: Receipt) -> Why | None:
        """Read nodes into memory. Those that can't be had are added to `failed`. Returns what went wrong with the first
        of these.
        """
        index = self._index
        wanted: list[tuple[Node, int]] = []
        try:
            for kind, pool in index.pools.items():
                of_kind = [node for node in nodes if node.kind == kind]
                wanted += zip(of_kind, pool.allocate_many(len(of_kind), clear=False), strict=True)
            reading = time.perf_counter()
            if self._tier is not None:
                self._tier.fetch_ahead(nodes)
            failures = self._read_all(wanted, receipt)
            reading_s = time.perf_counter() - reading
        except BaseException as error:
            for node, block in wanted:
                index.drop(node, block)
            if not isinstance(error, CapacityError):
                raise
            failed.update(map(id, nodes))
            return Why(Cause.RECOMPUTED, str(error))
        done = 0
        why: Why | None = None
        for (node, block), failure in zip(wanted, failures, strict=True):
            if failure is None:
                done += index.pool_of(node).block_bytes
                held.add(node, index.made_hot(node, block))
            else:
                index.drop(node, block)
                failed.add(id(node))
                why = why or failure
        self.read_speed.measured(done, reading_s)
        return why

    def _count(self, receipt: Receipt, size: int, seconds: float) -> None:
        counts = self._index.counts
        receipt.restored_bytes, receipt.restore_s = size, seconds
        counts.events["restored_blocks"] += receipt.restored_blocks
        counts.events["restored_bytes"] += size
        counts.seconds["restore"] += seconds

    def _worth_it(self, plan: Resume, hot: Resume) -> bool:
        """Whether reading what is missing is faster than computing what memory alone would leave to be computed."""
        read, compute = self.read_speed.seconds, self.compute_speed.seconds
        if self._always or read is None or compute is None:
            return True
        missing = sum(self._index.pool_of(node).block_bytes for node in plan.nodes if node.block is None)
        if missing * read <= (plan.position - hot.position) * compute:
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
        receipt.read_s += sum(each[0] for each in spent)
        receipt.verify_s += sum(each[1] for each in spent)
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
