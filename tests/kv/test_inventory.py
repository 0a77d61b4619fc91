"""A store's directory without a model: what is listed, what a check finds and a repair mends, what can go, and files of
other versions of everwarm.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.chain import Key
from everwarm.kv.disk import directory as directory_module
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.ids import ModelIds
from everwarm.kv.layout import Group, Layout
from everwarm.kv.manifest import Manifest
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.gc import carry_out, plan
from everwarm.kv.tools.import_ import import_agent
from everwarm.kv.tools.inventory import Inventory, open_agents, read_ids, take_inventory
from everwarm.kv.tools.verify import rebuilt_ids, repair, verify
from everwarm.kv.warm import sealed as sealed_module
from everwarm.kv.warm.blocks import BlockName, ModelBlocks
from everwarm.kv.warm.blockstore import most_bytes
from everwarm.kv.warm.sealed import sealed
from kv.fake import CAPACITY, compute, model_ids, open_store, talk

HISTORY = list(range(100, 150))  # six full blocks and a partial one
OTHER = [7, *HISTORY]
Q8 = model_ids(numerics="q" * 64, kv_type="q8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Alice and bob share six blocks; someone without a name; alice of another model, too."""
    root = tmp_path / "agents"
    store = open_store(root, clock=lambda: 1000.0)
    talk(store, "alice", HISTORY)
    talk(store, "bob", [*HISTORY, 1])
    talk(store, None, OTHER[:10])
    store.close()
    store = open_store(root, ids=Q8, clock=lambda: 2000.0)
    talk(store, "alice", OTHER)
    talk(store, "carol", OTHER[:30], tenant="them")
    store.close()
    return root


def first(root: Path) -> Path:
    return root / model_ids().directory


def blocks_of(root: Path, name: str) -> list[Path]:
    entry, agent = take_inventory(DirectoryStore(root)).find(name, model=model_ids().directory)
    return [root / entry.directory / "blocks" / f"{key.hex()}.safetensors" for key in agent.manifest.blocks]


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "lock"}


def of_version(path: Path, version: str, more: bytes = b"") -> None:
    """The same file, written by another everwarm; longer if it says more."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little") + 8
    said, tensors = container.read_metadata(data[:length])
    arrays = load_file(path)
    said.pop("checksum")
    said["version"] = version
    parts = [(tensor, arrays[name]) for name, tensor in tensors.items()]
    if more:
        parts.append((container.Tensor("more", "U8", (len(more),)), np.frombuffer(more, np.uint8)))
    path.write_bytes(b"".join(bytes(part) for part in container.encode(said, parts)))


# Listing --------------------------------------------------------------------------------------------------------------


def test_agents_and_bytes_are_those_of_the_files(root: Path) -> None:
    inventory = take_inventory(DirectoryStore(root))
    by_name = {(entry.kv_type, agent.manifest.name): agent for entry in inventory.models for agent in entry.agents}
    assert {key for key in by_name if not key[1].startswith("anonymous")} == {
        ("f16", "alice"), ("f16", "bob"), ("q8", "alice"), ("q8", "carol"),
    }  # fmt: skip
    alice, bob = by_name["f16", "alice"], by_name["f16", "bob"]
    block = blocks_of(root, "alice")[0].stat().st_size
    assert alice.shared_bytes == bob.shared_bytes == 6 * block
    assert alice.own_bytes == block + alice.manifest_bytes
    assert inventory.size_bytes == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert [len(entry.blocks) for entry in inventory.models] == [
        len(list((root / entry.directory).glob("blocks/*"))) for entry in inventory.models
    ]


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    nothing = DirectoryStore(tmp_path / "nothing")
    assert take_inventory(nothing) == Inventory(nothing, [], 0, 0, 0)
    assert verify(DirectoryStore(tmp_path / "nothing")).clean
    assert plan(DirectoryStore(tmp_path / "nothing"), before=0, quota=0).removals == []
    assert not (tmp_path / "nothing").exists()


def test_looking_changes_nothing_and_needs_no_lock(root: Path) -> None:
    held = DirectoryStore(root).lock()
    before = snapshot(root)
    take_inventory(DirectoryStore(root))
    assert verify(DirectoryStore(root)).clean
    plan(DirectoryStore(root), before=0, quota=0)
    assert snapshot(root) == before
    held.release()


def test_an_agent_is_found_by_name_tenant_and_model(root: Path) -> None:
    inventory = take_inventory(DirectoryStore(root))
    with pytest.raises(StoreError, match=r"several models; choose with --model: .*f16.*q8"):
        inventory.find("alice")
    with pytest.raises(StoreError, match="no such agent: 'carol'"):
        inventory.find("carol")
    with pytest.raises(StoreError, match=r"no agents of a model 'x' here; known are: .*fake, f16"):
        inventory.find("alice", model="x")
    assert inventory.find("carol", "them")[0].kv_type == "q8"
    assert inventory.find("alice", model=Q8.directory[:20])[0].kv_type == "q8"
    assert inventory.find("bob", model="fake")[1].manifest.kv_tokens == 51


def test_a_store_opened_without_its_model_forks_pins_and_deletes(root: Path) -> None:
    entry, _ = take_inventory(DirectoryStore(root)).find("bob")
    store = open_agents(DirectoryStore(root), entry, writing=True, quota=1 << 30)
    store.fork("bob", "dave")
    store.pin("dave")
    store.delete("bob")
    store.close()
    dave = take_inventory(DirectoryStore(root)).find("dave")[1]
    assert (dave.manifest.pinned, dave.manifest.kv_tokens, dave.lost) == (True, 51, ())
    store = open_store(root)
    assert talk(store, "dave", [*HISTORY, 1, 2]).cached_tokens == 51
    store.close()


def test_who_holds_the_lock_is_named(root: Path) -> None:
    held = DirectoryStore(root).lock()
    entry, _ = take_inventory(DirectoryStore(root)).find("bob")
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        open_agents(DirectoryStore(root), entry, writing=True)
    open_agents(DirectoryStore(root), entry, writing=False).close()
    held.release()


def test_files_that_go_away_while_they_are_listed_were_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def then_gone(path: Path) -> object:
        entries = list(scandir(path))
        for entry in entries:
            if entry.name.endswith(".safetensors"):
                os.unlink(entry.path)
        return iter(entries)

    monkeypatch.setattr(directory_module.os, "scandir", then_gone)
    assert DirectoryStore(root / model_ids().directory).usage() > 0  # model.json is still there


# Checking -------------------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte altered": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "under another name": lambda path: path.rename(path.with_name("0" * 32 + ".safetensors")),
}


def test_a_sound_store_is_clean(root: Path) -> None:
    report = verify(DirectoryStore(root))
    assert (report.damaged, report.notes, report.unreachable) == ([], [], [])
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "lock"]
    assert (report.files, report.agents) == (len(files), 5)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_named_and_after_a_repair_the_history_is_there(root: Path, damage: str) -> None:
    DAMAGE[damage](blocks_of(root, "bob")[2])
    report = verify(DirectoryStore(root))
    assert len(report.damaged) == 1
    assert Path(report.damaged[0].path).parent.name == "blocks"
    before = snapshot(root)
    assert [Path(finding.path) for finding in repair(DirectoryStore(root)).damaged] == [Path(report.damaged[0].path)]
    assert verify(DirectoryStore(root)).clean
    assert sorted(before.values()) == sorted(snapshot(root).values())  # moved, not away
    store = open_store(root)
    receipt = talk(store, "bob", [*HISTORY, 1, 2])
    assert (receipt.match, receipt.cached_tokens) == ("extended", 16)
    store.close()
    assert verify(DirectoryStore(root)).clean


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_named_and_moved(root: Path, damage: str) -> None:
    DAMAGE[damage](DirectoryStore(root).path(take_inventory(DirectoryStore(root)).find("bob")[1].blob))
    assert [Path(finding.path).parent.name for finding in verify(DirectoryStore(root)).damaged] == ["manifests"]
    repair(DirectoryStore(root))
    assert verify(DirectoryStore(root)).clean
    assert take_inventory(DirectoryStore(root)).quarantined == 1
    store = open_store(root)
    assert talk(store, "alice", [*HISTORY, 2]).cached_tokens == 50
    assert talk(store, "bob", [*HISTORY, 1, 2]).match == "shared"
    store.close()


@pytest.mark.parametrize("damage", ["a byte altered", "truncated", "empty", "zeros", "missing"])
def test_model_json_is_written_again_as_it_was(root: Path, damage: str) -> None:
    path = first(root) / "model.json"
    before = path.read_bytes()
    Path.unlink(path) if damage == "missing" else DAMAGE[damage](path)
    assert [Path(finding.path) for finding in verify(DirectoryStore(root)).damaged] == [path]
    repair(DirectoryStore(root))
    assert path.read_bytes() == before
    assert verify(DirectoryStore(root)).clean


@pytest.mark.parametrize(("kv_type", "bytes_per_16"), [("f32", 64), ("f16", 32), ("q8", 17), ("q4", 9)])
@pytest.mark.parametrize(("layers", "width"), [(1, 64), (30, 192), (24, 128), (16, 512)])
def test_the_layout_of_a_real_model_is_found_again(
    tmp_path: Path, layers: int, width: int, kv_type: str, bytes_per_16: int
) -> None:
    size = 32 * layers * 2 * width * bytes_per_16 // 16
    ids = ModelIds("a" * 64, "b" * 64, Layout(32, (Group("full", layers, width, width, kv_type, size),)), "m", kv_type)
    directory = tmp_path / ids.directory
    (directory / "blocks").mkdir(parents=True)
    (directory / "manifests").mkdir()
    tokens = np.arange(32, dtype=np.uint32)
    manifest = Manifest(
        "default", "alice", 1, "00" * 16, ids.weights_id, ids.numerics_id, ids.layout.digest, "m", kv_type, tokens, 0,
        (), (),
    )  # fmt: skip
    store = ModelBlocks(DirectoryStore(tmp_path), ids)
    store.store.prepare(ids.directory)
    store.commit(manifest, 0, lambda size: None)
    store.put(BlockName(Key(bytes(16)), Key(bytes(16)), tokens.astype(">u4").tobytes()), [np.zeros(size, np.uint8)])
    assert rebuilt_ids(DirectoryStore(tmp_path), directory.name) == ids


def test_a_damaged_list_of_tenants_costs_no_agent_its_blocks(root: Path) -> None:
    (root / "tenants.json").write_text("{}")
    assert [Path(finding.path).name for finding in verify(DirectoryStore(root)).damaged] == ["tenants.json"]
    repair(DirectoryStore(root))
    assert verify(DirectoryStore(root)).clean
    store = open_store(root)
    assert talk(store, "alice", [*HISTORY, 2]).cached_tokens == 50
    store.close()


def test_what_a_crash_leaves_is_worth_a_note_only(root: Path) -> None:
    store = open_store(root)
    with store.open_turn("eve", CAPACITY) as turn:  # never committed
        turn.acquire([9, *HISTORY])
        compute(turn, [9, *HISTORY])
    store.close()
    (first(root) / "blocks" / ".x.1.part").write_bytes(b"half")
    (root / ".tenants.json.1.part").write_bytes(b"half")
    blocks_of(root, "alice")[-1].unlink()
    report = verify(DirectoryStore(root))
    assert report.clean
    assert len(report.notes) == 3
    assert "agent 'alice': 1 of 7 blocks are not there" in " ".join(note.what for note in report.notes)


def test_a_repair_removes_blocks_that_no_history_leads_to(root: Path) -> None:
    store = open_store(root)
    with store.open_turn("eve", CAPACITY) as turn:  # never committed
        turn.acquire([9, *HISTORY])
        compute(turn, [9, *HISTORY])
    store.close()
    eve = [
        path
        for path in first(root).glob("blocks/*")
        if container.decode(path.read_bytes())[0]["tokens"].startswith("[9,")
    ]
    assert len(eve) == 1
    eve[0].unlink()  # so that five others hang in the air
    report = repair(DirectoryStore(root))
    assert (report.clean, len(report.repaired)) == (True, 5)
    assert verify(DirectoryStore(root)).notes == []


def test_a_hostile_block_under_the_name_of_other_tokens_is_damage(root: Path) -> None:
    source, target = blocks_of(root, "alice")[:2]
    target.write_bytes(source.read_bytes())
    assert [Path(finding.path) for finding in verify(DirectoryStore(root)).damaged] == [target]


def test_a_directory_of_a_model_that_has_only_just_been_made_is_clean(root: Path) -> None:
    (root / "0000000000000000-0000000000000000" / "blocks").mkdir(parents=True)
    assert (verify(DirectoryStore(root)).damaged, verify(DirectoryStore(root)).notes) == ([], [])


# Garbage --------------------------------------------------------------------------------------------------------------


def test_what_nobody_needs_is_planned_first_then_removed(root: Path) -> None:
    store = open_store(root)
    with store.open_turn("eve", CAPACITY) as turn:  # never committed: six blocks
        turn.acquire([9, *HISTORY])
        compute(turn, [9, *HISTORY])
    store.close()
    (first(root) / "blocks" / ".x.1.part").write_bytes(b"half")
    (root / "quarantine").mkdir()
    (root / "quarantine" / "bad").write_bytes(b"bad")
    before = snapshot(root)
    found = plan(DirectoryStore(root), before=0, quota=1 << 30)
    assert sorted(removal.why for removal in found.removals) == ["a block of no agent"] * 6 + ["half-written"]
    assert snapshot(root) == before
    assert carry_out(DirectoryStore(root), found) == found.size_bytes > 0
    assert plan(DirectoryStore(root), before=0, quota=1 << 30).removals == []
    assert [
        removal.why for removal in plan(DirectoryStore(root), before=0, quota=1 << 30, quarantine=True).removals
    ] == ["in quarantine"]
    assert verify(DirectoryStore(root)).clean


def test_agents_that_were_not_used_for_long_go_with_their_blocks_unless_pinned(root: Path) -> None:
    store = open_store(root, clock=lambda: 1000.0)
    store.pin("bob")
    store.close()
    carry_out(DirectoryStore(root), plan(DirectoryStore(root), before=1500.0, quota=1 << 30))
    inventory = take_inventory(DirectoryStore(root))
    names = {(entry.kv_type, agent.manifest.name) for entry in inventory.models for agent in entry.agents}
    assert names == {("f16", "bob"), ("q8", "alice"), ("q8", "carol")}
    assert [entry.unowned for entry in inventory.models] == [set(), set()]
    store = open_store(root)
    assert talk(store, "bob", [*HISTORY, 1, 2]).cached_tokens == 51
    store.close()


def test_the_quota_takes_anonymous_ones_first_and_ends_before_beginnings(root: Path) -> None:
    size = take_inventory(DirectoryStore(root)).size_bytes
    found = plan(DirectoryStore(root), before=0, quota=size - 3 * blocks_of(root, "alice")[0].stat().st_size)
    assert [removal.why for removal in found.removals] == ["over the quota"] * 3
    carry_out(DirectoryStore(root), found)
    assert found.excess == 0
    inventory = take_inventory(DirectoryStore(root))
    lost = {agent.manifest.name: agent.lost for agent in inventory.models[0].agents}
    anonymous = next(name for name in lost if name.startswith("anonymous"))
    assert lost.pop(anonymous) == (0, 1)
    assert sorted(lost.values()) == [(), (6,)]
    assert verify(DirectoryStore(root)).clean


def test_what_can_not_go_is_told(root: Path) -> None:
    found = plan(DirectoryStore(root), before=0, quota=0)
    kept = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.parent.name != "blocks")
    assert found.excess == kept


def test_blocks_stay_while_a_manifest_that_may_own_them_can_not_be_read(root: Path) -> None:
    path = DirectoryStore(root).path(take_inventory(DirectoryStore(root)).find("bob")[1].blob)
    path.write_bytes(b"")
    found = plan(DirectoryStore(root), before=0, quota=1 << 30)
    assert (found.removals, len(found.notes)) == ([], 1)
    repair(DirectoryStore(root))
    assert [removal.why for removal in plan(DirectoryStore(root), before=0, quota=1 << 30).removals] == [
        "a block of no agent"
    ]


def test_blocks_that_nothing_leads_to_go_first_when_the_quota_is_full(root: Path) -> None:
    store = open_store(root)
    with store.open_turn("eve", CAPACITY) as turn:  # never committed
        turn.acquire([9, *HISTORY])
        compute(turn, [9, *HISTORY])
    store.close()
    for path in first(root).glob("blocks/*"):
        if container.decode(path.read_bytes())[0]["tokens"].startswith("[9,"):
            path.unlink()
    store = open_store(root)
    assert len(store.warm.garbage) == 5
    store.shared.quota = store.warm.bytes + store.shared.other_bytes + 5000
    talk(store, "frank", [8, *HISTORY[:38]])  # five blocks
    assert store.counters["warm_evictions"] == 0
    assert store.warm.garbage == set()
    assert store.warm.bytes == sum(path.stat().st_size for path in first(root).glob("*/*"))
    store.close()


# Other versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0", "2"])
def test_a_manifest_of_another_version_is_a_miss_with_a_reason_and_stays(root: Path, version: str) -> None:
    path = DirectoryStore(root).path(take_inventory(DirectoryStore(root)).find("bob")[1].blob)
    of_version(path, version)
    before = snapshot(root)
    store = open_store(root)
    with store.open_turn("bob", CAPACITY) as turn:
        assert f"version '{version}'" in turn.acquire([77, 78]).reason
    receipt = talk(store, "bob", [*HISTORY, 1, 2])
    assert (receipt.match, receipt.committed) == ("shared", False)
    assert f"version '{version}'" in (receipt.error or "")
    exported = root.parent / f"alice-{version}"
    export_agent(store, "alice", exported)
    with pytest.raises(StoreError, match="exists already"):
        import_agent(store, exported, "bob")
    with pytest.raises(StoreError, match=r"version|exists already"):
        store.fork("alice", "bob")
    store.close()
    assert {name: data for name, data in snapshot(root).items() if name in before} == before
    assert take_inventory(DirectoryStore(root)).quarantined == 0


@pytest.mark.parametrize("more", [b"", b"a longer file"])
def test_a_block_of_another_version_is_a_miss_with_a_reason_and_stays(root: Path, more: bytes) -> None:
    path = blocks_of(root, "bob")[2]
    of_version(path, "2", more)
    data = path.read_bytes()
    store = open_store(root)
    with store.open_turn("bob", CAPACITY) as turn:
        receipt = turn.acquire([*HISTORY, 1, 2])
        assert receipt.cached_tokens == 16
        assert more or "version '2'" in receipt.reason
    store.close()
    assert path.read_bytes() == data
    assert take_inventory(DirectoryStore(root)).quarantined == 0


def test_unowned_blocks_of_another_version_stay(root: Path) -> None:
    shutil.rmtree(first(root) / "manifests")
    paths = list(first(root).glob("blocks/*"))
    for path in paths:
        of_version(path, "2")
    before = snapshot(root)
    open_store(root).close()
    assert verify(DirectoryStore(root)).clean
    repair(DirectoryStore(root))
    found = plan(DirectoryStore(root), before=0, quota=1 << 30)
    assert (found.removals, len(found.notes)) == ([], len(paths))
    carry_out(DirectoryStore(root), found)
    assert snapshot(root) == before


def test_blocks_of_agents_of_another_version_are_not_taken_for_the_quota_of_another_model(root: Path) -> None:
    for path in first(root).glob("manifests/*"):
        of_version(path, "2")
    before = {name: data for name, data in snapshot(root).items() if name.startswith(first(root).name)}
    store = open_store(root, ids=Q8, quota=take_inventory(DirectoryStore(root)).size_bytes)
    talk(store, "dave", [8, *HISTORY])
    store.close()
    assert {name: data for name, data in snapshot(root).items() if name.startswith(first(root).name)} == before


def test_a_wrong_digit_is_not_another_version(root: Path) -> None:
    path = blocks_of(root, "bob")[2]
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"2"', 1))
    manifest = DirectoryStore(root).path(take_inventory(DirectoryStore(root)).find("bob")[1].blob)
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":"1"', b'"version":"2"', 1))
    assert {Path(finding.path) for finding in verify(DirectoryStore(root)).damaged} == {path, manifest}
    repair(DirectoryStore(root))
    assert verify(DirectoryStore(root)).clean


@pytest.mark.parametrize("name", ["tenants.json", "model.json"])
def test_lists_of_another_version_stay(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / name if name == "tenants.json" else first(root) / name
    said = json.loads(path.read_text())["said"]
    monkeypatch.setattr(sealed_module, "VERSION", "2")
    path.write_bytes(sealed(said))
    monkeypatch.undo()
    data = path.read_bytes()
    assert verify(DirectoryStore(root)).clean
    store = open_store(root)
    assert talk(store, "alice", [*HISTORY, 2]).cached_tokens == 50
    talk(store, "alice", HISTORY, tenant="new")
    store.close()
    repair(DirectoryStore(root))
    assert path.read_bytes() == data


def test_ids_are_read_from_where_they_belong(root: Path) -> None:
    assert read_ids(DirectoryStore(root), first(root).name) == model_ids()
    (first(root) / "model.json").write_bytes((root / Q8.directory / "model.json").read_bytes())
    with pytest.raises(StoreError, match="of another directory"):
        read_ids(DirectoryStore(root), first(root).name)


def test_room_for_a_store_is_what_is_free_and_what_it_has(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert abs(most_bytes(DirectoryStore(tmp_path / "not" / "there")) - free) < 1 << 28
    (tmp_path / "agents" / "deep").mkdir(parents=True)
    with (tmp_path / "agents" / "deep" / "file").open("wb") as file:
        file.truncate(1 << 40)
    assert abs(most_bytes(DirectoryStore(tmp_path / "agents")) - free - (1 << 40)) < 1 << 28
