"""What object storage adds to the promises of every `BlockStore` (`test_blockstore.py`)."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from everwarm.kv.container import Tensor, encode
from everwarm.kv.remote import cached
from everwarm.kv.remote.cache import DiskCache
from everwarm.kv.remote.cached import CachedStore
from everwarm.kv.remote.calls import Calls
from everwarm.kv.remote.opening import open_warm
from everwarm.kv.remote.store import ObjectStore
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, AwayError, Blob, ConflictError
from kv.faulty_objects import FaultyObjects
from kv.replicas import URL, objects_in_memory
from kv.s3 import Server

BLOCK = Blob("m", BLOCKS, "a.safetensors")
MANIFEST = Blob("m", MANIFESTS, "a.safetensors")


def manifest(generation: int, said: str = "") -> list[bytes | np.ndarray]:
    metadata = {"generation": str(generation), "said": said}
    return encode(metadata, [(Tensor("t", "U8", (4,)), np.arange(4, dtype=np.uint8))])


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects(objects_in_memory())


def bare(objects: FaultyObjects) -> ObjectStore:
    return ObjectStore(objects, URL, b"secret", Calls(sleep=lambda seconds: None))


@pytest.fixture
def store(objects: FaultyObjects, tmp_path: Path) -> Iterator[CachedStore]:
    with closing(CachedStore(bare(objects), DiskCache(tmp_path / "cache", 1 << 20), read_s=5.0, write_s=5.0)) as store:
        yield store


def test_a_block_is_created_once(objects: FaultyObjects) -> None:
    one, other = bare(objects), bare(objects)
    one.put(BLOCK, [b"first"])
    other.put(BLOCK, [b"later"])
    assert one.read(BLOCK) == b"first"


def test_a_block_of_another_size_is_damaged_and_is_replaced(objects: FaultyObjects) -> None:
    one = bare(objects)
    one.put(BLOCK, [b"trunc"])
    one.put(BLOCK, [b"the whole block"])
    assert one.read(BLOCK) == b"the whole block"


def test_of_two_who_commit_one_wins(objects: FaultyObjects) -> None:
    stores = [bare(objects) for _ in range(8)]
    stores[0].commit(MANIFEST, manifest(1), expected=0)
    won: list[int] = []

    def commit(number: int) -> None:
        try:
            stores[number].commit(MANIFEST, manifest(2, str(number)), expected=1)
            won.append(number)
        except ConflictError:
            pass

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    with pytest.raises(ConflictError, match="generation 2 and not 1"):
        stores[3].commit(MANIFEST, manifest(2), expected=1)


def test_a_commit_whose_response_is_lost_is_known_to_be_ours(objects: FaultyObjects) -> None:
    """Every second response gets lost, and every commit is made exactly once."""
    one = bare(objects)
    objects.losing = 0.5
    for generation in range(1, 30):
        one.commit(MANIFEST, manifest(generation), expected=generation - 1)
    objects.losing = 0.0
    assert objects.lost > 10
    with pytest.raises(ConflictError, match="generation 29 and not 0"):
        bare(objects).commit(MANIFEST, manifest(1), expected=0)


def test_a_commit_of_which_nothing_was_heard_is_replaced_by_the_next(objects: FaultyObjects) -> None:
    """It was made, all its responses got lost, and we gave up: the next one finds our own."""
    one = ObjectStore(objects, URL, b"", Calls(sleep=lambda seconds: None))
    one.commit(MANIFEST, manifest(1), expected=0)
    objects.losing = 1.0
    with pytest.raises(AwayError):
        one.commit(MANIFEST, manifest(2, "unheard"), expected=1)
    objects.losing = 0.0
    one.calls.breaker.succeeded()
    one.commit(MANIFEST, manifest(3, "heard"), expected=1)
    with pytest.raises(ConflictError):
        bare(objects).commit(MANIFEST, manifest(3), expected=2)


def test_failures_and_lost_responses_are_not_seen_above(objects: FaultyObjects, store: CachedStore) -> None:
    objects.failing = objects.losing = 0.05
    for number in range(200):
        store.put(Blob("m", BLOCKS, f"{number}.safetensors"), [b"%d" % number * 50])
    store.sync("m", BLOCKS)
    objects.failing = objects.losing = 0.0
    assert len(list(store.list("m", BLOCKS))) == 200
    assert objects.lost > 0


# The cache ------------------------------------------------------------------------------------------------------------


def test_what_was_read_once_is_read_from_the_cache(objects: FaultyObjects, store: CachedStore) -> None:
    bare(objects).put(BLOCK, [b"abc"])
    assert store.read(BLOCK) == b"abc"
    calls = objects.calls
    assert store.read(BLOCK) == b"abc"
    buffer = bytearray(3)
    assert store.get(BLOCK, [memoryview(buffer)]) == 3
    assert (objects.calls, bytes(buffer)) == (calls, b"abc")


def test_the_cache_has_a_quota_and_the_longest_unused_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 300)
    blobs = [Blob("m", BLOCKS, f"{number}.safetensors") for number in range(4)]
    for blob in blobs[:3]:
        cache.keep(blob, [b"x" * 100])
    cache.read(blobs[0])
    cache.keep(blobs[3], [b"x" * 100])
    assert [blob in cache for blob in blobs] == [True, False, True, True]
    cache.keep(blobs[1], [b"x" * 301])
    assert (blobs[1] in cache, cache.used_bytes) == (False, 300)
    cache.close()
    cache = DiskCache(tmp_path / "cache", 200)  # a smaller one, over what is there
    assert cache.used_bytes == 200
    cache.close()


def test_a_damaged_copy_is_dropped_and_read_again(objects: FaultyObjects, store: CachedStore) -> None:
    store.put(BLOCK, [b"abc"])
    store.sync("m", BLOCKS)
    store.cache.keep(BLOCK, [b"abX"])
    assert store.read(BLOCK) == b"abX"  # who verifies is above
    assert store.drop_copy(BLOCK)
    assert store.read(BLOCK) == b"abc"
    assert store.drop_copy(BLOCK)
    assert not store.drop_copy(BLOCK)


def test_large_blocks_come_in_ranges(
    objects: FaultyObjects, store: CachedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "PART", 1000)
    data = np.random.default_rng(1).bytes(4321)
    bare(objects).put(BLOCK, [data])
    calls = objects.calls
    assert store.read(BLOCK) == data
    assert objects.calls - calls == 5


def test_two_processes_have_caches_of_their_own(tmp_path: Path) -> None:
    objects = objects_in_memory()
    one, other = (open_warm(URL, tmp_path, 1 << 20, objects=objects) for _ in range(2))
    assert one.cache._store.root != other.cache._store.root
    one.close()
    other.close()


# Slow, or away --------------------------------------------------------------------------------------------------------


def test_a_read_that_takes_too_long_is_an_error_and_is_in_the_cache_later(
    objects: FaultyObjects, tmp_path: Path
) -> None:
    hold = threading.Event()

    class Held(FaultyObjects):
        def get(self, *args):  # type: ignore[no-untyped-def]
            hold.wait()
            return super().get(*args)

    bare(objects).put(BLOCK, [b"abc"])
    store = CachedStore(bare(Held(objects)), DiskCache(tmp_path / "cache", 1 << 20), read_s=0.05)
    with pytest.raises(AwayError, match="too slow"):
        store.read(BLOCK)
    download = store._downloads[BLOCK].future
    hold.set()
    assert download.result() == b"abc"
    assert store.read(BLOCK) == b"abc"
    store.close()


def test_uploads_that_take_too_long_fail_the_sync(objects: FaultyObjects, tmp_path: Path) -> None:
    hold = threading.Event()

    class Held(FaultyObjects):
        def put(self, *args):  # type: ignore[no-untyped-def]
            hold.wait()
            return super().put(*args)

    store = CachedStore(bare(Held(objects)), DiskCache(tmp_path / "cache", 1 << 20), write_s=0.05)
    store.put(BLOCK, [b"abc"])
    assert store.read(BLOCK) == b"abc"
    with pytest.raises(AwayError, match="too slow: 1 blocks"):
        store.sync("m", BLOCKS)
    hold.set()
    store._uploads[BLOCK].result()
    store.sync("m", BLOCKS)
    assert bare(objects).read(BLOCK) == b"abc"
    store.close()


def test_while_the_storage_is_away_manifests_are_read_from_the_cache(
    objects: FaultyObjects, store: CachedStore
) -> None:
    store.commit(MANIFEST, manifest(1), expected=0)
    data = store.read(MANIFEST)
    objects.away = "no route"
    assert store.read(MANIFEST) == data
    with pytest.raises(AwayError):
        store.read(Blob("m", MANIFESTS, "b.safetensors"))
    with pytest.raises(AwayError):
        store.commit(MANIFEST, manifest(2), expected=1)


def test_a_block_that_is_old_is_written_again_before_a_manifest_names_it(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bare(objects)
    one.put(BLOCK, [b"abc"])
    assert one.missing([BLOCK, Blob("m", BLOCKS, "b.safetensors")]) == [Blob("m", BLOCKS, "b.safetensors")]
    later = one.now() + 3000.0
    monkeypatch.setattr(one, "now", lambda: later)
    assert one.missing([BLOCK]) == [BLOCK]
    before = one.head(BLOCK).version
    one.put(BLOCK, [b"abc"])
    assert one.head(BLOCK).version != before  # it is young again


def test_on_s3_the_same_calls_do_the_same(s3: Server, tmp_path: Path) -> None:
    url = s3.new_bucket()
    store = open_warm(url, tmp_path, 1 << 20)
    other = open_warm(url, tmp_path, 1 << 20)
    store.put(BLOCK, [b"x" * 9_000_000])  # in parts, without the cache
    store.sync("m", BLOCKS)
    assert other.read(BLOCK) == b"x" * 9_000_000
    store.commit(MANIFEST, manifest(1), expected=0)
    other.commit(MANIFEST, manifest(2), expected=1)
    with pytest.raises(ConflictError, match="generation 2 and not 1"):
        store.commit(MANIFEST, manifest(2, "another"), expected=1)
    assert list(store.changed("m")) == [MANIFEST]
    store.read(MANIFEST)
    assert list(store.changed("m")) == []
    store.close()
    other.close()
