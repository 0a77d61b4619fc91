"""Layers with a state: where it is kept, how far back a history has to be computed again, and what is dropped."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everwarm.kv import container
from everwarm.kv.receipt import Cause
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.gc import carry_out, plan
from everwarm.kv.tools.import_ import import_agent
from everwarm.kv.tools.verify import verify
from kv import fake
from kv.audit import audit
from kv.fake import BLOCK_TOKENS, CAPACITY, MESSAGE_END, check, compute, disk, talk
from kv.kept_apart import EVERY, LONG, damage, files_of, opened, path_beside


@pytest.fixture(autouse=True, params=[("state",), ("window", "state")], ids=" and ".join)
def kinds(request: pytest.FixtureRequest) -> Iterator[None]:
    with fake.having(*request.param):
        yield


def state_files(store: AgentStore) -> list[Path]:
    return files_of(store, "state")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100, 300])
def test_a_history_of_any_length_is_gone_on_from_where_it_ends(store: AgentStore, length: int) -> None:
    talk(store, "alice", LONG[:length])
    store.evict("alice")
    receipt = talk(store, "alice", [*LONG[:length], 1, 1])
    assert (receipt.tier, receipt.cached_tokens, receipt.known_tokens) == ("warm", length, length)


def test_restored_at_every_position_less_than_one_distance_is_computed(store: AgentStore) -> None:
    talk(store, "alice", LONG[:300])
    store.evict("alice")
    for position in range(1, 300):
        receipt = talk(store, f"branch {position}", [*LONG[:position], 1])  # `check` compares the state
        assert receipt.known_tokens == position
        assert position - receipt.cached_tokens < EVERY


def test_states_are_kept_at_marks_and_nowhere_else(store: AgentStore) -> None:
    talk(store, "alice", LONG)
    store.flush()
    marks = {*range(EVERY, len(LONG), EVERY), (len(LONG) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, len(LONG)}
    assert len(state_files(store)) == len(marks)


def test_an_edited_message_is_computed_from_the_block_before_it(store: AgentStore) -> None:
    messages = [[20 + number] * 19 + [MESSAGE_END] for number in range(8)]
    history = [token for message in messages for token in message]
    talk(store, "alice", history, [5, 5])
    start = 20 * 7
    receipt = talk(store, "alice", [*history[:start], *[9] * 30])
    assert receipt.cached_tokens == start // BLOCK_TOKENS * BLOCK_TOKENS
    assert (receipt.known_tokens, receipt.cause) == (start, Cause.RECOMPUTED)


def test_the_end_of_the_turn_before_is_kept(store: AgentStore) -> None:
    """Whoever takes back the last question goes on from the answer before it."""
    talk(store, "alice", LONG[:50], [5, 5, 5])
    history = [*LONG[:50], 5, 5, 5]
    talk(store, "alice", [*history, 6, 6, 6, 6], [7, 7])
    receipt = talk(store, "alice", [*history, 8, 8, 8])
    assert receipt.cached_tokens == 52  # the last token of an answer is not computed in its turn


def test_the_ends_of_the_last_turns_are_kept_and_not_the_blocks_before_them(store: AgentStore) -> None:
    """Whoever takes back several short turns goes on from the answer before them."""
    history, ends = list(LONG[:30]), []
    for number in range(5):
        asked, said = [*[40 + number] * 5, MESSAGE_END], [*[50 + number] * 5, MESSAGE_END]
        talk(store, "alice", [*history, *asked], said)
        history = [*history, *asked, *said]
        ends.append(len(history) - 1)  # the last token of an answer is not computed in its turn
    for taken_back in (1, 2, 3):
        end = ends[-1 - taken_back]
        receipt = talk(store, f"branch {taken_back}", [*history[: end + 1], *[60] * 5])
        assert receipt.cached_tokens == end


def test_only_the_last_ends_stay(store: AgentStore) -> None:
    history = list(LONG[:20])
    for number in range(40):
        history = [*history, *[30 + number] * 7]
        talk(store, "alice", history)
    store.flush()
    assert len(state_files(store)) <= len(history) // EVERY + 6
    assert verify(disk(store)).unreachable == []


def test_what_is_collected_is_not_a_state_that_somebody_needs(root: Path) -> None:
    store = opened(root)
    for end in (20, 35, 50):
        talk(store, "alice", LONG[:end])
    store.close()
    there = len(state_files(store))
    place = disk(store)
    carry_out(place, plan(place, before=0.0, quota=1 << 40))
    assert len(state_files(store)) == there
    store = opened(root)
    assert talk(store, "alice", [*LONG[:35], 1]).cached_tokens == 35
    audit(store)
    store.close()


DAMAGES = [
    ("flipped", "checksum"),
    ("truncated", "truncated: "),
    ("missing", "is gone"),
    ("another layout", "layout is "),
]


@pytest.mark.parametrize(("how", "reason"), DAMAGES)
def test_a_state_that_is_damaged_is_a_miss_and_the_one_before_it_is_used(root: Path, how: str, reason: str) -> None:
    store = opened(root)
    talk(store, "alice", LONG)
    store.evict("alice")
    damage_state(path_beside(store, store.find("alice").chain()[-1].key, "state"), how)
    receipt = talk(store, "alice", [*LONG, 1])
    assert (receipt.cached_tokens, receipt.known_tokens, receipt.cause) == (5 * EVERY, len(LONG), Cause.LOST)
    assert reason in receipt.reason
    assert store.stats().quarantined == (how != "missing")
    audit(store)
    assert talk(store, "alice", [*LONG, 1, 1]).cached_tokens == len(LONG) + 1  # mended
    store.close()


@pytest.mark.parametrize(("how", "reason"), DAMAGES)
def test_a_state_that_was_damaged_before_a_start_is_a_miss_as_well(root: Path, how: str, reason: str) -> None:
    """One that is missing or has another size shows when a store is opened, the others when it is read."""
    store = opened(root)
    talk(store, "alice", LONG)
    store.close()
    damage_state(path_beside(store, store.find("alice").chain()[-1].key, "state"), how)
    store = opened(root)
    receipt = talk(store, "alice", [*LONG, 1])
    assert (receipt.cached_tokens, receipt.known_tokens) == (5 * EVERY, len(LONG))
    at_start = how in ("missing", "truncated")
    assert receipt.cause == (Cause.EVICTED if at_start else Cause.LOST)
    assert ("what was kept at token 323 is not there any more" if at_start else reason) in receipt.reason
    assert store.stats().quarantined == (how != "missing")
    audit(store)
    store.close()


def damage_state(path: Path, how: str) -> None:
    if how == "another layout":
        path.write_bytes(of_another_layout(path.read_bytes()))
    damage(path, how)


def of_another_layout(data: bytes) -> bytes:
    """A whole state with a right checksum, which says that it is of another layout."""
    header, rest = data[: container.ALIGNMENT], np.frombuffer(data[container.ALIGNMENT :], np.uint8)
    digest = fake.model_ids().layout.digest.encode()
    blank, _ = container.split_checksum(header.replace(digest, digest[::-1]))
    return container.with_checksum(blank, container.checksum(blank, [rest])) + rest.tobytes()


def test_an_export_carries_the_state_of_the_end(store: AgentStore, root: Path) -> None:
    talk(store, "alice", LONG)
    fake.export_agent(store, "alice", root / "alice.safetensors")
    import_agent(store, root / "alice.safetensors", "bob")
    receipt = talk(store, "bob", [*LONG, 1])
    assert (receipt.tier, receipt.cached_tokens) == ("warm", len(LONG))


def test_a_suspended_turn_goes_on_where_it_was(store: AgentStore) -> None:
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire(LONG)
        compute(turn, LONG[: EVERY + 21])
        turn.suspend()
        turn.resume()
        assert turn.kv.length == EVERY + 21
        check(turn, LONG)


def test_a_fork_copies_the_state_when_it_goes_on(store: AgentStore) -> None:
    talk(store, "alice", LONG[:100])
    store.fork("alice", "bob")
    for name in ("alice", "bob"):
        assert talk(store, name, [*LONG[:100], *[ord(letter) for letter in name]]).cached_tokens == 100


def test_a_removed_fork_leaves_the_state_that_another_agent_went_on_from(store: AgentStore) -> None:
    talk(store, "alice", LONG[:50])
    store.fork("alice", "bob")
    talk(store, "alice", [*LONG[:50], 6, 6])
    store.delete("bob")
    assert talk(store, "alice", [*LONG[:50], 8]).cached_tokens == 50


def test_turns_that_begin_alike_compute_it_once(store: AgentStore) -> None:
    first, second = store.open_turn("alice", CAPACITY), store.open_turn("bob", CAPACITY)
    for turn in (first, second):
        turn.acquire(LONG)
    assert first.next_block() == second.next_block()
    compute(first, LONG[: EVERY + 20])
    second.catch_up()
    assert second.kv.length == EVERY
    check(second, LONG)
    assert first.next_block() == second.next_block()  # the one that has come further computes
    for turn in (first, second):
        turn.release()
