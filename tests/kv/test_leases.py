"""One turn at a time per agent, whoever has it; who lost it can't commit. Two replicas in one process."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from everwarm.errors import CancelledError, StoreError, TurnLostError, UnknownAgentError
from everwarm.kv import container
from everwarm.kv.manifest import Lease, Manifest, decode, encode
from everwarm.kv.store import AgentStore
from everwarm.kv.warm import leases as of_leases
from everwarm.types import Run
from everwarm.waiting import Cancellation
from kv.fake import CAPACITY, compute, talk, warm
from kv.replicas import leases, objects_in_memory, replica

HISTORY = list(range(100, 150))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[AgentStore, AgentStore]]:
    objects = objects_in_memory()
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        yield one, other


def let_run_out(store: AgentStore) -> None:
    """For this replica the lease that it sees has lasted long enough."""
    ticks = count(10**9, 1000)
    leases(store)._steady = lambda: float(next(ticks))


def test_a_turn_elsewhere_is_waited_for(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    talk(one, "alice", HISTORY)
    turn = one.open_turn("alice", CAPACITY)
    opened = threading.Event()

    def talk_elsewhere() -> None:
        with other.open_turn("alice", CAPACITY) as later:
            assert len(later.history.ids) == len(HISTORY) + 1
            opened.set()

    thread = threading.Thread(target=talk_elsewhere)
    thread.start()
    turn.acquire([*HISTORY, 1])
    compute(turn, [*HISTORY, 1])
    assert not opened.is_set()
    turn.commit((Run("x", False, len(HISTORY) + 1),))
    turn.release()
    thread.join()
    assert opened.is_set()


def test_who_waits_can_be_told_that_nobody_wants_it_any_more(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    with one.open_turn("alice", CAPACITY):
        cancelled = Cancellation()
        threading.Timer(0.05, cancelled.set).start()
        with pytest.raises(CancelledError, match="another replica"):
            other.open_turn("alice", CAPACITY, cancelled=cancelled)


def test_a_turn_that_ends_without_a_commit_gives_its_lease_back(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    talk(one, "alice", HISTORY)
    one.open_turn("alice", CAPACITY).release()
    one.flush()
    stored = warm(other).blocks.load("default", "alice")
    assert (stored.lease, len(stored.tokens)) == (None, len(HISTORY))
    assert talk(other, "alice", [*HISTORY, 1]).cached_tokens == len(HISTORY)


def test_who_lost_the_lease_can_t_commit_and_is_told_to_ask_again(two: tuple[AgentStore, AgentStore]) -> None:
    """As after a process was stopped for longer than its lease lasts, and woken."""
    one, other = two
    talk(one, "alice", HISTORY)
    turn = one.open_turn("alice", CAPACITY)
    turn.acquire([*HISTORY, 1])
    compute(turn, [*HISTORY, 1])
    let_run_out(other)
    assert talk(other, "alice", [*HISTORY, 2, 3]).committed
    with pytest.raises(TurnLostError, match=r"another replica has taken over its turn.*send the request again"):
        turn.commit((Run("x", False, len(HISTORY) + 1),))
    turn.release()
    receipt = talk(one, "alice", [*HISTORY, 2, 3, 4])  # it goes on from what was saved
    assert (receipt.committed, receipt.cached_tokens) == (True, len(HISTORY) + 2)


def test_the_same_before_the_other_has_committed(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    turn = one.open_turn("new", CAPACITY)
    turn.acquire(HISTORY)
    compute(turn, HISTORY)
    let_run_out(other)
    taken = other.open_turn("new", CAPACITY)
    with pytest.raises(TurnLostError):
        turn.commit((Run("x", False, len(HISTORY)),))
    turn.release()
    taken.acquire(HISTORY[:30])
    compute(taken, HISTORY[:30])
    assert taken.commit((Run("x", False, 30),)).committed
    taken.release()
    with one.open_turn("new", CAPACITY) as again:
        assert again.history.ids == HISTORY[:30]


def test_clocks_need_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose clock is minutes ahead takes nothing away; nor does one that is behind wait for ever."""
    objects = objects_in_memory()
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other, one.open_turn("alice", CAPACITY):
        stored = warm(other).blocks.load("default", "alice")
        for minutes in (-9, 0, 9):
            now = one.histories.clock() + 60 * minutes
            leases(other)._clock = lambda now=now: now
            assert not leases(other)._is_over(("default", "alice"), stored)
        leases(other)._clock = lambda: one.histories.clock() + 3600
        assert leases(other)._is_over(("default", "alice"), stored)
        leases(other)._clock = lambda: 0.0
        let_run_out(other)
        assert leases(other)._is_over(("default", "alice"), stored)


def test_a_lease_that_is_renewed_does_not_run_out(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    who = "default", "alice"
    leases(one)._clock = leases(other)._clock = lambda: 1e9
    with one.open_turn("alice", CAPACITY):
        held = leases(one)._held[who]
        for second in range(0, 100, 15):
            leases(other)._steady = lambda second=second: float(second)
            assert not leases(other)._is_over(who, warm(other).blocks.load(*who))
            leases(one)._clock = lambda second=second: 1e9 + second
            leases(one).renew(held)
        leases(other)._steady = lambda: 105.0
        assert not leases(other)._is_over(who, warm(other).blocks.load(*who))
        leases(other)._steady = lambda: 126.0
        assert leases(other)._is_over(who, warm(other).blocks.load(*who))
        taken = other.open_turn("alice", CAPACITY)
        leases(one).renew(held)
        assert held.over
        taken.release()


def test_leases_are_renewed_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_leases, "LEASE_S", 0.03)
    objects = objects_in_memory()
    with replica(objects, tmp_path) as one:
        leases(one)._duration_s = 0.03
        renewed = threading.Event()
        commit = warm(one).blocks.commit

        def noted(manifest, expected, admit):  # type: ignore[no-untyped-def]
            if manifest.generation == expected:
                renewed.set()
            return commit(manifest, expected, admit)

        warm(one).blocks.commit = noted  # type: ignore[method-assign]
        with one.open_turn("alice", CAPACITY):
            assert renewed.wait(60)
        assert not leases(one)._held


def test_an_agent_that_was_removed_elsewhere_is_gone(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    talk(one, "alice", HISTORY)
    assert other.find("alice").tokens == len(HISTORY)
    other.delete("alice")
    with one.open_turn("alice", CAPACITY) as turn:
        assert turn.history.ids == []
    with pytest.raises(UnknownAgentError):
        one.delete("alice")
    assert talk(one, "alice", HISTORY[:20]).committed
    assert other.find("alice").tokens == 20


def test_an_agent_that_is_removed_in_mid_turn_stays_removed(two: tuple[AgentStore, AgentStore]) -> None:
    one, other = two
    talk(one, "alice", HISTORY)
    turn = one.open_turn("alice", CAPACITY)
    turn.acquire([*HISTORY, 1])
    compute(turn, [*HISTORY, 1])
    let_run_out(other)
    other.delete("alice")
    with pytest.raises(TurnLostError, match="removed"):
        turn.commit((Run("x", False, len(HISTORY) + 1),))
    turn.release()
    with pytest.raises(UnknownAgentError):
        one.find("alice")


@pytest.mark.parametrize("until", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("lasts", ["20.0", "1e9", "-1", "NaN"])
def test_a_lease_that_can_t_be_is_damage(until: str, lasts: str) -> None:
    said, tensors = container.decode(b"".join(map(bytes, encode(manifest()))))
    said.pop("checksum")
    said["lease"] = f'["owner", {until}, {lasts}]'
    parts = [(container.Tensor(name, "U32" if name == "tokens" else "U8", a.shape), a) for name, a in tensors.items()]
    with pytest.raises(StoreError, match="a lease of"):
        decode(b"".join(map(bytes, container.encode(said, parts))))


def manifest() -> Manifest:
    tokens, runs = np.arange(3, dtype=np.uint32), (Run("x", False, 3),)
    return Manifest("default", "alice", 1, "00", "w", "n", "l", "m", "f16", tokens, 0, (), runs)


def test_a_lease_is_read_as_it_was_written() -> None:
    leased = replace(manifest(), lease=Lease("somebody", 1e9, 20.0))
    assert decode(b"".join(map(bytes, encode(leased)))).lease == leased.lease
