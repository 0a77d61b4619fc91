"""Where the warm tier keeps its bytes: the seam between what is saved and how.

A `BlockStore` keeps named bytes (blobs) of several models. It knows nothing of what is in them: encoding, checksums and
quotas are above it. How a blob becomes durable (renames, syncs, conditional puts) is its private business.
"""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from everwarm.errors import StoreError
from everwarm.kernels.backend import FULL
from everwarm.kv.chain import KEY_BYTES, Key
from everwarm.kv.container import ALIGNMENT, Part, Tensor, header_length, read_metadata

BLOCKS = "blocks"
MANIFESTS = "manifests"
QUARANTINE = "quarantine"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, order=True)
class Blob:
    """The name of some bytes. `model` is empty for what belongs to all models, `area` for what describes a model."""

    model: str
    area: str
    name: str

    @property
    def is_data(self) -> bool:
        """Whether the name is that of a block or a manifest."""
        return self.name.endswith(SUFFIX) and not self.name.startswith(".")


@dataclass(frozen=True, slots=True)
class ObjectId:
    """What a block's bytes are named by: the key of its chain, and which of the layout's kinds they are."""

    key: Key
    kind: str = FULL

    def blob(self, model: str) -> Blob:
        kind = "" if self.kind == FULL else f".{self.kind}"
        return Blob(model, BLOCKS, self.key.hex() + kind + SUFFIX)

    @staticmethod
    def of(blob: Blob) -> "ObjectId | None":
        """The object that a blob is named after; None if it is something else."""
        if not blob.name.endswith(SUFFIX):
            return None
        digits, _, kind = blob.name[: -len(SUFFIX)].partition(".")
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            return None
        if len(key) != KEY_BYTES or key.hex() != digits or kind == FULL or blob.name.endswith("." + SUFFIX):
            return None
        return ObjectId(Key(key), kind or FULL)


class ConflictError(StoreError):
    """Somebody else has committed another generation of this manifest."""


class AwayError(OSError):
    """The storage does not answer, or refuses: it says nothing about the blob. Trying again later may help."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EAGAIN, why)


class Lease(Protocol):
    """The right to write."""

    def release(self) -> None: ...


class BlockStore(Protocol):
    """Named bytes. Every method may raise OSError; a blob that is not there is a FileNotFoundError."""

    @property
    def identity(self) -> str:
        """Equal for two objects that stand for the same store."""

    @property
    def many_writers(self) -> bool:
        """Whether several processes write here at once. Then nobody knows all that is there: agents have leases, and
        blocks are deleted by a collector that looks at every manifest (`kv.tools.collector`), by nobody else.
        """

    @property
    def secret(self) -> bytes | None:
        """What the salts of tenants follow from, where that is not kept in the store itself."""

    def lock(self) -> Lease:
        """The right to write, for one process at a time. Raises StoreError naming who has it."""

    def prepare(self, model: str) -> None:
        """Make what a model needs, for a process that writes, and remove what a crash has left half-written."""

    def models(self) -> list[str]:
        """Models that have anything here."""

    def list(self, model: str, area: str) -> Iterator[tuple[Blob, int]]:
        """What is there, with sizes; also what is not ours. Nothing if it can't be listed."""

    def changed(self, model: str) -> Iterator[Blob]:
        """Where many write: manifests that are not as we have last read or written them. Raises OSError."""

    def read(self, blob: Blob) -> bytes:
        """All of it."""

    def get(self, blob: Blob, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from the beginning; how many bytes there were, at most what fits."""

    def size(self, blob: Blob) -> int: ...

    def fetch_ahead(self, blobs: Sequence[Blob]) -> None:
        """These are going to be read: bring them near, several at a time. Returns when that is done or takes too
        long. Fails silently.
        """

    def drop_copy(self, blob: Blob) -> bool:
        """What was read is damaged. Whether that was only a copy, which is dropped now: reading again may help."""

    def missing(self, blobs: Sequence[Blob]) -> Sequence[Blob]:
        """A manifest is about to name these: make sure that no collector takes them. Returns those that are not there
        any more.
        """

    def put(self, blob: Blob, parts: Sequence[Part]) -> None:
        """Put the whole of it in place, or nothing. It survives a crash once `sync` has returned."""

    def sync(self, model: str, area: str) -> None:
        """After this, what was put and deleted there stays so after a crash."""

    def commit(self, blob: Blob, parts: Sequence[Part], *, expected: int) -> None:
        """Replace a manifest, durably, if the stored one has the generation `expected` (0: if there is none). Raises
        ConflictError otherwise.
        """

    def delete(self, blob: Blob) -> None:
        """It may be gone already."""

    def set_aside(self, blob: Blob) -> tuple[Blob | None, int]:
        """Move something out of the way, not away; where to (None if it could not be moved), and its bytes."""

    def usage(self, without: frozenset[str] = frozenset()) -> int:
        """Bytes of everything, but for these models."""

    def free_bytes(self) -> int:
        """What more could be stored."""

    def half_written(self, blob: Blob) -> bool:
        """Whether it is the beginning of something that was never finished."""

    def where(self, blob: Blob | None = None) -> str:
        """Where something is, or the store itself: for messages."""

    def close(self) -> None:
        """It is not used any more."""


class OneWriter:
    """What is the same for every store that one process writes at a time, on its own machine."""

    many_writers = False
    secret: bytes | None = None

    def changed(self, model: str) -> Iterator[Blob]:
        return iter(())

    def fetch_ahead(self, blobs: Sequence[Blob]) -> None:
        """They are near."""

    def drop_copy(self, blob: Blob) -> bool:
        return False

    def missing(self, blobs: Sequence[Blob]) -> Sequence[Blob]:
        return []

    def close(self) -> None:
        """Nothing is held."""


def most_bytes(store: BlockStore) -> int:
    """What a store may take at most: what is free, and what it has already."""
    return store.free_bytes() + store.usage()


def read_header(store: BlockStore, blob: Blob) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a blob's header says; its checksum is not looked at. Raises StoreError, OSError."""
    header = bytearray(ALIGNMENT)
    count = store.get(blob, [memoryview(header)])
    length = header_length(bytes(header[:count]), store.size(blob))
    if length > ALIGNMENT:
        header = bytearray(length)
        store.get(blob, [memoryview(header)])
    return read_metadata(bytes(header))
