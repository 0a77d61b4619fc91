"""A `BlockStore` in memory: it proves that the warm tier knows no files, as storage elsewhere will show."""

import threading
from collections.abc import Iterator, Sequence
from itertools import count

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.container import Part
from everwarm.kv.warm.blockstore import QUARANTINE, Blob, ConflictError, OneWriter


class MemoryLease:
    """The right to write in a `MemoryStore`."""

    def __init__(self, store: "MemoryStore") -> None:
        self._store = store

    def release(self) -> None:
        self._store.locked = False


class MemoryStore(OneWriter):
    """Blobs in a dict. Everything is durable at once."""

    def __init__(self) -> None:
        self.blobs: dict[Blob, bytes] = {}
        self.locked = False
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        return f"memory {id(self)}"

    def lock(self) -> MemoryLease:
        if self.locked:
            raise StoreError("memory: somebody else is writing in it")
        self.locked = True
        return MemoryLease(self)

    def prepare(self, model: str) -> None:
        """Nothing has to be made."""

    def models(self) -> list[str]:
        return sorted({blob.model for blob in list(self.blobs) if blob.model})

    def list(self, model: str, area: str) -> Iterator[tuple[Blob, int]]:
        found = [(blob, len(data)) for blob, data in list(self.blobs.items())]
        yield from ((blob, size) for blob, size in found if (blob.model, blob.area) == (model, area))

    def read(self, blob: Blob) -> bytes:
        try:
            return self.blobs[blob]
        except KeyError:
            raise FileNotFoundError(2, "no such blob", self.where(blob)) from None

    def get(self, blob: Blob, buffers: Sequence[memoryview]) -> int:
        data, done = self.read(blob), 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            part = data[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        return done

    def size(self, blob: Blob) -> int:
        return len(self.read(blob))

    def put(self, blob: Blob, parts: Sequence[Part]) -> None:
        self.blobs[blob] = b"".join(bytes(part) for part in parts)

    def sync(self, model: str, area: str) -> None:
        """Nothing gets lost."""

    def commit(self, blob: Blob, parts: Sequence[Part], *, expected: int) -> None:
        with self._lock:
            stored: int | None = 0
            if blob in self.blobs:
                try:
                    header = self.blobs[blob][: container.header_length(self.blobs[blob], len(self.blobs[blob]))]
                    stored = int(container.read_metadata(header)[0]["generation"])
                except (StoreError, KeyError, ValueError):
                    stored = None
            if stored != expected:
                raise ConflictError(f"{self.where(blob)} has generation {stored} and not {expected}")
            self.put(blob, parts)

    def delete(self, blob: Blob) -> None:
        self.blobs.pop(blob, None)

    def set_aside(self, blob: Blob) -> tuple[Blob | None, int]:
        if blob not in self.blobs:
            return None, 0
        name = ".".join(part for part in (blob.model, blob.area, blob.name) if part)
        free = (f"{name}.{number}" if number else name for number in count())
        moved = next(Blob("", QUARANTINE, name) for name in free if Blob("", QUARANTINE, name) not in self.blobs)
        self.blobs[moved] = self.blobs.pop(blob)
        return moved, len(self.blobs[moved])

    def usage(self, without: frozenset[str] = frozenset()) -> int:
        return sum(len(data) for blob, data in list(self.blobs.items()) if blob.model not in without)

    def free_bytes(self) -> int:
        return 1 << 40

    def half_written(self, blob: Blob) -> bool:
        return False

    def where(self, blob: Blob | None = None) -> str:
        return "memory" if blob is None else f"memory:{blob.model}/{blob.area}/{blob.name}"
