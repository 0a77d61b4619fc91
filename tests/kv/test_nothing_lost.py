"""What two reviews found: histories that were acknowledged and gone, files that stayed and were not counted."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.errors import StoreError, UnknownAgentError
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.disk.lock import StoreLock
from everwarm.kv.manifest import Manifest, decode, encode
from everwarm.kv.store import AgentStore
from everwarm.kv.unsaved import Unsaved
from everwarm.kv.warm.sealed import unsealed
from everwarm.kv.warm.tenants import TENANTS, Tenants
from everwarm.types import Run
from kv import fake
from kv.fake import BLOCK_TOKENS, CAPACITY, check, open_store, talk
from kv.simulated_disk import FaultyFiles, UnsyncedFiles, memory_directory

HISTORY = list(range(32))  # four blocks


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def files_bytes(store: AgentStore) -> int:
    return sum(
        path.stat().st_size for kind in ("blocks", "manifests") for path in (fake.directory(store) / kind).iterdir()
    )


def reopened(root: Path) -> dict[str, list[int]]:
    """Agents after a restart, with their histories."""
    store = open_store(root, files=UnsyncedFiles())
    found = {name: store.history(agent).ids for (_, name), agent in store.agents.by_name.items()}
    assert store.warm.quarantine.count == 0
    store.close()
    return found


# A: counts of tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["pin", "unpin", "fork", "turn"])
def test_a_history_whose_last_blocks_were_given_up_survives_a_restart(tmp_path: Path, deed: str) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, budget_blocks=6, files=files)
    files.arm("write", 1, errno.ENOSPC, lasting=True)
    assert not talk(store, "alice", HISTORY).committed
    talk(store, "x", [900] * 30)  # memory is short: alice's last blocks are given up
    assert [node.block is not None for node in store.find("alice").chain()] == [True, True, False, False]
    files.heal()
    store.evict("alice")
    assert store.find("alice").unsaved is None
    talk(store, "bob", HISTORY[:25])  # computes one of the blocks that alice has lost
    match deed:
        case "fork":
            store.fork("alice", "copy")
        case "turn":
            assert talk(store, "alice", [*HISTORY, 1]).committed
        case _:
            store.pin("alice", deed == "pin")
    manifest = store.histories.manifest(store.find("alice"))
    assert len(manifest.blocks) == -(-manifest.kv_tokens // BLOCK_TOKENS)
    store.close()
    found = reopened(tmp_path)
    assert found["alice"][:32] == HISTORY
    assert found.get("copy", HISTORY) == HISTORY


@pytest.mark.parametrize(
    "odd",
    [
        {"kv_tokens": 24},
        {"kv_tokens": 7},
        {"kv_tokens": 0},
        {"kv_tokens": -1},
        {"kv_tokens": 1 << 40},
        {"blocks": ()},
        {"blocks": (b"x" * 16,) * 4},
        {"blocks": (b"x" * 16,) * 400},
        {"salt": "00" * 16},
    ],
)
def test_an_odd_manifest_keeps_its_tokens_and_text(tmp_path: Path, odd: dict[str, object]) -> None:
    store = open_store(tmp_path, files=UnsyncedFiles())
    talk(store, "alice", HISTORY)
    store.close()
    (path,) = tmp_path.glob("*/manifests/*")
    fields = {name: getattr(decode(path.read_bytes()), name) for name in Manifest.__dataclass_fields__}
    path.write_bytes(b"".join(bytes(part) for part in encode(Manifest(**(fields | odd)))))
    store = open_store(tmp_path, files=UnsyncedFiles())
    assert store.warm.quarantine.count == 0
    with store.open_turn("alice", CAPACITY) as turn:
        assert turn.history.ids == HISTORY
        assert turn.history.runs == (Run(" ".join(map(str, HISTORY)), False, 32),)
        turn.acquire([*HISTORY, 1])
        check(turn, [*HISTORY, 1])
    store.fork("alice", "copy")
    assert talk(store, "alice", [*HISTORY, 1, 2]).committed
    store.close()
    assert reopened(tmp_path) == {"alice": [*HISTORY, 1, 2], "copy": HISTORY}


def test_a_manifest_that_can_not_be_read_is_set_aside_before_another_takes_its_place(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=UnsyncedFiles())
    talk(store, "alice", HISTORY)
    (path,) = tmp_path.glob("*/manifests/*")
    before = path.read_bytes()
    for number in range(3):
        path.write_bytes(before[: -1 - number])
        assert talk(store, "alice", [number, *HISTORY]).committed
    store.close()
    aside = sorted(path.read_bytes() for path in tmp_path.glob("quarantine/*"))
    assert aside == sorted(before[: -1 - number] for number in range(3))


# B: expiry ------------------------------------------------------------------------------------------------------------


def test_an_agent_that_speaks_while_old_ones_expire_stays(tmp_path: Path) -> None:
    now = [1000.0]
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0], most_age_s=10_000.0)
    for name in ("old", "alice", "talking"):
        talk(store, name, HISTORY)
    now[0] += 20_000
    delete = store.histories.remove_if

    def speak_first(agent: object, condition: object) -> bool:
        if getattr(agent, "name", "") == "alice":
            assert talk(store, "alice", [*HISTORY, 1]).committed
        return delete(agent, condition)  # type: ignore[arg-type]

    store.histories.remove_if = speak_first  # type: ignore[method-assign]
    with store.open_turn("talking", CAPACITY):
        assert store.expiry.remove_unused_since(now[0] - 10_000) == 1
    store.close()
    assert reopened(tmp_path) == {"alice": [*HISTORY, 1], "talking": HISTORY}


def test_a_clock_that_is_wrong_or_a_long_absence_does_not_empty_the_store(tmp_path: Path) -> None:
    now = [1000.0]
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0])
    for name in ("long ago", "alice", "bob"):
        talk(store, name, HISTORY)
        now[0] += 8000.0
    store.close()
    now[0] += 1e9  # 30 years
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0], most_age_s=10_000.0)
    assert sorted(name for _, name in store.agents.by_name) == [
        "alice",
        "bob",
    ]  # age counts until the last use of anybody
    now[0] += 500.0
    talk(store, "bob", [*HISTORY, 1])
    store.close()
    now[0] = 10.0  # back in the past
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0], most_age_s=10_000.0)
    assert sorted(name for _, name in store.agents.by_name) == ["alice", "bob"]
    store.close()


def test_a_clock_that_jumps_while_we_run_makes_nobody_older(tmp_path: Path) -> None:
    now, steady = [1000.0], [0.0]
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0], most_age_s=10_000.0)
    store.expiry._steady = lambda: steady[0]
    store.expiry._looked = now[0], steady[0]
    talk(store, "alice", HISTORY)
    for jump, elapsed in ((1e9, 4000.0), (-1e8, 4000.0), (1e8 + 4000.0, 4000.0)):
        now[0] += jump
        steady[0] += elapsed
        talk(store, "bob", [int(elapsed)])
        store.expiry.wait()
        assert "alice" in {name for _, name in store.agents.by_name}
    now[0] += 20_000.0
    steady[0] += 20_000.0
    talk(store, "bob", [1])
    store.expiry.wait()
    assert {name for _, name in store.agents.by_name} == {"bob"}
    store.close()


# D: tenants -----------------------------------------------------------------------------------------------------------


def test_new_tenants_at_once_get_one_salt_each_and_the_file_is_always_whole(tmp_path: Path) -> None:
    class Torn(UnsyncedFiles):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            unsealed(DirectoryStore(tmp_path), TENANTS)  # raises if two threads wrote into one temporary file

    counters: Counter[str] = Counter()
    tenants = Tenants(DirectoryStore(tmp_path, Torn()), True, counters)
    salts: dict[str, set[bytes]] = {f"t{number}": set() for number in range(40)}
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def ask() -> None:
        try:
            start.wait()
            for tenant, found in salts.items():
                found.add(tenants.salt(tenant))
                tenants.salts()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert counters["save_errors"] == 0
    assert [len(found) for found in salts.values()] == [1] * len(salts)
    on_disk = unsealed(DirectoryStore(tmp_path), TENANTS)
    assert {tenant: {bytes.fromhex(on_disk[tenant])} for tenant in salts} == salts


# E: nothing can be saved ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["off", "read-only", "quota full"])
def test_conversations_that_can_not_be_saved_are_bounded(tmp_path: Path, what: str) -> None:
    first = open_store(tmp_path, files=UnsyncedFiles()) if what == "read-only" else None
    store = open_store(None if what == "off" else tmp_path, budget_blocks=64, files=UnsyncedFiles())
    store.agents.unsaved = Unsaved(most_unnamed=20)
    if what == "quota full":
        store.shared.quota = store.warm.bytes + store.shared.other_bytes
    talk(store, "named", [7] * 40)
    for number in range(60):
        receipt = talk(store, None, [number] * 40)
        assert receipt.committed is False
        assert receipt.error
    assert len(store.agents.by_name) == 21
    assert len(store.index.tree.nodes) <= 1 + 21 * 5
    assert store.history(store.find("named")).ids == [7] * 40
    assert talk(store, None, [*[59] * 40, 1]).cached_tokens == 40  # the latest are still there
    store.close()
    if first is not None:
        first.close()


def test_named_agents_that_can_not_be_saved_are_bounded_by_bytes() -> None:
    store = open_store(None)
    store.agents.unsaved = Unsaved(most_bytes=50_000)
    for number in range(30):
        talk(store, f"agent {number}", [number] * 40)
    kept = sorted(int(name.split()[1]) for _, name in store.agents.by_name)
    assert kept == list(range(30 - len(kept), 30))
    assert 5 < len(kept) < 15
    store.close()


def test_a_conversation_that_is_saved_later_no_longer_counts(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.arm("write", 1, errno.ENOSPC, lasting=True)
    talk(store, "alice", HISTORY)
    assert len(store.agents.unsaved) == 1
    files.heal()
    store.evict("alice")
    assert len(store.agents.unsaved) == 0
    store.close()


# F: what can't be deleted or synced -----------------------------------------------------------------------------------


def test_rm_says_what_stays_counts_it_and_tries_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    files.arm("unlink", 2, errno.EBUSY, lasting=True)  # the manifest goes, its blocks don't
    with pytest.raises(StoreError, match=r"was removed, but 4 files .* could not be deleted"):
        store.delete("alice")
    with pytest.raises(UnknownAgentError):
        store.find("alice")
    assert store.warm.bytes == files_bytes(store) > 0
    files.heal()
    talk(store, "bob", [5] * 9)
    assert {key.hex() for key in fake.saved_keys(store)} == {  # type: ignore[union-attr]
        node.key.hex() for node in store.find("bob").chain()
    }
    assert store.warm.bytes == files_bytes(store)
    store.close()


def test_a_block_that_should_go_and_is_computed_again_stays(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    files.arm("unlink", 2, errno.EBUSY, lasting=True)
    with pytest.raises(StoreError):
        store.delete("alice")
    talk(store, "bob", HISTORY)
    files.heal()
    talk(store, "bob", [*HISTORY, 1])
    assert store.warm.bytes == files_bytes(store)
    store.close()
    store = open_store(tmp_path, files=UnsyncedFiles())
    assert talk(store, "bob", [*HISTORY, 1, 2]).cached_tokens == 33
    store.close()


@pytest.mark.parametrize("lasting", [False, True])
def test_a_refused_rm_leaves_the_agent_as_it_was(tmp_path: Path, lasting: bool) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    files.arm("sync_directory", 1, errno.EIO, lasting=lasting)
    with pytest.raises(StoreError, match="'alice' was not removed"):
        store.delete("alice")
    files.heal()
    assert store.warm.bytes == files_bytes(store)
    assert store.history(store.find("alice")).ids == HISTORY
    assert talk(store, "alice", [*HISTORY, 1]).match == "extended"
    store.close()
    assert reopened(tmp_path) == {"alice": [*HISTORY, 1]}


@pytest.mark.parametrize(("kind", "nth"), [("sync_directory", 1), ("sync_directory", 2), ("rename", 1), ("write", 1)])
def test_a_refused_fork_leaves_no_trace(tmp_path: Path, kind: str, nth: int) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    files.arm(kind, nth, errno.EIO, lasting=False)
    with pytest.raises(StoreError, match="'copy' was not saved"):
        store.fork("alice", "copy")
    assert store.warm.bytes == files_bytes(store)
    files.heal()
    store.close()
    assert reopened(tmp_path) == {"alice": HISTORY}


def test_a_refused_fork_whose_manifest_can_not_be_deleted_goes_later(tmp_path: Path) -> None:
    class Stuck(FaultyFiles):
        stuck = False

        def unlink(self, path: Path) -> None:
            if self.stuck:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            super().unlink(path)

    files = Stuck()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    files.arm("sync_directory", 2, errno.EIO, lasting=False)
    files.stuck = True
    with pytest.raises(StoreError):
        store.fork("alice", "copy")
    assert store.warm.bytes == files_bytes(store)
    files.stuck = False
    store.close()
    assert reopened(tmp_path) == {"alice": HISTORY}


@pytest.mark.parametrize("fails", [False, True])
def test_a_new_agent_in_the_place_of_a_refused_one_counts_once(tmp_path: Path, fails: bool) -> None:
    class Stuck(FaultyFiles):
        def unlink(self, path: Path) -> None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    files = Stuck()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    files.arm("sync_directory", 2, errno.EIO, lasting=False)
    with pytest.raises(StoreError):
        store.fork("alice", "copy")
    if fails:
        files.arm("sync_directory", 2, errno.EIO, lasting=False)
    assert talk(store, "copy", [9] * 24).committed is not fails
    assert store.warm.bytes == files_bytes(store)
    store.close()


def test_a_refused_rm_puts_back_what_was_on_disk_and_no_more(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY[:8])
    files.arm("write", 1, errno.ENOSPC, lasting=True)
    assert not talk(store, "alice", HISTORY).committed
    files.arm("sync_directory", 1, errno.EIO, lasting=False)
    with pytest.raises(StoreError, match="'alice' was not removed"):
        store.delete("alice")
    (path,) = tmp_path.glob("*/manifests/*")
    assert set(decode(path.read_bytes()).blocks) <= fake.saved_keys(store)
    assert store.history(store.find("alice")).ids == HISTORY
    store.close()
    assert reopened(tmp_path) == {"alice": HISTORY}


@pytest.mark.parametrize("pinned", [True, False])
def test_a_refused_pin_is_as_if_it_had_not_been_asked_for(tmp_path: Path, pinned: bool) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", HISTORY)
    store.pin("alice", not pinned)
    files.arm("sync_directory", 2, errno.EIO, lasting=False)  # the manifest is in place, but not for sure
    with pytest.raises(StoreError, match="alice"):
        store.pin("alice", pinned)
    assert store.find("alice").pinned is not pinned
    store.close()
    store = open_store(tmp_path, files=UnsyncedFiles())
    assert store.find("alice").pinned is not pinned
    store.close()


def test_blocks_whose_directory_could_not_be_synced_are_written_again(tmp_path: Path) -> None:
    """The system may forget a rename although the next sync succeeds: no commit may rely on it."""

    class Watched(FaultyFiles):
        renamed: set[str] = set()  # noqa: RUF012

        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            self.renamed.add(new.stem)

    files = Watched()
    store = open_store(tmp_path, files=files)
    files.arm("sync_directory", 1, errno.EIO, lasting=False)
    assert not talk(store, "alice", HISTORY).committed
    names = {node.key.hex() for node in store.find("alice").chain()}
    assert names <= files.renamed
    with store.index.lock:  # the memory is needed for something else: these are read from disk, to be written again
        for node in store.find("alice").chain()[2:]:
            assert store.index.cool(node, forced=True)
    files.renamed.clear()
    assert talk(store, "alice", [*HISTORY, 1]).committed
    assert names <= files.renamed
    files.renamed.clear()
    assert talk(store, "alice", [*HISTORY, 1, 2]).committed
    assert not names & files.renamed
    assert store.warm.bytes == files_bytes(store)
    store.close()


def test_a_suspect_block_is_not_dropped_from_memory_before_it_is_safe(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.arm("sync_directory", 1, errno.EIO, lasting=True)
    talk(store, "alice", HISTORY)
    with store.index.lock:
        assert not any(store.index.cool(node) for node in store.find("alice").chain())
    files.heal()
    store.evict("alice")
    assert talk(store, "alice", [*HISTORY, 1]).tier == "warm"
    store.close()


# G: the lock ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=UnsyncedFiles())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        store.close()
        again = open_store(tmp_path, files=UnsyncedFiles())
        assert again.read_only == ""
        again.close()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_lock_that_can_not_be_emptied_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = StoreLock(tmp_path)
    descriptors = len(os.listdir("/proc/self/fd"))

    def failing(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", failing)
        lock.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    StoreLock(tmp_path).release()


# What else the state machine found ------------------------------------------------------------------------------------


def test_a_turn_that_is_suspended_twice_loses_no_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_blocks=12, files=UnsyncedFiles())
    talk(store, "alice", HISTORY[:21])
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire(HISTORY[:21])
        turn.suspend()
        turn.resume()
        turn.suspend()
    store.flush()
    assert {
        store.index.pool.owners(node.block) for node in store.index.tree.nodes.values() if node.block is not None
    } == {1}
    store.evict("alice")
    assert store.index.pool.in_use == 0
    store.close()


def test_a_block_that_can_not_be_read_for_a_moment_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, files=UnsyncedFiles())
    talk(store, "alice", HISTORY)
    store.evict("alice")

    def failing(path: Path, parts: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("everwarm.kv.disk.directory.read_into", failing)
        with store.open_turn("alice", CAPACITY) as turn:
            receipt = turn.acquire([*HISTORY, 1])
            assert receipt.reason == os.strerror(errno.EMFILE)  # and no path of this machine
    assert talk(store, "alice", [*HISTORY, 1]).cached_tokens == 32
    assert store.warm.bytes == files_bytes(store)
    store.close()


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_a_file_that_is_not_a_file_is_never_read(tmp_path: Path, what: str) -> None:
    """A pipe would make us wait for ever, a link would read what is not ours."""
    store = open_store(tmp_path / "store", files=UnsyncedFiles())
    talk(store, "alice", HISTORY)
    store.close()
    for path in [*(tmp_path / "store").glob("*/*/*"), tmp_path / "store" / "tenants.json"]:
        elsewhere = tmp_path / "elsewhere" / path.name
        elsewhere.parent.mkdir(exist_ok=True)
        path.rename(elsewhere)
        match what:
            case "link":
                path.symlink_to(elsewhere)
            case "pipe":
                os.mkfifo(path)
            case "directory":
                path.mkdir()
    store = open_store(tmp_path / "store", files=UnsyncedFiles())
    receipt = talk(store, "alice", [*HISTORY, 1])
    assert receipt.cached_tokens == 0
    store.close()
    assert all(path.read_bytes() for path in (tmp_path / "elsewhere").iterdir())
