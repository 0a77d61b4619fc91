"""System calls fail in every place of a save: answers go on and are right, the error is counted and shown, and when the
fault is gone everything becomes safe.
"""

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.disk.lock import StoreLock
from everwarm.kv.store import AgentStore
from everwarm.opening import read_whole
from kv import fake
from kv.fake import CAPACITY, check, open_store, talk
from kv.simulated_disk import FaultyFiles, Killed, RecordedFiles, UnsyncedFiles, memory_directory

FIRST = random.Random(1).choices(range(1000), k=20)  # two full blocks and a partial one
LONGER = [*FIRST, *random.Random(2).choices(range(1000), k=17)]  # two more, and another partial one

# A turn that goes from FIRST to LONGER saves three blocks and a manifest, then deletes the block that was the end.
CALLS = {"create": 4, "write": 4, "sync": 4, "close": 4, "rename": 4, "sync_directory": 2, "unlink": 1}
ERRORS = {"write": errno.ENOSPC, "create": errno.ENOSPC}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def check_counts(store: AgentStore) -> None:
    """While nobody talks, each hot block has one owner, the tree, and there are no others."""
    store.flush()
    hot = [node.block for node in store.index.tree.nodes.values() if node.block is not None]
    assert [store.index.pool.owners(block) for block in hot] == [1] * len(hot)
    assert store.index.pool.in_use == len(hot)
    assert not any(node.claims or node.writing for node in store.index.tree.nodes.values())


def close(store: AgentStore) -> None:
    check_counts(store)
    store.close()
    assert store.index.pool.in_use == 0


def check_reopened(root: Path, histories: dict[str, list[int]], *, left_over: int = 0, kv: bool = True) -> None:
    """What is on disk is clean, and these agents are there, as a whole."""
    store = open_store(root, files=UnsyncedFiles())
    assert not list(root.rglob("*.part"))
    assert (store.read_only, store.counters["corrupt"], store.warm.quarantine.count) == ("", 0, 0)
    for path in [*fake.directory(store).glob("blocks/*"), *fake.directory(store).glob("manifests/*")]:
        container.decode(path.read_bytes())
    assert {name for _, name in store.agents.by_name} == set(histories)
    owned = {node.key for agent in store.agents.by_name.values() for node in agent.chain()}
    on_disk = fake.saved_keys(store)
    assert len(on_disk - owned) <= left_over
    for name, history in histories.items():
        with store.open_turn(name, CAPACITY) as turn:
            assert turn.history.ids == history
            receipt = turn.acquire([*history, 1])
            check(turn, [*history, 1])
            assert receipt.cached_tokens == len(history) or not kv
    close(store)


def test_a_save_makes_the_calls_that_are_let_fail_here(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    files.heal()
    assert talk(store, "alice", LONGER).committed
    assert {kind: count for kind, count in files.calls.items() if kind != "any"} == CALLS
    close(store)


PLACES = [(kind, nth) for kind, count in CALLS.items() for nth in range(1, count + 1)]


@pytest.mark.parametrize(("kind", "nth"), PLACES)
def test_a_call_that_fails_once_costs_nothing_but_time(tmp_path: Path, kind: str, nth: int) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    files.arm(kind, nth, ERRORS.get(kind, errno.EIO), lasting=False)
    receipt = talk(store, "alice", LONGER)
    assert files.calls[kind] >= nth
    if kind != "unlink":  # then only space is lost
        assert store.counters["save_errors"] == 1
    if not receipt.committed:
        assert receipt.error is not None
        assert "alice" in receipt.error
        assert talk(store, "alice", LONGER).committed
    close(store)
    check_reopened(tmp_path, {"alice": LONGER}, left_over=kind == "unlink")


@pytest.mark.parametrize(("kind", "nth"), [place for place in PLACES if place[0] != "unlink"])
def test_while_a_call_keeps_failing_serving_goes_on(tmp_path: Path, kind: str, nth: int) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    files.arm(kind, nth, ERRORS.get(kind, errno.EIO), lasting=True)
    receipt = talk(store, "alice", LONGER)
    assert (receipt.committed, store.counters["save_errors"] > 0) == (False, True)
    assert "Input/output error" in str(receipt.error) or "No space left" in str(receipt.error)
    blocks = store.index.pool.in_use
    with pytest.raises(StoreError, match="alice"):
        store.evict("alice")
    assert store.index.pool.in_use == blocks
    hot = talk(store, "alice", [*LONGER, 1])
    assert (hot.tier, hot.cached_tokens, hot.committed) == ("hot", len(LONGER), False)
    assert not talk(store, "bob", FIRST[1:]).committed
    files.heal()
    assert store.evict("alice") > 0
    assert talk(store, "alice", [*LONGER, 1, 2]).tier == "warm"
    close(store)  # saves bob
    check_reopened(tmp_path, {"alice": [*LONGER, 1, 2], "bob": FIRST[1:]})


@pytest.mark.parametrize("nth", range(1, CALLS["write"] + 1))
def test_a_short_write_is_gone_on_with(tmp_path: Path, nth: int) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    files.arm("write", nth, 0, lasting=False)
    assert talk(store, "alice", LONGER).committed
    assert files.calls["write"] == CALLS["write"] + 1
    assert store.counters["save_errors"] == 0
    close(store)
    check_reopened(tmp_path, {"alice": LONGER})


def test_killed_after_any_call_of_a_save(tmp_path: Path) -> None:
    """The page cache stays: what was done before is there."""
    found = []
    for operations in range(100):
        root = tmp_path / str(operations) / "agents"
        files = RecordedFiles(tmp_path)
        store = open_store(root, files=files)
        talk(store, "alice", FIRST)
        files.left = operations
        try:
            committed = bool(talk(store, "alice", LONGER).committed)
        except Killed:
            committed = False
        files.left = 0
        with suppress(Killed):
            store.close()
        store = open_store(root, files=UnsyncedFiles())
        with store.open_turn("alice", CAPACITY) as turn:
            found.append(turn.history.ids)
        assert found[-1] in (FIRST, LONGER)
        assert found[-1] == LONGER or not committed
        assert talk(store, "bob", FIRST).cached_tokens == len(FIRST) - 1
        close(store)
        check_reopened(root, {"alice": found[-1], "bob": FIRST}, left_over=3)
        if committed:
            break
    assert found == sorted(found, key=len)
    assert found.count(FIRST) > 15


def test_on_a_full_disk_under_a_small_budget_blocks_are_computed_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, budget_blocks=8, files=files)
    histories = {f"agent {n}": [1000 * n + i for i in range(26)] for n in range(4)}
    files.arm("write", 1, errno.ENOSPC, lasting=True)
    for turn in range(3):
        for name, history in histories.items():
            history.append(turn)
            receipt = talk(store, name, history)
            assert receipt.committed is False
            assert "No space left" in str(receipt.error)
            assert store.index.pool.in_use <= 8
    assert store.counters["hot_evictions"] > 0
    files.heal()
    for name in histories:
        store.evict(name)
    close(store)
    check_reopened(tmp_path, histories, kv=False)
    store = open_store(tmp_path, files=UnsyncedFiles())
    for name, history in histories.items():
        assert talk(store, name, history).committed
    close(store)
    check_reopened(tmp_path, histories)


def test_closing_saves_what_could_not_be_saved_before(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.arm("write", 1, errno.ENOSPC, lasting=True)
    assert not talk(store, "alice", LONGER).committed
    files.heal()
    close(store)
    check_reopened(tmp_path, {"alice": LONGER})


def test_closing_on_a_full_disk_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    files.arm("write", 1, errno.ENOSPC, lasting=True)
    assert not talk(store, "alice", LONGER).committed
    close(store)
    assert "alice" in caplog.text
    check_reopened(tmp_path, {"alice": FIRST})


def test_without_waiting_the_receipt_tells_later(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files, durability="async")
    files.arm("sync", 1, errno.EIO, lasting=True)
    receipt = talk(store, "alice", LONGER)
    store.flush()
    assert (receipt.committed, "Input/output error" in str(receipt.error)) == (False, True)
    files.heal()
    receipt = talk(store, "alice", [*LONGER, 1])
    store.flush()
    assert receipt.committed
    close(store)
    check_reopened(tmp_path, {"alice": [*LONGER, 1]})


def test_a_fork_that_fails_is_no_agent_and_can_be_tried_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    for kind in ("create", "write", "sync", "close", "rename", "sync_directory"):
        files.arm(kind, 1, errno.EIO, lasting=True)
        with pytest.raises(StoreError, match="bob"):
            store.fork("alice", "bob")
        files.heal()
        with pytest.raises(StoreError, match="no such agent"):
            store.find("bob")
    store.fork("alice", "bob")
    close(store)
    check_reopened(tmp_path, {"alice": FIRST, "bob": FIRST})


@pytest.mark.parametrize("kind", ["create", "write", "sync", "close", "rename", "sync_directory"])
def test_a_pin_that_was_not_saved_is_saved_later(tmp_path: Path, kind: str) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    files.arm(kind, 1, errno.EIO, lasting=True)
    with pytest.raises(StoreError, match="alice"):
        store.pin("alice")
    files.heal()
    store.pin("alice")
    close(store)
    store = open_store(tmp_path, files=UnsyncedFiles())
    assert store.find("alice").pinned
    close(store)


@pytest.mark.parametrize(("kind", "nth"), [("unlink", 1), ("sync_directory", 1)])
def test_a_delete_that_fails_says_so_and_can_be_tried_again(tmp_path: Path, kind: str, nth: int) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    talk(store, "alice", FIRST)
    talk(store, "bob", FIRST)
    files.arm(kind, nth, errno.EIO, lasting=True)
    with pytest.raises(StoreError, match="alice"):
        store.delete("alice")
    assert store.counters["save_errors"] == 1
    files.heal()
    assert store.find("alice").tokens == len(FIRST)
    store.delete("alice")
    close(store)
    check_reopened(tmp_path, {"bob": FIRST})


def test_a_salt_that_could_not_be_kept_is_kept_later(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.arm("rename", 1, errno.ENOSPC, lasting=False)
    assert talk(store, "alice", FIRST, tenant="other").committed
    assert store.counters["save_errors"] == 1
    assert talk(store, "alice", LONGER, tenant="other").committed
    close(store)
    store = open_store(tmp_path, files=UnsyncedFiles())
    assert talk(store, "bob", LONGER, tenant="other").cached_tokens == len(LONGER) - 1
    close(store)


def test_a_store_in_which_any_call_fails_while_it_opens_serves(tmp_path: Path) -> None:
    before = open_store(tmp_path / "before" / "agents", files=UnsyncedFiles())
    talk(before, "alice", FIRST)
    close(before)
    (tmp_path / "before" / "agents" / ".tenants.json.1.part").write_bytes(b"left by a crash")
    for known in (0, len(FIRST)):
        for nth in range(1, 100):
            root = tmp_path / f"{known}-{nth}" / "agents"
            if known:
                shutil.copytree(tmp_path / "before", root.parent)
            files = FaultyFiles()
            files.arm("any", nth, errno.EIO, lasting=True)
            store = open_store(root, files=files)
            failed = files.calls["any"] >= nth
            assert "Input/output error" in store.read_only or store.counters["save_errors"] == 1 or not failed
            receipt = talk(store, "alice", [*FIRST, 1])
            assert receipt.cached_tokens == known
            assert "Input/output error" in str(receipt.error)
            files.heal()
            close(store)
            if not failed:
                break
            saved = [*FIRST, 1] if not store.read_only else FIRST
            check_reopened(root, {"alice": saved} if known or not store.read_only else {}, left_over=1)
        assert 5 < nth < 99


def test_an_agent_that_is_too_old_but_can_t_be_deleted_is_kept(tmp_path: Path) -> None:
    now = [1000.0]
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0])
    talk(store, "alice", FIRST)
    now[0] = 5000.0
    talk(store, "bob", FIRST)
    close(store)
    files = FaultyFiles()
    files.arm("unlink", 1, errno.EIO, lasting=True)
    store = open_store(tmp_path, files=files, clock=lambda: 5000.0, most_age_s=10.0)
    assert talk(store, "alice", [*FIRST, 1]).cached_tokens == len(FIRST)
    assert store.counters["save_errors"] > 0
    close(store)


def test_a_store_that_stays_open_forgets_who_was_not_used_for_too_long(tmp_path: Path) -> None:
    now = [1000.0]
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0], most_age_s=10_000.0)
    for name in ("old", "pinned", "young"):
        talk(store, name, FIRST)
    store.pin("pinned")
    now[0] += 9000
    talk(store, "young", [*FIRST, 1])
    now[0] += 4000
    talk(store, "new", FIRST)  # an hour has passed: it is looked for the old
    close(store)
    store = open_store(tmp_path, files=UnsyncedFiles(), clock=lambda: now[0])
    assert sorted(name for _, name in store.agents.by_name) == ["new", "pinned", "young"]
    close(store)


# Directories that are not as they should be ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory in which alice has said FIRST."""
    store = open_store(tmp_path / "agents", files=UnsyncedFiles())
    talk(store, "alice", FIRST)
    close(store)
    return tmp_path / "agents"


def check_serving_without_disk(root: Path, reason: str) -> None:
    """It opens, says why nothing is saved, and serves from memory."""
    store = open_store(root, files=UnsyncedFiles())
    assert reason in store.read_only
    first = talk(store, "bob", FIRST)
    assert (first.committed, first.tier) == (False, "cold")
    assert reason in str(first.error)
    hot = talk(store, "bob", LONGER)
    assert (hot.tier, hot.cached_tokens) == ("hot", len(FIRST))
    for change in (store.delete, store.pin, store.evict, lambda name: store.fork(name, "carol")):
        with pytest.raises(StoreError, match=reason):
            change("bob")
    close(store)


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    (tmp_path / "agents").write_text("mine")
    check_serving_without_disk(tmp_path / "agents", "Not a directory")
    check_serving_without_disk(tmp_path / "agents" / "below", "Not a directory")
    assert (tmp_path / "agents").read_text() == "mine"


def test_what_is_missing_above_the_store_is_made(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "agents"
    store = open_store(root, files=UnsyncedFiles())
    assert talk(store, "alice", FIRST).committed
    close(store)
    check_reopened(root, {"alice": FIRST})
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["lock", "tenants.json", "*/model.json"])
def test_a_directory_where_a_file_should_be(saved: Path, place: str) -> None:
    (path,) = saved.glob(place)
    path.unlink()
    path.mkdir()
    store = open_store(saved, files=UnsyncedFiles())
    assert talk(store, "alice", LONGER).cached_tokens == len(FIRST)
    close(store)
    if place == "lock":
        assert "Is a directory" in store.read_only
        path.rmdir()
        check_reopened(saved, {"alice": FIRST})
    else:  # it went to quarantine
        assert store.counters["corrupt"] == 1
        check_reopened(saved, {"alice": LONGER})


@pytest.mark.parametrize("place", ["*/blocks", "*/manifests"])
def test_a_file_where_a_directory_should_be(saved: Path, place: str) -> None:
    (path,) = saved.glob(place)
    path.rename(saved.parent / "aside")
    path.write_text("mine")
    store = open_store(saved, files=UnsyncedFiles())
    assert "File exists" in store.read_only
    assert talk(store, "alice", LONGER).committed is False
    close(store)
    path.unlink()
    (saved.parent / "aside").rename(path)
    check_reopened(saved, {"alice": FIRST})


@pytest.mark.parametrize(
    "garbage", [b"\xff\xfe", b"{", b"[]", b'{"pid": Infinity, "command": 1}', b"[" * 100_000, b"\0" * 99]
)
def test_garbage_in_the_lock_file_means_nothing(saved: Path, garbage: bytes) -> None:
    (saved / "lock").write_bytes(garbage)
    check_reopened(saved, {"alice": FIRST})
    held = StoreLock(saved)
    (saved / "lock").write_bytes(garbage)
    beside = open_store(saved, files=UnsyncedFiles())
    assert "another process is writing in it" in beside.read_only
    close(beside)
    held.release()


def test_a_lock_whose_holder_can_t_be_written_is_held_all_the_same(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        store = open_store(saved, files=UnsyncedFiles())
    assert not store.read_only
    assert "is writing in it" in open_store(saved, files=UnsyncedFiles()).read_only
    close(store)
    check_reopened(saved, {"alice": FIRST})


def test_a_store_that_is_deleted_while_it_runs_goes_on_in_memory(saved: Path) -> None:
    store = open_store(saved, files=UnsyncedFiles())
    talk(store, "bob", LONGER)
    shutil.rmtree(saved)
    lost = talk(store, "alice", FIRST)
    assert (lost.cached_tokens, lost.committed) == (len(FIRST) - 1, False)  # bob has the same in memory
    assert "No such file" in str(lost.error)
    hot = talk(store, "bob", [*LONGER, 1])
    assert (hot.tier, hot.cached_tokens, hot.committed) == ("hot", len(LONGER), False)
    with pytest.raises(StoreError, match="No such file"):
        store.evict("bob")
    with pytest.raises(StoreError, match="No such file"):
        store.delete("bob")
    close(store)


def test_a_store_that_becomes_a_file_while_it_runs_goes_on_in_memory(saved: Path) -> None:
    store = open_store(saved, files=UnsyncedFiles())
    saved.rename(saved.parent / "aside")
    saved.write_text("mine")
    receipt = talk(store, "alice", LONGER)
    assert (receipt.cached_tokens, receipt.committed) == (0, False)
    assert "Not a directory" in receipt.reason
    assert store.counters["save_errors"] > 0
    close(store)
    check_reopened(saved.parent / "aside", {"alice": FIRST})


def test_a_store_that_comes_back_is_whole_again(saved: Path) -> None:
    """Such as a disk that was not mounted for a while."""
    store = open_store(saved, files=UnsyncedFiles())
    saved.rename(saved.parent / "aside")
    assert talk(store, "alice", LONGER).committed is False
    (saved.parent / "aside").rename(saved)
    assert talk(store, "alice", [*LONGER, 1]).committed
    close(store)
    check_reopened(saved, {"alice": [*LONGER, 1]}, left_over=1)


class ForbiddenFiles(UnsyncedFiles):
    """Nothing may be changed."""

    def create(self, path: Path) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def rename(self, old: Path, new: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(old))

    def unlink(self, path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def make_directory(self, path: Path) -> None:
        if not path.is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_store_of_someone_else_can_be_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(root: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root / "lock"))

    with monkeypatch.context() as patch:
        patch.setattr("everwarm.kv.disk.directory.StoreLock", forbidden)
        store = open_store(saved, files=ForbiddenFiles())
    assert "Permission denied" in store.read_only
    receipt = talk(store, "alice", LONGER)
    assert (receipt.tier, receipt.cached_tokens, receipt.committed) == ("warm", len(FIRST), False)
    assert "Permission denied" in str(receipt.error)
    close(store)
    check_reopened(saved, {"alice": FIRST})


def test_a_store_in_which_writing_is_forbidden_later_goes_on(saved: Path) -> None:
    store = open_store(saved, files=ForbiddenFiles())
    assert not store.read_only
    receipt = talk(store, "alice", LONGER)
    assert (receipt.tier, receipt.cached_tokens, receipt.committed) == ("warm", len(FIRST), False)
    with pytest.raises(StoreError, match="Permission denied"):
        store.delete("alice")
    close(store)
    check_reopened(saved, {"alice": FIRST})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
@pytest.mark.parametrize(("mode", "cached"), [(0o755, len(FIRST)), (0o700, 0)])
def test_the_system_forbids_what_it_should(saved: Path, mode: int, cached: int) -> None:
    """As another user, in a directory that may be read or not."""
    for path in [saved.parent, saved, *saved.rglob("*")]:
        path.chmod(mode)
    saved.parent.chmod(0o755)
    os.seteuid(65534)
    try:
        store = open_store(saved)
        receipt = talk(store, "alice", LONGER)
        close(store)
    finally:
        os.seteuid(0)
    assert "Permission denied" in store.read_only
    assert (receipt.cached_tokens, receipt.committed) == (cached, False)
    check_reopened(saved, {"alice": FIRST})


def test_a_manifest_that_can_t_be_read_is_left_and_not_replaced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = saved.glob("*/manifests/*")

    def forbidden(found: Path) -> bytes:
        if found == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(found))
        return read_whole(found)

    with monkeypatch.context() as patch:
        patch.setattr("everwarm.kv.disk.directory.read_whole", forbidden)
        store = open_store(saved, files=UnsyncedFiles())
        receipt = talk(store, "alice", LONGER)
        assert receipt.committed is False
        assert "Permission denied" in str(receipt.error)
        assert store.counters["read_errors"] == 1
        close(store)
    check_reopened(saved, {"alice": FIRST}, left_over=3)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_block_that_can_t_be_read_is_computed_and_left(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def failing(path: Path, parts: object) -> int:
        raise OSError(error, os.strerror(error), str(path))

    store = open_store(saved, files=UnsyncedFiles())
    with monkeypatch.context() as patch:
        patch.setattr("everwarm.kv.disk.directory.read_into", failing)
        receipt = talk(store, "alice", LONGER)
    assert (receipt.cached_tokens, receipt.committed) == (0, True)
    assert os.strerror(error) in receipt.reason
    assert store.counters["read_errors"] > 0
    assert not (saved / "quarantine").exists()
    close(store)
    check_reopened(saved, {"alice": LONGER}, left_over=1)
