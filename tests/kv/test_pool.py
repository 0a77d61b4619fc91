"""Blocks in memory: owners, copies before writing, the budget, and memory that goes back."""

import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.errors import CapacityError
from everwarm.kernels.backend import BlockMemory
from everwarm.kernels.native import NativeBlocks
from everwarm.kv.index.pool import BlockPool, HeapBlocks, SequenceKV


def native() -> NativeBlocks:
    return NativeBlocks([(1, 32, 32, False)] * 2, "f16")


def heap() -> HeapBlocks:
    return HeapBlocks(64, 512)


@pytest.fixture(params=[native, heap])
def memory(request: pytest.FixtureRequest) -> BlockMemory:
    make: Callable[[], BlockMemory] = request.param
    return make()


class Reclaim:
    """A `Reclaimer` that does as the test says."""

    def __init__(self) -> None:
        self.reclaim: Callable[[int], None] = lambda size: None
        self.wait: Callable[[], bool] = lambda: False


def pool_of(memory: BlockMemory, blocks: int, reclaimer: Reclaim | None = None) -> BlockPool:
    return BlockPool(memory, blocks * memory.block_bytes, reclaimer)


def test_a_block_goes_when_its_last_owner_does(memory: BlockMemory) -> None:
    pool = BlockPool(memory)
    block = pool.allocate()
    assert pool.hold(block) == block
    assert (pool.owners(block), pool.in_use, pool.ledger.used) == (2, 1, memory.block_bytes)
    pool.drop([block])
    assert (pool.owners(block), memory.in_use) == (1, 1)
    pool.drop([block])
    assert (pool.owners(block), pool.in_use, memory.in_use) == (0, 0, 0)
    with pytest.raises((KeyError, IndexError)):
        pool.read(block)


def test_a_fresh_block_is_clear_also_where_memory_is_used_again(memory: BlockMemory) -> None:
    pool = BlockPool(memory)
    for _ in range(3):
        blocks = pool.allocate_many(4)
        for block in blocks:
            assert not pool.read(block).any()
            pool.read(block)[:] = 255
        pool.drop(blocks)


def test_a_shared_block_is_copied_before_it_is_written(memory: BlockMemory) -> None:
    pool, size = BlockPool(memory), memory.block_tokens
    first, second = SequenceKV(pool, 10 * size), SequenceKV(pool, 10 * size)
    first.reserve(size + 5)
    first.length = size + 5
    for number, block in enumerate(first.blocks):
        pool.read(block)[:] = number + 1
    second.blocks, second.length = [pool.hold(block) for block in first.blocks], size + 3
    second.reserve(size + 4)
    assert second.blocks[0] == first.blocks[0]  # nothing is written in it any more
    assert second.blocks[1] != first.blocks[1]
    assert (pool.read(second.blocks[1]) == 2).all()
    pool.read(second.blocks[1])[:] = 9
    assert (pool.read(first.blocks[1]) == 2).all()
    assert [pool.owners(block) for block in (*first.blocks, second.blocks[1])] == [2, 1, 1]
    before = list(first.blocks)
    first.reserve(size + 9)
    assert first.blocks == before  # its own again
    first.close()
    second.close()
    assert pool.in_use == memory.in_use == 0


def test_nothing_is_copied_where_nothing_will_be_written(memory: BlockMemory) -> None:
    pool, size = BlockPool(memory), memory.block_tokens
    kv = SequenceKV(pool, 10 * size)
    kv.reserve(2 * size)
    kv.length = 2 * size
    held = [pool.hold(block) for block in kv.blocks]
    kv.reserve(2 * size)
    kv.reserve(3 * size)
    assert kv.blocks[:2] == held
    kv.truncate(size + 1)
    assert kv.blocks == held
    kv.reserve(size + 1)
    assert kv.blocks == held
    kv.truncate(size)
    assert (kv.blocks, pool.owners(held[1])) == (held[:1], 1)
    kv.truncate(0)
    assert (kv.blocks, kv.length) == ([], 0)
    pool.drop(held)
    assert pool.in_use == 0


def test_a_sequence_is_never_longer_than_its_capacity(memory: BlockMemory) -> None:
    kv = SequenceKV(BlockPool(memory), 10)
    kv.reserve(10)
    with pytest.raises(AssertionError, match="11 tokens in a KV cache for 10"):
        kv.reserve(11)


def test_over_budget_all_blocks_are_given_or_none(memory: BlockMemory) -> None:
    reclaimer, size = Reclaim(), memory.block_bytes
    pool = pool_of(memory, 5, reclaimer)
    asked: list[int] = []
    reclaimer.reclaim = asked.append
    kept = pool.allocate_many(3)
    with pytest.raises(CapacityError, match=f"{5 * size:,} bytes {3 * size:,} are in use, and 4 more.*--kv-budget"):
        pool.allocate_many(4)
    assert (set(asked), pool.in_use, memory.in_use) == ({2 * size}, 3, 3)
    reclaimer.reclaim = lambda wanted: pool.drop(kept[: wanted // size])
    assert len(pool.allocate_many(4)) == 4
    assert pool.in_use == 5


def test_a_copy_that_does_not_fit_leaves_the_sequence_as_it_was(memory: BlockMemory) -> None:
    pool = pool_of(memory, 1)
    kv = SequenceKV(pool, 1000)
    kv.reserve(5)
    kv.length = 5
    shared = pool.hold(kv.blocks[0])
    with pytest.raises(CapacityError):
        kv.reserve(6)
    assert (kv.blocks, pool.owners(shared)) == ([shared], 2)


@pytest.mark.parametrize("last", [True, False])
def test_it_waits_while_waiting_may_help(memory: BlockMemory, last: bool) -> None:
    """As for blocks that are being written: soon someone else will drop them. Perhaps the last of them just before
    there was nothing to wait for any more.
    """
    reclaimer = Reclaim()
    pool = pool_of(memory, 2, reclaimer)
    held = pool.allocate_many(2)
    answers = [True, last, False]

    def wait() -> bool:
        if len(answers) == 2:
            pool.drop([held.pop()])
        return answers.pop(0)

    reclaimer.wait = wait
    assert pool.allocate() not in held
    assert answers == [False]
    with pytest.raises(CapacityError):
        pool.allocate()


def test_what_is_kept_for_later_never_exceeds_the_budget() -> None:
    memory = native()
    pool = pool_of(memory, 16)
    draw = random.Random(0)
    held: list[int] = []
    for _ in range(500):
        if held and draw.random() < 0.5:
            pool.drop([held.pop(draw.randrange(len(held)))])
        elif len(held) < 16:
            held += pool.allocate_many(draw.randint(1, 16 - len(held)), clear=draw.random() < 0.5)
        assert memory.in_use == len(held)
        assert memory.in_use + memory.spare <= 16
        assert memory.spare <= 2  # an eighth


def resident_bytes() -> int:
    """Of private memory."""
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index("RssAnon:") + 1])


def test_trimmed_memory_goes_back_to_the_system_and_comes_back_clear() -> None:
    memory = NativeBlocks([(4, 64, 64, False)] * 16, "f16")
    before = resident_bytes()
    blocks = [memory.allocate() for _ in range((200 << 20) // memory.block_bytes)]
    for block in blocks:
        memory.host_view(block)[:] = 7
    full = resident_bytes() - before
    assert full > 190 << 20
    for block in blocks[::2]:
        memory.release(block)
    assert memory.spare == len(blocks[::2])
    for block in blocks[1::2]:
        memory.release(block)
    assert resident_bytes() - before > 190 << 20  # released blocks keep their memory
    memory.trim(3)
    assert (memory.spare, memory.in_use) == (3, 0)
    assert resident_bytes() - before < 20 << 20
    for _ in range(8):
        assert not memory.host_view(memory.allocate()).any()


def test_without_clearing_spare_memory_is_used_as_it_is() -> None:
    """For blocks that are read or copied as a whole: filling them twice would cost."""
    memory = native()
    block = memory.allocate()
    memory.host_view(block)[:] = 5
    memory.release(block)
    again = memory.allocate(False)
    assert (again, memory.spare) == (block, 0)
    assert (memory.host_view(again) == 5).all()


def test_handles_that_are_not_in_use_are_refused() -> None:
    memory = native()
    block = memory.allocate()
    memory.release(block)
    for bad in (block, -1, 10**6):
        for call in (memory.release, memory.host_view):
            with pytest.raises(IndexError, match="is not allocated"):
                call(bad)
    assert (memory.in_use, memory.spare) == (0, 1)


@settings(max_examples=50)
@given(st.data())
def test_any_sequence_of_operations_against_a_dict(data: st.DataObject) -> None:
    """Owners and bytes of every block."""
    memory = native()
    pool = BlockPool(memory)
    model: dict[int, list[int]] = {}  # block: owners, what is in it
    for step in range(data.draw(st.integers(1, 40))):
        deed = data.draw(st.sampled_from(["allocate", "hold", "drop", "copy", "write", "trim"]))
        block = data.draw(st.sampled_from(sorted(model))) if model else None
        match deed:
            case "trim":
                memory.trim(data.draw(st.integers(0, 3)))
            case "hold" if block is not None:
                pool.hold(block)
                model[block][0] += 1
            case "drop" if block is not None:
                pool.drop([block])
                model[block][0] -= 1
                if not model[block][0]:
                    del model[block]
            case "copy" if block is not None:
                model[pool.copy(block)] = [1, model[block][1]]
            case "write" if block is not None:
                pool.read(block)[:] = step % 256
                model[block][1] = step % 256
            case "allocate":
                block = pool.allocate()
                assert block not in model
                model[block] = [1, 0]
        assert {block: pool.owners(block) for block in model} == {block: owners for block, (owners, _) in model.items()}
        assert pool.in_use == memory.in_use == len(model)
        assert all((pool.read(block) == value).all() for block, (_, value) in model.items())


def test_threads_that_hold_and_drop_leave_nothing_behind() -> None:
    memory = native()
    pool = pool_of(memory, 1000)
    shared = pool.allocate()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            blocks = pool.allocate_many(draw.randint(1, 5))
            for block in blocks:
                pool.read(block)[:] = seed
            pool.hold(shared)
            assert all((np.asarray(pool.read(block)) == seed).all() for block in blocks)
            pool.drop([*blocks, shared])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (pool.in_use, pool.owners(shared)) == (1, 1)
