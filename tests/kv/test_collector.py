"""Collecting garbage beside running replicas: what a manifest names stays, what is young stays, the rest goes in two
steps.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.kv.remote.objects import Bucket, Found, Objects
from everwarm.kv.remote.store import GRACE_S, ObjectStore
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.collector import collect
from everwarm.kv.tools.verify import verify
from kv.fake import CAPACITY, compute, talk, warm
from kv.faulty_objects import FaultyObjects
from kv.replicas import URL, objects_in_memory, replica
from kv.s3 import Server

HISTORY = list(range(100, 150))


class Aging(FaultyObjects):
    """Objects of a storage whose clock the test sets: they are as old as the test says."""

    def __init__(self, real: Objects) -> None:
        super().__init__(real)
        self.now = 1e9
        self._times: dict[str, float] = {}

    def put(self, name, data, replacing):  # type: ignore[no-untyped-def]
        version = super().put(name, data, replacing)
        self._times[name] = self.now
        return version

    def overwrite(self, name, data):  # type: ignore[no-untyped-def]
        version = super().overwrite(name, data)
        self._times[name] = self.now
        return version

    def head(self, name: str) -> Found:
        return self._aged(super().head(name))

    def list(self, prefix: str) -> Iterator[Found]:
        return map(self._aged, super().list(prefix))

    def _aged(self, found: Found) -> Found:
        return Found(found.name, found.size, self._times.get(found.name, self.now), found.version)

    def blocks(self) -> set[str]:
        return {found.name for found in super().list("") if "/blocks/" in found.name}


@pytest.fixture
def objects() -> Aging:
    return Aging(objects_in_memory())


@pytest.fixture
def one(objects: Aging, tmp_path: Path) -> Iterator[AgentStore]:
    with replica(objects, tmp_path) as store:
        yield store


def collector(objects: Objects) -> ObjectStore:
    """As a process of its own has it."""
    return ObjectStore(objects, URL, b"")


def run(objects: Aging, before: float = 0.0, dry_run: bool = False) -> tuple[int, int]:
    """(blocks and agents that went, blocks that were marked)."""
    done = collect(collector(objects), before=before, dry_run=dry_run)
    return len([removal for removal in done.removals if removal.why != "of a removed agent"]), done.marked


def test_blocks_of_no_agent_go_in_two_steps_an_hour_apart(objects: Aging, one: AgentStore) -> None:
    talk(one, "alice", HISTORY)
    talk(one, "bob", [1, *HISTORY])
    one.delete("bob")
    everything = objects.blocks()
    assert run(objects) == (0, 0)  # they are young
    objects.now += GRACE_S + 1
    removed, marked = run(objects)
    assert removed == 0
    assert marked > 0
    objects.now += GRACE_S / 2
    assert run(objects)[0] == 0  # marked too recently
    objects.now += GRACE_S
    assert run(objects) == (marked, 0)
    assert len(everything) - len(objects.blocks()) == marked
    assert talk(one, "alice", [*HISTORY, 1]).cached_tokens == len(HISTORY)
    assert verify(warm(one).blocks.store).clean


def test_a_dry_run_writes_and_removes_nothing(objects: Aging, one: AgentStore) -> None:
    talk(one, "bob", [1, *HISTORY])
    one.delete("bob")
    objects.now += 3 * GRACE_S
    names = {found.name for found in objects.list("")} | {"clock"}
    assert run(objects, dry_run=True)[1] > 0
    assert {found.name for found in objects.list("")} == names


def test_what_a_turn_has_uploaded_but_not_committed_yet_stays(objects: Aging, one: AgentStore) -> None:
    turn = one.open_turn("alice", CAPACITY)
    turn.acquire(HISTORY)
    compute(turn, HISTORY)
    one.flush()
    warm(one).blocks.sync()
    blocks = objects.blocks()
    assert blocks
    assert run(objects) == (0, 0)
    assert objects.blocks() == blocks
    turn.release()


def test_a_marked_block_that_is_used_again_stays(objects: Aging, one: AgentStore, tmp_path: Path) -> None:
    """Another replica computes the same and finds the block there: it is written again, so the collector leaves it."""
    talk(one, "bob", HISTORY)
    one.delete("bob")
    objects.now += GRACE_S + 1
    assert run(objects)[1] > 0
    objects.now += GRACE_S + 1
    with replica(objects, tmp_path) as other:
        assert talk(other, "carol", HISTORY).cached_tokens == 0
        assert run(objects)[0] == 0
        other.evict("carol")
    with replica(objects, tmp_path) as third:
        assert talk(third, "carol", [*HISTORY, 1]).cached_tokens == len(HISTORY)


def test_a_block_that_a_replica_believed_to_be_there_is_written_again(objects: Aging, one: AgentStore) -> None:
    """It is hot here, nobody owned it for hours, and it was collected: a new agent that begins so gets it back."""
    talk(one, "alice", [*HISTORY, 5])
    with one.open_turn("hot", CAPACITY) as turn:  # never committed: its blocks are known here
        turn.acquire([9, *HISTORY])
        compute(turn, [9, *HISTORY])
        one.flush()
    for _ in range(3):
        objects.now += GRACE_S + 1
        run(objects)
    warm(one)._put_at.clear()  # hours have passed for us, too
    warm(one).blocks.store.remote._ahead = None  # type: ignore[attr-defined]
    before = objects.blocks()
    receipt = talk(one, "new", [9, *HISTORY, 1])
    assert receipt.cached_tokens >= 48
    assert receipt.committed
    assert len(objects.blocks()) >= len(before) + 6
    assert verify(warm(one).blocks.store).clean
    assert not verify(warm(one).blocks.store).notes


def test_agents_not_used_for_long_go_unless_pinned_or_in_use(objects: Aging, one: AgentStore) -> None:
    for name in ("old", "pinned", "talks"):
        talk(one, name, HISTORY)
    one.pin("pinned")
    turn = one.open_turn("talks", CAPACITY)
    future = one.histories.clock() + 1000.0
    assert run(objects, before=future)[0] == 2  # one that talks just now loses its turn, as by `rm`
    turn.release()
    assert [agent.name for agent in one.listed("default") if agent.known] == ["pinned"]
    manifests = [found.name for found in objects.list("") if "/manifests/" in found.name]
    assert len(manifests) == 3
    objects.now += 3 * GRACE_S
    run(objects)
    assert len([found.name for found in objects.list("") if "/manifests/" in found.name]) == 1


def test_lists_that_are_late_lose_nothing(objects: Aging, one: AgentStore) -> None:
    """The manifest is committed, but is not listed yet: its blocks are young."""
    talk(one, "alice", HISTORY)
    objects.late = 3
    run(objects)
    objects.late = 0
    assert talk(one, "alice", [*HISTORY, 1]).cached_tokens == len(HISTORY)
    assert verify(warm(one).blocks.store).notes == []


def test_two_collectors_at_once_are_no_harm(objects: Aging, one: AgentStore) -> None:
    talk(one, "bob", HISTORY)
    one.delete("bob")
    objects.now += GRACE_S + 1
    first = collector(objects)
    assert collect(first, before=0.0).marked > 0
    done = collect(collector(objects), before=0.0)
    assert "less than an hour" in " ".join(done.notes)


def test_a_manifest_that_can_t_be_read_keeps_every_block(objects: Aging, one: AgentStore) -> None:
    talk(one, "bob", HISTORY)
    one.delete("bob")
    objects.overwrite(f"{one.ids.directory}/manifests/{'0' * 32}.safetensors", b"nonsense")
    objects.now += GRACE_S + 1
    done = collect(collector(objects), before=0.0)
    assert (done.marked, done.removals) == (0, [])
    assert "left alone" in done.notes[0]


def test_on_s3(s3: Server, tmp_path: Path) -> None:
    objects = Bucket.open(s3.new_bucket())
    with replica(objects, tmp_path) as one:
        talk(one, "alice", HISTORY)
        talk(one, "bob", [1, *HISTORY])
        one.delete("bob")
        done = collect(collector(objects), before=0.0)
        assert (done.removals, done.marked) == ([], 0)
        done = collect(collector(objects), before=one.histories.clock() + 10)
        assert [removal.why for removal in done.removals] == ["an agent that was not used for long"]
        assert one.listed("default") == []
