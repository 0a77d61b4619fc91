"""Reading or computing: what is measured, what is compared, and that a disk that was slow once is tried again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.kv.receipt import Why
from everwarm.kv.store import AgentStore
from everwarm.kv.warm import restore
from everwarm.kv.warm.restore import Speed
from kv.fake import BLOCK_TOKENS, open_store, talk
from kv.simulated_disk import UnsyncedFiles, memory_directory

HISTORY = list(range(32))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentStore]:
    store = open_store(tmp_path, files=UnsyncedFiles(), restore="auto")
    yield store
    store.close()


def measure(store: AgentStore, read_s: float, compute_s: float) -> None:
    """Seconds per block."""
    store.restorer.read_speed.seconds = read_s / store.index.block_bytes
    store.restorer.compute_speed.seconds = compute_s / BLOCK_TOKENS


def test_what_is_sooner_computed_is_not_read(store: AgentStore) -> None:
    talk(store, "alice", HISTORY)
    store.evict("alice")
    measure(store, read_s=2.0, compute_s=1.0)
    receipt = talk(store, "alice", [*HISTORY, 1])
    assert (receipt.tier, receipt.reason) == ("cold", "computing is faster than reading")
    store.evict("alice")
    measure(store, read_s=1.0, compute_s=2.0)
    assert talk(store, "alice", [*HISTORY, 1, 2]).tier == "warm"


def test_after_some_refusals_the_disk_is_tried_again(store: AgentStore) -> None:
    talk(store, "alice", HISTORY)
    tiers = []
    measure(store, read_s=10.0, compute_s=1.0)
    for number in range(13):
        store.evict("alice")
        tiers.append(talk(store, "alice", [*HISTORY, number]).tier)
    assert tiers == ["cold"] * 11 + ["warm"] * 2  # it was fast after all


def test_one_gap_is_compared_with_computing_everything_behind_it(store: AgentStore) -> None:
    talk(store, "alice", HISTORY)
    with store.index.lock:
        assert store.index.cool(store.find("alice").chain()[0])
    measure(store, read_s=3.5, compute_s=1.0)  # one block to read, or four to compute
    receipt = talk(store, "alice", [*HISTORY, 1])
    assert (receipt.tier, receipt.restored_blocks, receipt.cached_tokens) == ("warm", 1, 32)
    with store.index.lock:
        assert store.index.cool(store.find("alice").chain()[3])
    measure(store, read_s=3.5, compute_s=1.0)  # one block to read, or one to compute
    receipt = talk(store, "alice", [*HISTORY, 1, 2])
    assert (receipt.tier, receipt.cached_tokens) == ("hot", 24)


def test_waiting_for_memory_does_not_count_as_reading(store: AgentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(store, "alice", HISTORY)
    store.evict("alice")
    now = [0.0]
    monkeypatch.setattr(restore.time, "perf_counter", lambda: now[0])
    allocate, read_all = store.index.pool.allocate_many, store.restorer._read_all

    def slow_allocate(count: int, clear: bool = True, wait: bool = True) -> list[int]:
        now[0] += 100.0
        return allocate(count, clear, wait)

    def timed_read(*arguments: object) -> list[Why | None]:
        now[0] += 4.0
        return read_all(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store.index.pool, "allocate_many", slow_allocate)
    monkeypatch.setattr(store.restorer, "_read_all", timed_read)
    with store.open_turn("alice", 100) as turn:
        receipt = turn.acquire([*HISTORY, 1])
    assert (receipt.restored_blocks, receipt.restore_s) == (4, 104.0)
    assert store.restorer.read_speed.seconds == 1.0 / store.index.block_bytes


def test_one_hiccup_is_not_the_speed_of_a_disk() -> None:
    speed = Speed()
    for _ in range(10):
        speed.measured(10, 0.01)
    speed.measured(10, 100.0)
    assert speed.seconds == pytest.approx(0.00175)
    for _ in range(40):  # it really has become slow
        speed.measured(10, 100.0)
    assert speed.seconds == pytest.approx(10, rel=0.01)
