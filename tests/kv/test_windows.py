"""Layers with a window: what is kept of them, where a history can be gone on from, and what is dropped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.kv.marks import LAST_MESSAGES, Marks
from everwarm.kv.receipt import Cause
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.import_ import import_agent
from everwarm.kv.tools.verify import verify
from everwarm.types import Run
from kv import fake
from kv.audit import audit
from kv.fake import BLOCK_TOKENS, CAPACITY, MESSAGE_END, REACH, check, compute, disk, open_store, talk
from kv.kept_apart import EVERY, LONG, damage, files_of, opened, path_beside
from kv.simulated_disk import UnsyncedFiles


@pytest.fixture(autouse=True)
def windows() -> Iterator[None]:
    with fake.having("window"):
        yield


def window_files(store: AgentStore) -> int:
    return len(files_of(store, "window"))


def needed(*positions: int) -> int:
    """Blocks of windows for these positions."""
    return len(
        {
            n
            for position in positions
            for n in range(max(0, position + 1 - REACH) // BLOCK_TOKENS, -(-position // BLOCK_TOKENS))
        }
    )


def test_a_history_is_gone_on_from_at_its_end(store: AgentStore) -> None:
    talk(store, "alice", LONG)
    receipt = talk(store, "alice", [*LONG, 1, 1])
    assert (receipt.cached_tokens, receipt.known_tokens, receipt.cause) == (len(LONG), len(LONG), Cause.EXTENDED)
    store.evict("alice")
    assert talk(store, "alice", [*LONG, 1, 1, 1]).cached_tokens == len(LONG) + 2


def test_windows_are_kept_at_marks_and_nowhere_else(store: AgentStore) -> None:
    talk(store, "alice", LONG)
    store.flush()
    kept = needed(*range(EVERY, len(LONG), EVERY), len(LONG))
    assert window_files(store) == kept < len(LONG) // BLOCK_TOKENS
    windows = store.index.windows
    assert windows is not None
    assert windows.pool.in_use == kept


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize(
    ("at", "cached"), [(5 * EVERY, 5 * EVERY), (3 * EVERY + 1, 3 * EVERY), (3 * EVERY + 40, 3 * EVERY)]
)
def test_a_branch_begins_at_the_latest_mark(store: AgentStore, at: int, cached: int, restored: bool) -> None:
    talk(store, "alice", LONG)
    if restored:
        store.evict("alice")
    receipt = talk(store, "bob", [*LONG[:at], 1, 1])
    assert (receipt.cached_tokens, receipt.known_tokens) == (cached, at)
    assert at - cached < EVERY
    assert receipt.tier == ("warm" if restored else "hot")


def test_the_receipt_says_what_is_computed_again(store: AgentStore) -> None:
    talk(store, "alice", LONG)
    receipt = talk(store, "alice", [*LONG[: EVERY + 40], 1])
    assert receipt.cause is Cause.RECOMPUTED
    assert receipt.reason == "known up to token 104, it can be gone on from 64: 40 tokens are computed again"


def test_ends_of_messages_are_marks(store: AgentStore) -> None:
    messages = [[20 + number] * 9 + [MESSAGE_END] for number in range(8)]
    history = [token for message in messages for token in message]
    talk(store, "alice", history, [5, 5])
    ends = [10 * (number + 1) for number in range(8)]
    for number in range(8):
        edited = talk(store, f"edit {number}", [*history[: ends[number] - 10], 7, 7])
        if number == 0:
            assert edited.cached_tokens == 0
        elif number == 1 or number > 8 - LAST_MESSAGES:
            assert edited.cached_tokens == ends[number - 1], f"message {number}"


def test_old_ends_are_dropped_as_the_history_grows(store: AgentStore) -> None:
    history = list(LONG[:20])
    for number in range(60):
        history = [*history, *[30 + number] * 6, MESSAGE_END]
        talk(store, "alice", history)
    store.flush()
    ends = [position + 1 for position, token in enumerate(history) if token == MESSAGE_END]
    marks = {*range(EVERY, len(history), EVERY), ends[0], *ends[-LAST_MESSAGES:], len(history)}
    assert window_files(store) <= needed(*marks)


def test_a_restart_finds_them(root: Path) -> None:
    store = opened(root)
    talk(store, "alice", LONG)
    store.close()
    store = opened(root)
    audit(store)
    assert store.find("alice").beside
    receipt = talk(store, "alice", [*LONG, 1])
    assert (receipt.tier, receipt.cached_tokens) == ("warm", len(LONG))
    store.close()


def test_a_damaged_window_is_a_miss_and_the_mark_before_it_is_used(root: Path) -> None:
    store = opened(root)
    talk(store, "alice", LONG)
    last = store.find("alice").beside[-1]
    store.close()
    damage(path_beside(store, last.key, "window"), "flipped")
    assert [finding.what for finding in verify(disk(store)).damaged] == ["checksum"]
    store = opened(root)
    receipt = talk(store, "alice", [*LONG, 1])
    assert (receipt.cached_tokens, receipt.known_tokens, receipt.reason) == (5 * EVERY, len(LONG), "checksum")
    assert store.stats().quarantined == 1
    audit(store)
    assert talk(store, "alice", [*LONG, 1, 1]).cached_tokens == len(LONG) + 1  # mended
    store.close()


@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_a_window_that_is_gone_costs_what_follows_the_mark_before(root: Path, how: str) -> None:
    store = opened(root)
    talk(store, "alice", LONG)
    last = store.find("alice").beside[-1]
    store.close()
    damage(path_beside(store, last.key, "window"), how)
    store = opened(root)
    assert talk(store, "alice", [*LONG, 1]).cached_tokens == 5 * EVERY
    audit(store)
    store.close()


def test_a_turn_that_goes_on_can_be_caught_up_with(store: AgentStore) -> None:
    first, second = store.open_turn("alice", CAPACITY), store.open_turn("bob", CAPACITY)
    for turn in (first, second):
        turn.acquire(LONG)
    compute(first, LONG[: EVERY + 20])
    second.catch_up()
    assert second.kv.length == (EVERY + 20) // BLOCK_TOKENS * BLOCK_TOKENS  # not only at marks
    check(second, LONG)
    for turn in (first, second):
        compute(turn, LONG)
        turn.commit((Run("x", False, len(LONG)),))
        turn.release()


def test_a_suspended_turn_goes_on_where_it_was(store: AgentStore) -> None:
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire(LONG)
        compute(turn, LONG[: EVERY + 21])
        turn.suspend()
        turn.resume()
        assert turn.kv.length == EVERY + 21
        check(turn, LONG)


def test_an_export_carries_the_windows_of_the_end(store: AgentStore, root: Path) -> None:
    talk(store, "alice", LONG)
    moved = fake.export_agent(store, "alice", root / "alice.safetensors")
    assert moved.kv_tokens == len(LONG)
    import_agent(store, root / "alice.safetensors", "bob")
    receipt = talk(store, "bob", [*LONG, 1])
    assert (receipt.tier, receipt.cached_tokens) == ("warm", len(LONG))


def test_an_export_ends_at_the_last_mark_whose_windows_are_there(store: AgentStore, root: Path) -> None:
    talk(store, "alice", LONG)
    store.evict("alice")
    last = store.find("alice").beside[-1]
    damage(path_beside(store, last.key, "window"), "missing")
    assert fake.export_agent(store, "alice", root / "alice.safetensors").kv_tokens == 5 * EVERY
    import_agent(store, root / "alice.safetensors", "bob")
    assert talk(store, "bob", [*LONG, 1]).cached_tokens == 5 * EVERY


def test_a_removed_agent_leaves_no_window(store: AgentStore) -> None:
    talk(store, "alice", LONG)
    store.delete("alice")
    assert window_files(store) == 0


def test_memory_that_is_short_lets_go_of_windows_as_well(root: Path) -> None:
    store = open_store(root, budget_blocks=60, files=UnsyncedFiles())
    for number in range(6):
        talk(store, f"agent {number}", [number + 5, *LONG])
        audit(store)
    for number in range(6):
        assert talk(store, f"agent {number}", [number + 5, *LONG, 1]).cached_tokens == len(LONG) + 1
    audit(store)
    store.close()


def test_the_marks_of_a_model_without_windows_are_none() -> None:
    with fake.having():
        assert list(Marks.of(fake.model_ids().layout, frozenset({1})).positions(b"\0\0\0\1" * 1000)) == []
