"""Copies of objects on a local disk: a directory store of its own, with its own quota, the longest unused goes first.

Copies carry the checksums of what they are copies of, and are verified like everything else. A cache may lose anything
at any time, so nothing is synced. Each process has a directory of its own.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv.container import Part
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.disk.files import Files
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, Blob

MOST_PROCESSES = 64


class CacheFiles(Files):
    """Files that need not survive a crash."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


class DiskCache:
    """Copies of blobs. Safe to use from any thread. Never raises OSError: what can't be kept is not."""

    def __init__(self, root: Path, quota: int) -> None:
        """`root` is made; it must not be used by another process (see `free_place`)."""
        self.quota = quota
        self._store = DirectoryStore(root, CacheFiles())
        self._held = self._store.lock()
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Blob, int] = OrderedDict()  # the longest unused first
        self._bytes = 0
        self._models: set[str] = set()
        self._find()

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def _find(self) -> None:
        """What an earlier process has left."""
        found: list[tuple[float, Blob, int]] = []
        for model in self._store.models():
            with suppress(OSError):
                self._store.prepare(model)
            self._models.add(model)
            for area in (BLOCKS, MANIFESTS):
                for blob, size in self._store.list(model, area):
                    with suppress(OSError):
                        found.append((os.stat(self._store.path(blob)).st_mtime, blob, size))
        for _, blob, size in sorted(found):
            self._sizes[blob] = size
            self._bytes += size
        with self._lock:
            self._make_room(0)

    def __contains__(self, blob: Blob) -> bool:
        with self._lock:
            return blob in self._sizes

    def get(self, blob: Blob, buffers: Sequence[memoryview]) -> int | None:
        """Fill the buffers; how many bytes there were, None if there is no copy."""
        if not self._touch(blob):
            return None
        try:
            return self._store.get(blob, buffers)
        except OSError:
            self.drop(blob)
            return None

    def read(self, blob: Blob) -> bytes | None:
        if not self._touch(blob):
            return None
        try:
            return self._store.read(blob)
        except OSError:
            self.drop(blob)
            return None

    def keep(self, blob: Blob, parts: Sequence[Part]) -> None:
        """Keep a copy, unless it is larger than the whole cache or can't be written."""
        size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
        if size > self.quota:
            self.drop(blob)
            return
        with self._lock:
            self._forget(blob)
            self._make_room(size)
            self._sizes[blob] = size
            self._bytes += size
        try:
            if blob.model not in self._models:
                self._store.prepare(blob.model)
                self._models.add(blob.model)
            self._store.put(blob, parts)
        except OSError:
            self.drop(blob)

    def drop(self, blob: Blob) -> bool:
        """Whether there was a copy."""
        with self._lock:
            known = self._forget(blob)
        with suppress(OSError):
            self._store.delete(blob)
        return known

    def close(self) -> None:
        self._held.release()

    def _touch(self, blob: Blob) -> bool:
        with self._lock:
            if blob not in self._sizes:
                return False
            self._sizes.move_to_end(blob)
            return True

    def _forget(self, blob: Blob) -> bool:
        size = self._sizes.pop(blob, None)
        self._bytes -= size or 0
        return size is not None

    def _make_room(self, size: int) -> None:
        while self._sizes and self._bytes + size > self.quota:
            blob, freed = self._sizes.popitem(last=False)
            self._bytes -= freed
            with suppress(OSError):
                self._store.delete(blob)


def open_cache(parent: Path, url: str, quota: int) -> DiskCache:
    """A cache for what is behind a URL, in a directory that no other process uses now. Raises StoreError."""
    below = parent / hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    for number in range(MOST_PROCESSES):
        try:
            return DiskCache(below / str(number), quota)
        except StoreError as error:
            if "is writing in it" not in str(error):
                raise
    raise StoreError(f"{below}: {MOST_PROCESSES} processes use it already")
