"""An `ObjectStore` with a cache on disk in front of it: blocks travel several at a time, and nobody waits for ever.

Blocks are put into the cache and uploaded in the background; `sync` waits for that. Blocks that are read come from
the cache, or are downloaded into it, large ones in several ranges at once. Whoever waits does so until a deadline:
what comes later is in the cache for the next time. Manifests are read from the storage; while it is away, the copy of
the last one that was seen is read instead, so that agents can go on.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from everwarm.kv.container import ALIGNMENT, Part
from everwarm.kv.remote.cache import DiskCache
from everwarm.kv.remote.store import READ_S, WRITE_S, NobodysLease, ObjectStore, joined, scatter
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, AwayError, Blob

TRANSFERS = 16
PART = 4 << 20
"""A block that is larger is downloaded in parts of this size."""
MOST_PENDING = 256 << 20
"""Bytes that may wait to be uploaded."""


@dataclass(frozen=True, slots=True)
class _Download:
    future: "Future[bytes]"
    deadline: float


class CachedStore:
    """Blobs in object storage and, near, copies of them."""

    many_writers = True

    def __init__(self, remote: ObjectStore, cache: DiskCache, read_s: float = READ_S, write_s: float = WRITE_S) -> None:
        self.remote, self.cache = remote, cache
        self._read_s, self._write_s = read_s, write_s
        self._transfers = ThreadPoolExecutor(TRANSFERS, "everwarm-transfer")
        self._parts = ThreadPoolExecutor(TRANSFERS, "everwarm-part")
        self._changed = threading.Condition()
        self._uploads: dict[Blob, Future[None]] = {}  # since the last sync
        self._sending: dict[Blob, bytes] = {}  # of these, those that are on their way
        self._pending = 0  # bytes of these
        self._downloads: dict[Blob, _Download] = {}
        self._closed = False

    @property
    def identity(self) -> str:
        return self.remote.identity

    @property
    def secret(self) -> bytes | None:
        return self.remote.secret

    def lock(self) -> NobodysLease:
        return self.remote.lock()

    def prepare(self, model: str) -> None:
        self.remote.prepare(model)

    def models(self) -> list[str]:
        return self.remote.models()

    def list(self, model: str, area: str) -> Iterator[tuple[Blob, int]]:
        return self.remote.list(model, area)

    def changed(self, model: str) -> Iterator[Blob]:
        """Manifests that are not as we last saw them."""
        return self.remote.changed(model)

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(self, blob: Blob) -> bytes:
        if blob.area == BLOCKS:
            return self._fetch(blob)
        try:
            data = self.remote.read(blob)
        except AwayError:
            if blob.area == MANIFESTS and (copy := self.cache.read(blob)) is not None:
                return copy
            raise
        except FileNotFoundError:
            self.cache.drop(blob)
            raise
        if blob.area == MANIFESTS:
            self.cache.keep(blob, [data])
        return data

    def get(self, blob: Blob, buffers: Sequence[memoryview]) -> int:
        if blob.area != BLOCKS:
            return self.remote.get(blob, buffers)
        if (count := self.cache.get(blob, buffers)) is not None:
            return count
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if sum(map(len, views)) <= ALIGNMENT and blob not in self._sending:  # a header
            return self.remote.get(blob, views)
        return scatter(memoryview(self._fetch(blob)), views)

    def size(self, blob: Blob) -> int:
        return self.remote.size(blob)

    def fetch_ahead(self, blobs: Sequence[Blob]) -> None:
        started = [
            self._download(blob).future for blob in blobs if blob not in self.cache and blob not in self._sending
        ]
        wait(started, timeout=self._read_s)

    def drop_copy(self, blob: Blob) -> bool:
        return self.cache.drop(blob)

    def _fetch(self, blob: Blob) -> bytes:
        """All of a block, which is in the cache from now on."""
        with self._changed:
            if (sending := self._sending.get(blob)) is not None:
                return sending
        if (copy := self.cache.read(blob)) is not None:
            return copy
        download = self._download(blob)
        try:
            return download.future.result(max(0.0, download.deadline - time.monotonic()))
        except TimeoutError:
            raise AwayError(f"the storage is too slow: nothing came within {self._read_s:g} s") from None

    def _download(self, blob: Blob) -> _Download:
        """One that is on its way, or a new one."""
        with self._changed:
            if (found := self._downloads.get(blob)) is None:
                future = self._transfers.submit(self._load, blob)
                found = self._downloads[blob] = _Download(future, time.monotonic() + self._read_s)
            else:
                return found
        found.future.add_done_callback(lambda _: self._forget_download(blob))
        return found

    def _forget_download(self, blob: Blob) -> None:
        with self._changed:
            self._downloads.pop(blob, None)

    def _load(self, blob: Blob) -> bytes:
        first, size = self.remote.part(blob, 0, PART)
        rest = [(start, min(size, start + PART)) for start in range(PART, size, PART)]
        others = [self._parts.submit(self.remote.part, blob, *each) for each in rest]
        data = b"".join([first, *(other.result()[0] for other in others)])
        self.cache.keep(blob, [data])
        return data

    # Writing ----------------------------------------------------------------------------------------------------------

    def put(self, blob: Blob, parts: Sequence[Part]) -> None:
        if blob.area != BLOCKS:
            self.remote.put(blob, parts)
            return
        data = joined(parts)
        self.cache.keep(blob, [data])
        with self._changed:
            known = self._uploads.get(blob)
            if known is not None and not (known.done() and known.exception() is not None):
                return  # on its way, or there
            if not self._changed.wait_for(
                lambda: not self._pending or self._pending + len(data) <= MOST_PENDING, self._write_s
            ):
                raise AwayError(f"the storage is too slow: {self._pending:,} bytes wait to be uploaded")
            self._pending += len(data)
            self._sending[blob] = data
            self._uploads[blob] = self._transfers.submit(self._upload, blob, data)

    def _upload(self, blob: Blob, data: bytes) -> None:
        try:
            self.remote.put_bytes(blob, data)
        finally:
            with self._changed:
                self._pending -= len(data)
                self._sending.pop(blob, None)
                self._changed.notify_all()

    def sync(self, model: str, area: str) -> None:
        if area != BLOCKS:
            return
        with self._changed:
            mine = {blob: upload for blob, upload in self._uploads.items() if blob.model == model}
        done, late = wait(mine.values(), timeout=self._write_s)
        with self._changed:
            for blob, upload in mine.items():
                if upload in done and self._uploads.get(blob) is upload:
                    del self._uploads[blob]
        for upload in done:
            if (error := upload.exception()) is not None:
                raise error
        if late:
            raise AwayError(f"the storage is too slow: {len(late)} blocks were not uploaded within {self._write_s:g} s")

    def missing(self, blobs: Sequence[Blob]) -> Sequence[Blob]:
        stripes = [blobs[first::TRANSFERS] for first in range(TRANSFERS)]
        asked = [self._transfers.submit(self.remote.missing, stripe) for stripe in stripes if stripe]
        _, late = wait(asked, timeout=self._write_s)
        if late:
            raise AwayError(f"the storage is too slow: no answer within {self._write_s:g} s")
        return [blob for one in asked for blob in one.result()]

    def commit(self, blob: Blob, parts: Sequence[Part], *, expected: int) -> None:
        self.remote.commit(blob, parts, expected=expected)
        self.cache.keep(blob, parts)

    def delete(self, blob: Blob) -> None:
        self._wait_for(blob)
        self.cache.drop(blob)
        self.remote.delete(blob)

    def set_aside(self, blob: Blob) -> tuple[Blob | None, int]:
        self._wait_for(blob)
        self.cache.drop(blob)
        return self.remote.set_aside(blob)

    def _wait_for(self, blob: Blob) -> None:
        """Until it is not being uploaded any more, or that takes too long."""
        with self._changed:
            upload = self._uploads.pop(blob, None)
        if upload is not None:
            wait([upload], timeout=self._write_s)

    # The whole --------------------------------------------------------------------------------------------------------

    def usage(self, without: frozenset[str] = frozenset()) -> int:
        return self.remote.usage(without)

    def free_bytes(self) -> int:
        return self.remote.free_bytes()

    def half_written(self, blob: Blob) -> bool:
        return False

    def where(self, blob: Blob | None = None) -> str:
        return self.remote.where(blob)

    def close(self) -> None:
        """End what is on its way; let another process have the cache."""
        if not self._closed:
            self._closed = True
            self._transfers.shutdown(cancel_futures=True)
            self._parts.shutdown(cancel_futures=True)
            self.cache.close()
