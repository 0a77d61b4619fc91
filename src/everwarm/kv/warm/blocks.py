"""One model's blocks and manifests in a `BlockStore`: encoded, and verified when they are read.

A block's bytes are saved as they lie in memory (tensor `kv.0`, U8), with a header that says whose they are and a
checksum over everything. A block is durable once `sync` has returned after `put`; `commit` makes a manifest durable by
itself.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import numpy as np

from everwarm.errors import StoreError
from everwarm.kernels.backend import FULL
from everwarm.kv import container
from everwarm.kv.chain import Key, child_key, token_bytes, token_list
from everwarm.kv.container import Array, VersionError
from everwarm.kv.ids import ModelIds
from everwarm.kv.manifest import Manifest, decode, encode, file_name
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, AwayError, Blob, BlockStore, ObjectId, read_header
from everwarm.kv.warm.sealed import sealed, unsealed

_log = logging.getLogger(__name__)

FORMAT = "everwarm-kv"
VERSION = "1"
MODEL = "model.json"
LOOKERS = 8


@dataclass(frozen=True, slots=True)
class BlockName:
    """What a block must say about itself."""

    key: Key
    parent: Key
    tokens: bytes
    kind: str = FULL

    @property
    def id(self) -> ObjectId:
        return ObjectId(self.key, self.kind)


@dataclass(frozen=True, slots=True)
class Stored:
    """An agent's manifest as it is stored."""

    generation: int = 0  # 0: there is none
    size: int = 0


class CorruptError(StoreError):
    """Not what it should be: a miss with this reason."""


class UnreadableError(StoreError):
    """It may be whole but can't be read now: it is left where it is."""


class ModelBlocks:
    """The blocks and manifests of one model."""

    def __init__(self, store: BlockStore, ids: ModelIds) -> None:
        """Makes nothing: `prepare` does."""
        self.store = store
        self.ids = ids
        self.model = ids.directory
        self._tensors = {
            kind: [
                container.Tensor(f"kv.{number}", "U8", (group.block_bytes,))
                for number, group in enumerate(ids.layout.of_kind(kind))
            ]
            for kind in ids.layout.kinds
        }
        self._frames = {kind: self._frame(kind) for kind in self._tensors}
        self._sizes = {kind: container.ALIGNMENT + ids.layout.block_bytes(kind) for kind in self._tensors}

    def object_bytes(self, kind: str = FULL) -> int:
        """Bytes of an object of a kind: all have the same size, so that a truncated one shows in a listing. 0 if this
        layout has no such kind.
        """
        return self._sizes.get(kind, 0)

    def prepare(self) -> int:
        """Make what a process that writes needs; how many damaged records were set aside."""
        damaged = 0
        self.store.prepare(self.model)
        record = Blob(self.model, "", MODEL)
        known = False
        try:
            known = unsealed(self.store, record) == self.ids.as_json()
        except FileNotFoundError:
            pass
        except VersionError as error:
            _log.warning("%s; it is left alone", error)
            known = True
        except StoreError as error:
            _log.error("%s; moved to quarantine and written again", error)
            damaged = 1
            self.store.set_aside(record)
        if not known:
            self.store.put(record, [sealed(self.ids.as_json())])
        # What is seen may not be safe yet: a process may have been killed just now.
        for model, area in (("", ""), (self.model, ""), (self.model, BLOCKS), (self.model, MANIFESTS)):
            self.store.sync(model, area)
        return damaged

    # Blocks -----------------------------------------------------------------------------------------------------------

    def put(self, name: BlockName, buffers: Sequence[Array]) -> int:
        """Write a block; its bytes in the store."""
        blank = self._header(name)
        header = container.with_checksum(blank, container.checksum(blank, buffers))
        self.store.put(self.blob(name.id), [header, *buffers])
        return self.object_bytes(name.kind)

    def get(self, name: BlockName, buffers: Sequence[Array]) -> float:
        """Fill the buffers; the seconds that verifying took. Raises CorruptError, VersionError, OSError; then nothing
        in the buffers may be used.
        """
        try:
            return self._get(name, buffers)
        except StoreError:
            if not self.store.drop_copy(self.blob(name.id)):
                raise
            return self._get(name, buffers)

    def _get(self, name: BlockName, buffers: Sequence[Array]) -> float:
        header = bytearray(container.ALIGNMENT)
        size = self.store.get(self.blob(name.id), [memoryview(header), *(part.data for part in buffers)])
        started = time.perf_counter()
        if size != (expected := self.object_bytes(name.kind)):
            self.check_version(name.id)
            raise CorruptError(f"truncated: {size:,} bytes of {expected:,}")
        blank, digits = container.split_checksum(bytes(header))
        if blank != self._header(name):
            self.check_version(name.id)
            raise CorruptError(self._difference(bytes(header), name))
        if container.checksum(blank, buffers) != digits:
            raise CorruptError("checksum")
        return time.perf_counter() - started

    def list(self) -> Iterator[tuple[ObjectId, int]]:
        """Names and sizes of what looks like a whole block."""
        for blob, size in self.store.list(self.model, BLOCKS):
            if blob.is_data and (found := ObjectId.of(blob)) is not None:
                yield found, size

    def describe(self, object_id: ObjectId) -> BlockName:
        """What a block says about itself. Raises CorruptError, VersionError, OSError."""
        header = bytearray(container.ALIGNMENT)
        if object_id.kind not in self._tensors:
            raise CorruptError(f"of a kind that this model does not have: {object_id.kind[:20]!r}")
        if self.store.get(self.blob(object_id), [memoryview(header)]) < len(header):
            raise CorruptError("truncated")
        try:
            said, _ = container.read_metadata(bytes(header))
            tokens = np.asarray(json.loads(said["tokens"]), ">u4").tobytes()
            name = BlockName(
                Key(bytes.fromhex(said["key"])), Key(bytes.fromhex(said["parent"])), tokens, object_id.kind
            )
        except (StoreError, KeyError, ValueError, TypeError, OverflowError) as error:
            self.check_version(object_id)
            raise CorruptError(str(error)) from None
        if name.key != object_id.key or container.split_checksum(bytes(header))[0] != self._header(name):
            self.check_version(object_id)
            raise CorruptError(self._difference(bytes(header), name))
        if child_key(name.parent, name.tokens) != object_id.key:
            raise CorruptError("its name is not that of its tokens")
        return name

    def delete(self, object_id: ObjectId) -> None:
        """Where many write, nobody here knows who else needs it: the collector deletes it."""
        if not self.store.many_writers:
            self.store.delete(self.blob(object_id))

    def sync(self) -> None:
        """After this, every block that was put survives a crash."""
        self.store.sync(self.model, BLOCKS)

    def check_version(self, object_id: ObjectId) -> None:
        """Raises VersionError if this block is of another version; else it does nothing."""
        try:
            container.check_version(read_header(self.store, self.blob(object_id))[0], FORMAT, VERSION)
        except VersionError:
            raise
        except (StoreError, OSError):
            pass

    def blob(self, object_id: ObjectId) -> Blob:
        return object_id.blob(self.model)

    # Manifests --------------------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, expected: int, admit: Callable[[int], None]) -> Stored:
        """Replace an agent's manifest, durably, if its generation is the expected one. `admit` is told the bytes first
        and may raise.
        """
        parts = encode(manifest)
        size = sum(len(part) for part in parts)
        admit(size)
        self.store.commit(self.manifest_blob(manifest.tenant, manifest.name), parts, expected=expected)
        return Stored(manifest.generation, size)

    def load(self, tenant: str, name: str) -> Manifest:
        """An agent's manifest. Raises StoreError, OSError."""
        return self.load_sized(tenant, name)[0]

    def load_sized(self, tenant: str, name: str) -> tuple[Manifest, int]:
        """The same, and its bytes."""
        data = self.store.read(self.manifest_blob(tenant, name))
        manifest = decode(data)
        if (manifest.tenant, manifest.name) != (tenant, name):
            raise CorruptError("of another agent")
        return self._covered(manifest), len(data)

    def changed(self) -> Iterator[tuple[Manifest, int]]:
        """Manifests that others have written since we last looked, with text, and their bytes; where many write."""
        blobs = [*self.store.changed(self.model)]
        with ThreadPoolExecutor(LOOKERS, "everwarm-looker") as readers:
            for blob, data in zip(blobs, readers.map(self._read_or_none, blobs), strict=True):
                with suppress(StoreError):
                    if data is not None:
                        yield self._covered(self._checked(decode(data), blob)), len(data)

    def _read_or_none(self, blob: Blob) -> bytes | None:
        try:
            return self.store.read(blob)
        except OSError:
            return None

    def remove(self, tenant: str, name: str) -> None:
        """Delete an agent's manifest, durably."""
        self.store.delete(self.manifest_blob(tenant, name))
        self.store.sync(self.model, MANIFESTS)

    def manifests(self) -> Iterator[tuple[Manifest | StoreError, Blob, int]]:
        """Every manifest, without its text, or what is wrong with it; its name and size."""
        for blob, _ in self.store.list(self.model, MANIFESTS):
            if not blob.is_data:
                continue
            try:
                data = self.store.read(blob)
            except FileNotFoundError:  # just deleted
                continue
            except OSError as error:
                yield UnreadableError(str(error)), blob, 0
                continue
            try:
                yield self._checked(decode(data, with_text=False), blob), blob, len(data)
            except StoreError as error:
                yield error, blob, len(data)

    def stored(self, tenant: str, name: str) -> Stored:
        """What is stored of an agent now. If it can't be read, its generation is unknown and said to be 0. Raises
        AwayError.
        """
        blob = self.manifest_blob(tenant, name)
        try:
            size = self.store.size(blob)
        except AwayError:
            raise
        except OSError:
            return Stored()
        try:
            return Stored(decode(self.store.read(blob), with_text=False).generation, size)
        except AwayError:
            raise
        except (OSError, StoreError):
            return Stored(0, size)

    def manifest_blob(self, tenant: str, name: str) -> Blob:
        return Blob(self.model, MANIFESTS, file_name(tenant, name))

    def _covered(self, manifest: Manifest) -> Manifest:
        """The manifest with those of its blocks, from the beginning on, that bear the names of its tokens."""
        size = 4 * self.ids.layout.block_tokens
        tokens = token_bytes(manifest.tokens)[: 4 * manifest.kv_tokens]
        parent = self.ids.root(bytes.fromhex(manifest.salt))
        sound = 0
        for key in manifest.blocks:
            part = tokens[sound * size : (sound + 1) * size]
            parent = child_key(parent, part)
            if parent != key or not part:
                break
            sound += 1
        return replace_fields(
            manifest, blocks=manifest.blocks[:sound], kv_tokens=min(manifest.kv_tokens, sound * size // 4)
        )

    def _checked(self, manifest: Manifest, blob: Blob) -> Manifest:
        if blob.name != file_name(manifest.tenant, manifest.name):
            raise CorruptError("under the name of another agent")
        expected = (self.ids.weights_id, self.ids.numerics_id, self.ids.layout.digest)
        if (manifest.weights_id, manifest.numerics_id, manifest.layout) != expected:
            raise CorruptError("of another model")
        return manifest

    # Headers ----------------------------------------------------------------------------------------------------------

    def _header(self, name: BlockName) -> bytes:
        """All that a block says, but for its checksum: one comparison shows that it is the one that is meant."""
        before, after = self._frames[name.kind]
        tokens = str(token_list(name.tokens)).replace(" ", "")
        said = f'"key":"{name.key.hex()}","parent":"{name.parent.hex()}","tokens":"{tokens}"'.encode()
        header = (before + said + after).ljust(container.ALIGNMENT)
        assert len(header) == container.ALIGNMENT, "a block of more tokens needs a larger header"
        return header

    def _frame(self, kind: str) -> tuple[bytes, bytes]:
        """What stands in a header before and behind the part that differs between blocks of a kind. Hundreds of headers
        are made for a restore.
        """
        said = {
            "format": FORMAT,
            "version": VERSION,
            "key": "",
            "parent": "",
            "tokens": "",
            "weights_id": self.ids.weights_id,
            "numerics_id": self.ids.numerics_id,
            "layout": self.ids.layout.digest,
        }
        if kind != FULL:
            said["kind"] = kind
        before, _, after = container.blank_header(said, self._tensors[kind]).partition(
            b'"key":"","parent":"","tokens":""'
        )
        return before, after.rstrip()

    def _difference(self, header: bytes, name: BlockName) -> str:
        """Why a header is not the expected one, in words."""
        try:
            said, _ = container.read_metadata(header)
        except StoreError as error:
            return str(error)
        expected, _ = container.read_metadata(self._header(name))
        for key, value in expected.items():
            if key != "checksum" and said.get(key) != value:
                return f"{key} is {str(said.get(key))[:80]!r}, expected {value[:80]!r}"
        return "checksum: its header is not as it was written"
