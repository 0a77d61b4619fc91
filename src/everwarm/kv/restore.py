"""Bringing blocks back from disk into the pool, several at a time, each verified before its first use.

Reading is not always the shorter way: a few tokens on a slow disk are sooner computed again. Both speeds are measured
as they occur. Only reading counts as reading, not the wait for memory before it; and each time reading is refused, its
estimate shrinks, so that a disk that was busy once is tried again.
"""

import errno
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from everwarm.errors import CapacityError
from everwarm.kv.container import VersionError
from everwarm.kv.disk import BlockName, CorruptError
from everwarm.kv.pool import SequenceKV
from everwarm.kv.receipt import Receipt
from everwarm.kv.tree import Node

if TYPE_CHECKING:
    from everwarm.kv.store import AgentStore

READERS = 2
_executor: ThreadPoolExecutor | None = None


FORGET = 0.8
"""What is left of the estimate of reading after a refusal: a disk ten times too slow is tried every eleventh time."""
MOST_JUMP = 4.0
"""A measurement counts as at most so many times the estimate: one hiccup is not the disk's speed."""
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors that say nothing about the file."""


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


def restore(
    store: "AgentStore", kv: SequenceKV, nodes: list[Node], receipt: Receipt, *, always: bool = False
) -> tuple[int, str]:
    """Make `nodes` the blocks of an empty sequence, reading what is not in memory. Returns how many of them it has, and
    why not more. `always`: also what could be computed sooner.
    """
    started = time.perf_counter()
    with store.lock:
        held = {i: store.pool.hold(node.block) for i, node in enumerate(nodes) if node.block is not None}
    missing = [i for i in range(len(nodes)) if i not in held]
    usable, why = len(nodes), ""
    if missing and not always and not _worth_it(store, len(missing), len(nodes) - missing[0]):
        usable, why = missing[0], "computing is faster than reading"
        missing = []
    read: list[int] = []
    reading_s = 0.0
    try:
        if missing:
            try:
                read = store.pool.allocate_many(len(missing), clear=False)
            except CapacityError as full:
                usable, why, missing = missing[0], str(full), []
        reading = time.perf_counter()
        failures = _read_all(store, [(nodes[i], block) for i, block in zip(missing, read, strict=True)], receipt)
        reading_s = time.perf_counter() - reading
    except BaseException:
        store.pool.drop([*held.values(), *read])
        raise
    done = 0
    with store.lock:
        for i, block, error in zip(missing, read, failures, strict=True):
            if error is None:
                done += 1
                held[i] = _made_hot(store, nodes[i], block)
            else:
                store.pool.drop([block])
                if i < usable:
                    usable, why = i, error
    kv.blocks = [held.pop(i) for i in range(usable)]
    kv.length = usable * store.pool.block_tokens
    store.pool.drop(held.values())
    spent = time.perf_counter() - started
    if done:
        receipt.restored_blocks, receipt.restored_bytes = done, done * store.pool.block_bytes
        receipt.restore_s = spent
        store.read_speed.measured(done, reading_s)
        store.counters["restored_blocks"] += done
        store.counters["restored_bytes"] += receipt.restored_bytes
        store.seconds["restore"] += spent
    receipt.tier = "warm" if any(i < usable for i in missing) else "hot"
    return usable, why


def _worth_it(store: "AgentStore", missing: int, from_gap: int) -> bool:
    """Whether reading the missing blocks is faster than computing all blocks from the first missing one on."""
    read, compute = store.read_speed.seconds, store.compute_speed.seconds
    if store.restore == "always" or read is None or compute is None:
        return True
    if missing * read <= from_gap * store.pool.block_tokens * compute:
        return True
    store.read_speed.doubt()
    return False


def _read_all(store: "AgentStore", wanted: list[tuple[Node, int]], receipt: Receipt) -> list[str | None]:
    """For each block None, or what was wrong with its file."""
    spent: list[tuple[float, float]] = []  # reading, verifying

    def read(node: Node, block: int) -> str | None:
        assert node.parent is not None
        if store.disk is None:  # dropped from memory between the look-up and now
            return _lost(store, node, node.lost or "nothing is saved")
        started = time.perf_counter()
        try:
            disk, name = store.disk, BlockName(node.key, node.parent.key, node.tokens)
            verifying = store.pool.fill(block, lambda buffer: disk.get(name, [buffer]))
            spent.append((time.perf_counter() - started - verifying, verifying))
        except FileNotFoundError:
            return _lost(store, node, node.lost or "its file is gone")
        except CorruptError as error:
            moved = store.warm.quarantine(store.disk.block_path(node.key), str(error))
            return _lost(store, node, str(error), file_stays=not moved)
        except VersionError as error:
            store.warm.left_alone(store.disk.block_path(node.key), f"is of {error}")
            return _lost(store, node, str(error), file_stays=True)
        except OSError as error:
            store.counters["read_errors"] += 1
            why = error.strerror or str(error)
            return why if error.errno in PASSING else _lost(store, node, why, file_stays=True)
        return None

    failures: list[str | None] = [None] * len(wanted)
    readers = READERS if len(wanted) >= 4 else 1
    stripes = [range(first, len(wanted), readers) for first in range(readers)]

    def read_stripe(numbers: range) -> None:  # a few long jobs: handing over each block costs as much as verifying it
        for number in numbers:
            failures[number] = read(*wanted[number])

    others = [_readers().submit(read_stripe, stripe) for stripe in stripes[1:]]
    try:
        read_stripe(stripes[0])
    finally:
        wait(others)  # they write into blocks of the pool
    for other in others:
        other.result()
    receipt.read_s, receipt.verify_s = sum(one[0] for one in spent), sum(one[1] for one in spent)
    return failures


def _lost(store: "AgentStore", node: Node, why: str, *, file_stays: bool = False) -> str:
    """The block has to be computed again. What stays of its file counts, and is replaced or deleted later."""
    with store.lock:
        if node.on_disk:
            store.warm.gone(node, why, file_stays=file_stays)
            if file_stays:
                store.warm.garbage.add(node.key)
    return why


def _made_hot(store: "AgentStore", node: Node, block: int) -> int:
    """The tree owns the block, too; if another turn was faster, its block is the one."""
    if node.block is None:
        node.block = store.pool.hold(block)
        store.hot.touch([node])
    else:
        store.pool.hold(node.block)
        store.pool.drop([block])
    return node.block


def _readers() -> ThreadPoolExecutor:
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(READERS, "everwarm-reader")
    return _executor
