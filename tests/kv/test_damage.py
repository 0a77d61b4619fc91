"""Files of a store change behind its back: a miss with a reason or no effect; never other bytes, never an exception."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.chain import child_key, root_key, token_bytes
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.index.pool import HeapBlocks
from everwarm.kv.manifest import decode
from everwarm.kv.receipt import Receipt
from everwarm.kv.store import AgentStore
from everwarm.kv.warm.blocks import BlockName, CorruptError, ModelBlocks
from everwarm.kv.warm.blockstore import Blob
from everwarm.kv.warm.sealed import unsealed
from kv.fake import BLOCK_TOKENS, CAPACITY, TOKEN_BYTES, compute, kv_bytes, model_ids, open_store, talk
from kv.simulated_disk import UnsyncedFiles, memory_directory

ALICE = [1000 + 99 * i for i in range(20)]  # two full blocks and a partial one; numbers such as 1099: 1e99 is one too
BOB = [*ALICE[:11], *range(5, 10)]  # shares a block and a part; ends with a full one
CAROL = list(range(2000, 2010))  # of another tenant
NOBODY = list(range(3000, 3009))
LOST = [*NOBODY[:8], *range(4000, 4009)]  # a turn that was not committed: two full blocks, one of them nobody's too

TALKS: list[tuple[str | None, str, list[int]]] = [
    ("alice", "", ALICE),
    ("bob", "", BOB),
    ("carol", "other", CAROL),
    (None, "", NOBODY),
    (None, "", LOST),
]
WARM = [20, 16, 10, 9, 16]  # tokens that come from an undamaged store


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture(scope="module")
def undamaged() -> Iterator[Path]:
    with memory_directory() as path:
        yield make_store(path / "agents")


def make_store(root: Path) -> Path:
    store = open_store(root, files=UnsyncedFiles())
    for name, tenant, history in TALKS[:-1]:
        talk(store, name, history[:-3], tenant=tenant)
        talk(store, name, history, tenant=tenant)
    for name, tenant in [who for who in store.agents.by_name if who[1].startswith("anonymous")]:
        if len(store.agents.by_name[name, tenant].chain()) < 2:
            store.delete(tenant)
    with store.open_turn("dave", CAPACITY) as turn:
        turn.acquire(LOST)
        compute(turn, LOST)
    store.close()
    return root


@pytest.fixture
def root(undamaged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undamaged, tmp_path / "agents"))


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def converse(store: AgentStore) -> list[Receipt]:
    """A turn of everybody; nobody gets other bytes than computing gives."""
    return [talk(store, name, [*history, 7], tenant=tenant) for name, tenant, history in TALKS]


def use(root: Path) -> int:
    """Open a store in which something is not as it was, and talk. Returns how often damage was counted; all that is
    missed must be, and have a reason.
    """
    store = open_store(root, files=UnsyncedFiles())
    assert not store.read_only
    receipts = converse(store)
    missed = [
        receipt.reason for receipt, expected in zip(receipts, WARM, strict=True) if receipt.cached_tokens < expected
    ]
    counted = store.counters["corrupt"] + store.counters["read_errors"] + len(store.warm.quarantine.left_alone)
    assert counted or not missed
    assert all(missed)
    store.close()
    assert store.index.pool.in_use == 0
    return counted


def test_an_undamaged_store_misses_nothing(root: Path) -> None:
    store = open_store(root, files=UnsyncedFiles())
    assert [receipt.cached_tokens for receipt in converse(store)] == WARM
    assert store.counters["corrupt"] == 0
    store.close()
    kinds = [path.parent.name for path in files_of(root)]
    assert {kind: kinds.count(kind) for kind in set(kinds)}.keys() >= {"agents", "blocks", "manifests"}


# Every byte of a file, by the functions that read it ------------------------------------------------------------------


def flipped(path: Path, bits: int = 1) -> Iterator[bytes]:
    """The file with one bit changed, for `bits` of each of its bytes."""
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        for bit in range(at, at + bits):
            data[at] ^= 1 << bit % 8
            yield bytes(data)
            data[at] ^= 1 << bit % 8


@dataclass
class OneBlock:
    """A block file alone in a directory."""

    disk: DirectoryStore
    name: BlockName
    path: Path
    data: bytes  # of the block

    def read(self) -> bytes:
        memory = HeapBlocks(BLOCK_TOKENS, BLOCK_TOKENS * TOKEN_BYTES)
        buffer = memory.host_view(memory.allocate())
        self.disk.get(self.name, [buffer])
        return buffer.tobytes()


@pytest.fixture
def block(tmp_path: Path) -> OneBlock:
    disk = ModelBlocks(DirectoryStore(tmp_path, UnsyncedFiles()), model_ids())
    disk.prepare()
    tokens = token_bytes(ALICE[:BLOCK_TOKENS])
    parent = root_key(b"salt", disk.ids.layout.digest, disk.ids.weights_id, disk.ids.numerics_id)
    name = BlockName(child_key(parent, tokens), parent, tokens)
    data = kv_bytes(ALICE[:BLOCK_TOKENS])
    disk.put(name, [data.reshape(-1)])
    return OneBlock(disk, name, disk.store.path(disk.blob(name.id)), data.tobytes())


def test_any_byte_of_a_block_file_is_noticed_when_it_is_read(block: OneBlock) -> None:
    assert block.read() == block.data
    for file in flipped(block.path):
        block.path.write_bytes(file)
        with pytest.raises((CorruptError, container.VersionError)):
            block.read()


def test_a_block_file_without_an_owner_never_gets_another_name(block: OneBlock) -> None:
    assert block.disk.describe(block.name.id) == block.name
    for file in flipped(block.path):
        block.path.write_bytes(file)
        with suppress(CorruptError, container.VersionError):
            assert block.disk.describe(block.name.id) == block.name  # its data are looked at when they are read


def test_a_block_file_with_other_letters_in_its_header_never_gets_another_name(block: OneBlock) -> None:
    """Such as 1e99 for 1099, or a tensor within a tensor."""
    data = bytearray(block.path.read_bytes())
    for at in [*range(8, data.index(b"  "), 7), *range(data.index(b"tokens"), data.index(b"weights_id"))]:
        for letter in b'e.-[]{"0':
            before, data[at] = data[at], letter
            block.path.write_bytes(data)
            with suppress(CorruptError, container.VersionError):
                assert block.disk.describe(block.name.id) == block.name
            data[at] = before


def test_any_byte_of_a_manifest_is_noticed(undamaged: Path) -> None:
    for path in undamaged.glob("*/manifests/*"):
        decode(path.read_bytes())
        for file in flipped(path):
            with pytest.raises(StoreError):
                decode(file)


@pytest.mark.parametrize("name", ["tenants.json", "*/model.json"])
def test_any_byte_of_a_sealed_file_is_noticed_or_means_nothing(undamaged: Path, tmp_path: Path, name: str) -> None:
    (path,) = undamaged.glob(name)
    said = unsealed(DirectoryStore(path.parent), Blob("", "", path.name))
    copy = tmp_path / "copy"
    for file in flipped(path, bits=8):
        copy.write_bytes(file)
        with suppress(StoreError):
            assert unsealed(DirectoryStore(tmp_path), Blob("", "", "copy")) == said  # only white space has changed


# Bytes of every file of a store ---------------------------------------------------------------------------------------


def test_a_flipped_byte_in_any_file_is_a_miss_or_nothing(undamaged: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    noticed = 0
    for number, path in enumerate(files_of(undamaged)):
        size = path.stat().st_size
        places = {0, 3, 7, *range(28, 44, 5), size - 1, *chance.sample(range(size), k=min(size, 8))}
        places |= set(chance.sample(range(min(size, 800)), k=min(size, 16)))  # in the header
        if "EVERWARM_TEST_EVERY_BYTE" in os.environ:
            places = set(range(size))
        for at in sorted(place for place in places if 0 <= place < size):
            root = Path(shutil.copytree(undamaged, tmp_path / f"{number}-{at}"))
            copy = root / path.relative_to(undamaged)
            data = bytearray(copy.read_bytes())
            data[at] ^= 1 << chance.randrange(8)
            copy.write_bytes(data)
            noticed += use(root) > 0
            shutil.rmtree(root)
    assert noticed > 250


def change_length(length: Callable[[int], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        os.truncate(path, max(0, length(path.stat().st_size)))

    return change


def append(data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(path.read_bytes() + data)

    return change


def overwrite(data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(data)

    return change


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, Callable[[Path], None]] = {
    "empty": change_length(lambda size: 0),
    "one byte": change_length(lambda size: 1),
    "no whole length": change_length(lambda size: 7),
    "only the length": change_length(lambda size: 8),
    "a part of the header": change_length(lambda size: min(size, 4096) - 1),
    "only the header": change_length(lambda size: min(size, 4096)),
    "header and a byte": change_length(lambda size: min(size, 4097)),
    "half": change_length(lambda size: size // 2),
    "the last byte gone": change_length(lambda size: size - 1),
    "a byte too many": append(b"\0"),
    "a page too many": append(bytes(4096)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "garbage": overwrite(random.Random(4).randbytes(5000)),
    "json": overwrite(b'{"checksum": [], "said": {"default": 5}}'),
    "nested": overwrite(b"[" * 100_000),
    "gone": Path.unlink,
    "a directory": replace_by_directory,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_a_miss_or_nothing(undamaged: Path, tmp_path: Path, change: str) -> None:
    for number, path in enumerate(files_of(undamaged)):
        if change == "a directory" and path.parent == undamaged:
            continue  # then nothing can be written: test_faults.py
        root = Path(shutil.copytree(undamaged, tmp_path / str(number)))
        CHANGES[change](root / path.relative_to(undamaged))
        if change == "gone":
            store = open_store(root, files=UnsyncedFiles())
            converse(store)
            store.close()
        else:
            use(root)
        store = open_store(root, files=UnsyncedFiles())  # what was bad is out of the way, what was missed is there
        assert store.counters["corrupt"] == 0
        assert [receipt.cached_tokens for receipt in converse(store)] == [len(history) + 0 for *_, history in TALKS]
        store.close()
        shutil.rmtree(root)


def test_a_file_in_the_place_of_another_is_a_miss(undamaged: Path, tmp_path: Path) -> None:
    names = [path.relative_to(undamaged) for path in files_of(undamaged) if path.name != "lock"]
    for number, (a, b) in enumerate((a, b) for a in names for b in names if a < b):
        root = Path(shutil.copytree(undamaged, tmp_path / str(number)))
        (root / a).rename(root / "aside")
        (root / b).rename(root / a)
        (root / "aside").rename(root / b)
        assert use(root) > 0
        shutil.rmtree(root)


def test_a_block_of_another_tenant_or_model_is_not_taken(undamaged: Path, tmp_path: Path) -> None:
    """Even if it bears the right name and is whole."""
    other = open_store(tmp_path / "other", files=UnsyncedFiles(), ids=model_ids(weights="x" * 64))
    talk(other, "alice", ALICE)
    other.close()
    theirs = next((tmp_path / "other").glob("*/blocks/*")).read_bytes()
    root = Path(shutil.copytree(undamaged, tmp_path / "agents"))
    for path in root.glob("*/blocks/*"):
        path.write_bytes(theirs)
    store = open_store(root, files=UnsyncedFiles())
    receipts = converse(store)
    assert [receipt.cached_tokens for receipt in receipts] == [0, 8, 0, 0, 8]  # some find what was said just now
    assert receipts[0].reason.startswith("key is ")
    store.close()


# While the store is open ----------------------------------------------------------------------------------------------


@pytest.fixture
def running(root: Path) -> Iterator[AgentStore]:
    """Everything is known, nothing is in memory."""
    store = open_store(root, files=UnsyncedFiles())
    yield store
    store.close()
    assert store.index.pool.in_use == 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_changes_under_a_running_store_is_a_counted_miss(
    running: AgentStore, root: Path, change: str
) -> None:
    for path in root.glob("*/blocks/*"):
        CHANGES[change](path)
    receipts = converse(running)
    if change in ("a byte too many", "a page too many"):  # what is behind the block is not read
        assert [receipt.cached_tokens for receipt in receipts] == WARM
        return
    assert [receipt.cached_tokens for receipt in receipts[:3]] == [0, 8, 0]  # bob finds what alice said just now
    assert receipts[0].reason not in ("", "extended")
    assert running.counters["corrupt"] + running.counters["read_errors"] > 0 or change == "gone"
    if change == "a directory":
        assert "Is a directory" in str(receipts[0].error)
        return
    assert all(receipt.committed for receipt in receipts)
    running.close()
    store = open_store(root, files=UnsyncedFiles())
    assert store.counters["corrupt"] == 0
    assert [receipt.cached_tokens for receipt in converse(store)] == [len(history) for *_, history in TALKS]
    store.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_changes_under_a_running_store_loses_no_blocks(
    running: AgentStore, root: Path, change: str
) -> None:
    for path in root.glob("*/manifests/*"):
        CHANGES[change](path)
    receipts = converse(running)
    assert [receipt.cached_tokens for receipt in receipts] == WARM
    assert receipts[0].reason.startswith("manifest: ")
    assert running.counters["corrupt"] > 0
    assert all(receipt.committed for receipt in receipts)
    aside = len(list(root.glob("quarantine/*.manifests.*")))
    named = sum(name is not None for name, *_ in TALKS)  # those without a name are not read before they are replaced
    assert aside == 0 if change == "gone" else named <= aside <= len(TALKS)


def test_a_store_that_only_reads_leaves_bad_files_where_they_are(root: Path) -> None:
    writer = open_store(root, files=UnsyncedFiles())
    for path in [*root.glob("*/blocks/*"), *root.glob("*/manifests/*")]:
        append(b"\0")(path)
    data = bytearray(next(root.glob("*/blocks/*")).read_bytes())
    before = files_of(root)
    reader = open_store(root, files=UnsyncedFiles())
    assert "is writing in it" in reader.read_only
    converse(reader)
    for path in root.glob("*/blocks/*"):
        overwrite(bytes(len(data)))(path)
    converse(reader)
    reader.close()
    assert files_of(root) == before
    writer.close()


def test_a_store_that_only_reads_leaves_a_block_that_is_found_bad_later(root: Path) -> None:
    writer = open_store(root, files=UnsyncedFiles())
    reader = open_store(root, files=UnsyncedFiles())
    before = files_of(root)
    for path in root.glob("*/blocks/*"):
        path.write_bytes(bytes(path.stat().st_size))
    assert converse(reader)[0].cached_tokens == 0
    assert reader.counters["corrupt"] > 0
    reader.close()
    assert files_of(root) == before
    writer.close()


def test_what_is_in_quarantine_counts_against_the_quota(running: AgentStore, root: Path) -> None:
    everything = running.warm.bytes + running.shared.other_bytes
    for path in root.glob("*/blocks/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with running.open_turn("alice", CAPACITY) as turn:
        turn.acquire(ALICE)
    assert running.counters["corrupt"] > 0
    assert running.warm.bytes + running.shared.other_bytes == everything
