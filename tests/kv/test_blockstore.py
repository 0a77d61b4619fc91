"""Every `BlockStore` keeps the same promises, and the agent store keeps its own on top of each."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from everwarm.errors import StoreError
from everwarm.kv.container import Tensor, encode
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.receipt import Cause
from everwarm.kv.remote.opening import open_warm
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.gc import carry_out, plan
from everwarm.kv.tools.import_ import import_agent
from everwarm.kv.tools.inventory import open_agents, take_inventory
from everwarm.kv.tools.verify import repair, verify
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, Blob, BlockStore, ConflictError, ObjectId
from kv.fake import BLOCK_TOKENS, model_ids, open_store, talk
from kv.faulty_store import FaultyStore
from kv.memory_store import MemoryStore
from kv.replicas import objects_in_memory
from kv.s3 import Server
from kv.simulated_disk import UnsyncedFiles, memory_directory

HISTORY = list(range(100, 150))


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest) -> Iterator[BlockStore]:
    if kind == "memory":
        yield MemoryStore()
        return
    with memory_directory() as path:
        if kind == "directory":
            yield DirectoryStore(path / "agents", UnsyncedFiles())
        elif kind == "objects":
            with closing(open_warm("memory://", path, 1 << 30, objects=objects_in_memory())) as store:
                yield store
        else:
            server: Server = request.getfixturevalue("s3")
            with closing(open_warm(server.new_bucket(), path, 1 << 30)) as store:
                yield store


@pytest.fixture(params=["directory", "memory", "objects", "s3"])
def place(request: pytest.FixtureRequest) -> Iterator[BlockStore]:
    """Every store. `objects` is object storage without a server."""
    with opened(request.param, request) as store:
        yield store


@pytest.fixture(params=["directory", "memory"])
def own_place(request: pytest.FixtureRequest) -> Iterator[BlockStore]:
    """Stores that one process writes at a time."""
    with opened(request.param, request) as store:
        yield store


def replace_by_force(place: BlockStore, blob: Blob, data: bytes) -> None:
    """As damage does: a block that is there is not replaced by a `put` where many write."""
    place.delete(blob)
    place.put(blob, [data])
    place.sync(blob.model, blob.area)


def manifest(generation: int) -> list[bytes | np.ndarray]:
    return encode({"generation": str(generation)}, [(Tensor("t", "U8", (4,)), np.arange(4, dtype=np.uint8))])


# The protocol ---------------------------------------------------------------------------------------------------------


def test_what_was_put_is_read_listed_and_deleted(place: BlockStore) -> None:
    place.lock().release()
    place.prepare("m")
    blob = Blob("m", BLOCKS, "a.safetensors")
    place.put(blob, [b"abc", np.arange(5, dtype=np.uint8)])
    place.sync("m", BLOCKS)
    assert place.read(blob) == b"abc\0\1\2\3\4"
    first, second = bytearray(2), bytearray(9)
    assert place.get(blob, [memoryview(first), memoryview(second)]) == 8
    assert (bytes(first), bytes(second[:6])) == (b"ab", b"c\0\1\2\3\4")
    assert (list(place.list("m", BLOCKS)), place.size(blob), place.models()) == ([(blob, 8)], 8, ["m"])
    assert place.usage() >= 8
    assert place.usage(frozenset({"m"})) == place.usage() - 8
    place.put(blob, [b"other"])
    assert place.read(blob) == b"other"
    place.delete(blob)
    place.delete(blob)
    assert list(place.list("m", BLOCKS)) == []
    for read in (place.read, place.size):
        with pytest.raises(FileNotFoundError):
            read(blob)


def test_a_manifest_is_replaced_only_if_it_is_the_expected_one(place: BlockStore) -> None:
    place.lock().release()
    place.prepare("m")
    blob = Blob("m", MANIFESTS, "a.safetensors")
    with pytest.raises(ConflictError, match="generation 0 and not 1"):
        place.commit(blob, manifest(2), expected=1)
    place.commit(blob, manifest(1), expected=0)
    place.commit(blob, manifest(2), expected=1)
    for expected in (0, 1, 3):
        with pytest.raises(ConflictError, match=f"generation 2 and not {expected}"):
            place.commit(blob, manifest(3), expected=expected)
    place.put(blob, [b"not a manifest"])
    with pytest.raises(ConflictError, match="generation None and not 0"):
        place.commit(blob, manifest(3), expected=0)


def test_what_is_set_aside_is_kept(place: BlockStore) -> None:
    place.lock().release()
    place.prepare("m")
    blob = Blob("m", BLOCKS, "a.safetensors")
    for data in (b"one", b"two!"):
        place.put(blob, [data])
        moved, size = place.set_aside(blob)
        assert moved is not None
        assert (place.read(moved), size) == (data, len(data))
    assert place.set_aside(blob) == (None, 0)
    assert sorted(size for _, size in place.list("", "quarantine")) == [3, 4]


def test_one_writes_at_a_time(own_place: BlockStore) -> None:
    held = own_place.lock()
    with pytest.raises(StoreError, match="is writing in it"):
        own_place.lock()
    held.release()
    own_place.lock().release()


def test_objects_are_named_by_their_key_and_kind() -> None:
    key = model_ids().root(b"salt")
    for kind in ("full", "window", "state"):
        named = ObjectId(key, kind)
        assert ObjectId.of(named.blob("m")) == named
    assert len({ObjectId(key, kind).blob("m") for kind in ("full", "window", "state")}) == 3
    for name in ("x.safetensors", key.hex(), key.hex()[2:] + ".safetensors", key.hex().upper() + ".safetensors"):
        assert ObjectId.of(Blob("m", BLOCKS, name)) is None


# The agent store on top -----------------------------------------------------------------------------------------------


def test_agents_survive_eviction_and_restart(place: BlockStore) -> None:
    store = open_store(place)
    assert talk(store, "alice", HISTORY, [7, 8]).committed
    store.evict("alice")
    assert talk(store, "alice", [*HISTORY, 7, 8, 9]).tier == "warm"
    store.fork("alice", "bob")
    store.pin("bob")
    store.close()
    store = open_store(place)
    receipt = talk(store, "bob", [*HISTORY, 7, 8, 9, 10])
    assert (receipt.tier, receipt.cached_tokens, receipt.cause) == ("warm", 53, Cause.EXTENDED)
    store.delete("alice")
    store.delete("bob")
    assert store.stats().warm_bytes == 0
    store.close()


def test_a_quota_holds_and_the_longest_unused_goes_first(own_place: BlockStore) -> None:
    place = own_place
    store = open_store(place)
    size = store.stats().warm_bytes
    for name in ("old", "kept", "new"):
        talk(store, name, [len(name) * 7, *HISTORY])
    store.pin("kept")
    stats = store.stats()
    store.shared.quota = stats.warm_bytes + stats.other_bytes
    talk(store, "newest", [1, *HISTORY])
    stats = store.stats()
    assert size < stats.warm_bytes + stats.other_bytes <= stats.warm_quota
    store.close()
    store = open_store(place)
    cached = {name: talk(store, name, [len(name) * 7, *HISTORY, 1]).cached_tokens for name in ("old", "kept", "new")}
    assert cached["old"] < cached["new"] <= cached["kept"] == 51
    store.close()


def test_damage_is_a_miss_and_never_an_answer(place: BlockStore) -> None:
    store = open_store(place)
    talk(store, "alice", HISTORY)
    store.close()
    blob = ObjectId(store.find("alice").chain()[2].key).blob(model_ids().directory)
    replace_by_force(place, blob, place.read(blob)[:-1] + b"!")
    assert [finding.blob for finding in verify(place).damaged] == [blob]
    store = open_store(place)
    receipt = talk(store, "alice", [*HISTORY, 1])
    assert (receipt.cached_tokens, receipt.cause, receipt.reason) == (2 * BLOCK_TOKENS, Cause.LOST, "checksum")
    store.close()
    assert verify(place).clean


@pytest.mark.parametrize("area", [BLOCKS, MANIFESTS])
@pytest.mark.parametrize("at", [0, 3, 8, 37, 60, 4095, 4096, -1])
def test_any_damaged_byte_is_a_miss_and_never_an_answer(place: BlockStore, area: str, at: int) -> None:
    store = open_store(place)
    talk(store, "alice", HISTORY)
    store.close()
    for blob, _ in list(place.list(model_ids().directory, area)):
        data = bytearray(place.read(blob))
        data[at] ^= 1
        replace_by_force(place, blob, bytes(data))
    store = open_store(place)
    receipt = talk(store, "alice", [*HISTORY, 1])  # compares every byte of KV
    assert receipt.committed
    assert receipt.cached_tokens == 0 or area == MANIFESTS
    store.evict("alice")
    assert talk(store, "alice", [*HISTORY, 1, 2]).cached_tokens == len(HISTORY) + 1
    store.close()
    assert verify(place).clean


@pytest.mark.parametrize("lasting", [False, True])
def test_any_call_that_fails_costs_persistence_and_not_service(
    place: BlockStore, request: pytest.FixtureRequest, lasting: bool
) -> None:
    """Each call fails in turn: what was acknowledged is there after a restart, and KV is never mixed up."""
    ids = [request.node.callspec.params["place"]]
    step = 7 if "s3" in ids else 1
    for nth in range(1, 400, step):
        faulty = FaultyStore(place)
        name, said = f"agent {lasting} {nth}", [[]]
        store = open_store(faulty)
        faulty.arm(nth, lasting=lasting)
        for more in ([], [1], [1, 2]):
            history = [nth, *HISTORY, *more]
            if talk(store, name, history).committed:
                said = []
            said.append(history)
            with suppress(StoreError):
                store.evict(name)
        fired = faulty.fired
        faulty.heal()
        store.close()
        store = open_store(place)
        with store.open_turn(name, 4096) as turn:
            assert turn.history.ids in said
        assert talk(store, name, [nth, *HISTORY, 1, 2, 3]).committed
        store.close()
        if not fired:
            break
    assert 10 < nth < 399
    assert verify(place).clean


def test_tools_work_on_every_store(place: BlockStore, tmp_path: Path) -> None:
    store = open_store(place, clock=lambda: 1000.0)
    talk(store, "alice", HISTORY)
    export_agent(store, "alice", tmp_path / "file")
    store.close()
    inventory = take_inventory(place)
    entry, agent = inventory.find("alice")
    assert (len(agent.manifest.tokens), agent.lost) == (50, ())
    opened = open_agents(place, entry, writing=True, quota=1 << 30)
    import_agent(opened, tmp_path / "file", "bob")
    opened.close()
    place.put(Blob(entry.directory, "", "model.json"), [b"nonsense"])
    assert repair(place).repaired
    assert verify(place).clean
    if place.many_writers:  # see test_collector.py
        return
    found = plan(place, before=2000.0, quota=1 << 30)
    assert {removal.why for removal in found.removals} == {
        "an agent that was not used for long", "a block of such an agent",
    }  # fmt: skip
    assert carry_out(place, found) == found.size_bytes > 0
    assert [agent.manifest.name for entry in take_inventory(place).models for agent in entry.agents] == ["bob"]


def test_a_manifest_that_somebody_else_has_changed_is_not_overwritten(own_place: BlockStore) -> None:
    """The lock should keep others out; where it does not (another machine, a file put back), nothing gets lost."""
    place = own_place
    store = open_store(place)
    talk(store, "alice", HISTORY)
    blob = store.warm.blocks.manifest_blob("default", "alice")  # type: ignore[union-attr]
    first = place.read(blob)
    talk(store, "alice", [*HISTORY, 1])
    place.put(blob, [first])
    receipt = talk(store, "alice", [*HISTORY, 1, 2])
    assert receipt.committed is False
    assert "generation 1 and not 2" in (receipt.error or "")
    assert place.read(blob) == first
    store.close()
