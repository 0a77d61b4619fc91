"""The warm tier: blocks and manifests of one model in a directory.

    agents/                          one store for all models; `lock` names who writes, `tenants.json` holds the salts
      <weights id>-<numerics id>/    the first 16 digits of each; `model.json` has them whole
        blocks/<key>.safetensors     tensor `kv.0` (U8): the block's bytes, as they lie in memory
        manifests/<digest>.safetensors
      quarantine/                    files that were not what they should be

A block is durable once `sync_blocks` has returned after `put`; `commit` makes a manifest durable by itself. Nothing is
changed in place. Directories are 0700, files 0600: they hold prompts.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_fields
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.chain import Key, child_key, root_key, token_bytes, token_list
from everwarm.kv.container import Array
from everwarm.kv.files import TEMPORARY, Files, read_into, replace
from everwarm.kv.layout import Group, Layout
from everwarm.kv.manifest import Manifest, decode, encode, file_name
from everwarm.kv.owner import QUARANTINE, sealed, unsealed
from everwarm.opening import read_whole

_log = logging.getLogger(__name__)

FORMAT = "everwarm-kv"
VERSION = "1"
SUFFIX = ".safetensors"
MODEL = "model.json"


@dataclass(frozen=True, slots=True)
class ModelIds:
    """Which model's blocks: compared whole, never by shape."""

    weights_id: str
    numerics_id: str
    layout: Layout
    name: str  # for people
    kv_type: str

    @property
    def directory(self) -> str:
        return f"{self.weights_id[:16]}-{self.numerics_id[:16]}"

    def as_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @staticmethod
    def from_json(said: Any) -> "ModelIds":
        """Raises StoreError."""
        try:
            groups = tuple(Group(**group) for group in said["layout"]["groups"])
            return ModelIds(**{**said, "layout": Layout(int(said["layout"]["block_tokens"]), groups)})
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{MODEL}: {error!r}") from None


@dataclass(frozen=True, slots=True)
class BlockName:
    """What a block file must say about itself."""

    key: Key
    parent: Key
    tokens: bytes


class CorruptError(StoreError):
    """A file that is not what it should be: a miss with this reason."""


class UnreadableError(StoreError):
    """A file that may be whole but can't be read now: it is left where it is."""


class BlockStore(Protocol):
    """Where blocks and manifests are kept. Renames and syncs are its private business."""

    def put(self, name: BlockName, buffers: Sequence[Array]) -> int:
        """Write a block; its bytes on disk."""

    def get(self, name: BlockName, buffers: Sequence[Array]) -> float:
        """Fill the buffers; the seconds that verifying took. Raises CorruptError, VersionError, OSError; then nothing
        in them may be used.
        """

    def blocks(self) -> Iterator[tuple[Key, int]]:
        """Names and sizes of what looks like a whole block."""

    def describe(self, key: Key) -> BlockName:
        """What a block file says about itself. Raises CorruptError, VersionError, OSError."""

    def delete(self, key: Key) -> None: ...

    def sync_blocks(self) -> None:
        """After this, every block that was put survives a crash."""

    def commit(self, manifest: Manifest, admit: Callable[[int], None]) -> int:
        """Replace an agent's manifest, durably; its bytes on disk. `admit` is told them first and may raise."""

    def load(self, tenant: str, name: str) -> Manifest: ...

    def remove(self, tenant: str, name: str) -> None:
        """Delete an agent's manifest, durably."""

    def manifests(self) -> Iterator[tuple[Manifest | StoreError, Path, int]]:
        """Every manifest, without its text, or what is wrong with it; its path and size."""

    def manifest_bytes(self, tenant: str, name: str) -> int:
        """Bytes of an agent's manifest; 0 if there is none."""

    def quarantine(self, path: Path) -> tuple[Path | None, int]:
        """Move a file out of the way; where to (None if it could not be moved), and its bytes."""


class DirectoryStore:
    """A `BlockStore` in a local directory."""

    def __init__(self, root: Path, ids: ModelIds, files: Files | None = None) -> None:
        """Makes nothing: `prepare` does."""
        self.root = root
        self.ids = ids
        self.files = files or Files()
        self.path = root / ids.directory
        self.damaged = 0  # files that `prepare` could not read
        self._blocks = self.path / "blocks"
        self._manifests = self.path / "manifests"
        self._tensors = [
            container.Tensor(f"kv.{number}", "U8", (group.block_bytes,))
            for number, group in enumerate(ids.layout.groups)
        ]
        self._layout = ids.layout.digest  # said in every header
        self._size = len(self._header(BlockName(Key(bytes(16)), Key(bytes(16)), bytes(4)))) + ids.layout.block_bytes

    @property
    def block_file_bytes(self) -> int:
        """All block files have this size, so that a truncated one is seen in the listing."""
        return self._size

    def prepare(self) -> None:
        """Make the directories, for a process that writes, and remove what a crash has left half-written."""
        directories = (self.root, self.path, self._blocks, self._manifests)
        for directory in directories:
            self.files.make_directory(directory)
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.endswith(TEMPORARY):
                        self.files.unlink(Path(entry.path))
        known = False
        try:
            known = unsealed(self.path / MODEL) == self.ids.as_json()
        except FileNotFoundError:
            pass
        except container.VersionError as error:
            _log.warning("%s; it is left alone", error)
            known = True
        except StoreError as error:
            _log.error("%s; moved to quarantine and written again", error)
            self.damaged += 1
            self.quarantine(self.path / MODEL)
        if not known:
            replace(self.files, self.path / MODEL, [sealed(self.ids.as_json())])
        for directory in directories:  # what is seen may not be safe yet: a process may have been killed just now
            self.files.sync_directory(directory)

    def put(self, name: BlockName, buffers: Sequence[Array]) -> int:
        blank = self._header(name)
        header = container.with_checksum(blank, container.checksum(blank, buffers))
        replace(self.files, self.block_path(name.key), [header, *buffers])
        return self._size

    def get(self, name: BlockName, buffers: Sequence[Array]) -> float:
        header = bytearray(container.ALIGNMENT)
        size = read_into(self.block_path(name.key), [memoryview(header), *(part.data for part in buffers)])
        started = time.perf_counter()
        if size != self._size:
            self.check_version(name.key)
            raise CorruptError(f"truncated: {size:,} bytes of {self._size:,}")
        blank, digits = container.split_checksum(bytes(header))
        if blank != self._header(name):
            self.check_version(name.key)
            raise CorruptError(self._difference(bytes(header), name))
        if container.checksum(blank, buffers) != digits:
            raise CorruptError("checksum")
        return time.perf_counter() - started

    def blocks(self) -> Iterator[tuple[Key, int]]:
        for entry in _entries(self._blocks):
            try:
                yield Key(bytes.fromhex(entry.name.removesuffix(SUFFIX))), entry.stat(follow_symlinks=False).st_size
            except (ValueError, OSError):  # not ours, or just deleted
                continue

    def describe(self, key: Key) -> BlockName:
        header = bytearray(container.ALIGNMENT)
        if read_into(self.block_path(key), [memoryview(header)]) < len(header):
            raise CorruptError("truncated")
        try:
            said, _ = container.read_metadata(bytes(header))
            tokens = np.asarray(json.loads(said["tokens"]), ">u4").tobytes()
            name = BlockName(Key(bytes.fromhex(said["key"])), Key(bytes.fromhex(said["parent"])), tokens)
        except (StoreError, KeyError, ValueError, TypeError, OverflowError) as error:
            self.check_version(key)
            raise CorruptError(str(error)) from None
        if name.key != key or container.split_checksum(bytes(header))[0] != self._header(name):
            self.check_version(key)
            raise CorruptError(self._difference(bytes(header), name))
        if child_key(name.parent, name.tokens) != key:
            raise CorruptError("its name is not that of its tokens")
        return name

    def delete(self, key: Key) -> None:
        self._unlink(self.block_path(key))

    def sync_blocks(self) -> None:
        self.files.sync_directory(self._blocks)

    def commit(self, manifest: Manifest, admit: Callable[[int], None]) -> int:
        parts = encode(manifest)
        admit(sum(len(part) for part in parts))
        replace(self.files, self.manifest_path(manifest.tenant, manifest.name), parts)
        self.files.sync_directory(self._manifests)
        return sum(len(part) for part in parts)

    def load(self, tenant: str, name: str) -> Manifest:
        manifest = decode(read_whole(self.manifest_path(tenant, name)))
        if (manifest.tenant, manifest.name) != (tenant, name):
            raise CorruptError("of another agent")
        return self._covered(manifest)

    def _covered(self, manifest: Manifest) -> Manifest:
        """The manifest with those of its blocks, from the beginning on, that bear the names of its tokens."""
        size = 4 * self.ids.layout.block_tokens
        tokens = token_bytes(manifest.tokens)[: 4 * manifest.kv_tokens]
        ids = self.ids
        parent = root_key(bytes.fromhex(manifest.salt), ids.layout.digest, ids.weights_id, ids.numerics_id)
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

    def remove(self, tenant: str, name: str) -> None:
        self._unlink(self.manifest_path(tenant, name))
        self.files.sync_directory(self._manifests)

    def manifests(self) -> Iterator[tuple[Manifest | StoreError, Path, int]]:
        for entry in _entries(self._manifests):
            path = Path(entry.path)
            try:
                data = read_whole(path)
            except FileNotFoundError:  # just deleted
                continue
            except OSError as error:
                yield UnreadableError(str(error)), path, 0
                continue
            try:
                yield self._checked(decode(data, with_text=False), path), path, len(data)
            except StoreError as error:
                yield error, path, len(data)

    def manifest_bytes(self, tenant: str, name: str) -> int:
        try:
            return self.manifest_path(tenant, name).stat(follow_symlinks=False).st_size
        except OSError:
            return 0

    def quarantine(self, path: Path) -> tuple[Path | None, int]:
        """Out of the way, not away: someone may want to look at it."""
        directory = self.root / QUARANTINE
        name = f"{self.ids.directory}.{path.parent.name}.{path.name}"
        try:
            size = path.stat(follow_symlinks=False).st_size
            self.files.make_directory(directory)
            taken = (directory / (f"{name}.{number}" if number else name) for number in count())
            moved = next(place for place in taken if not os.path.lexists(place))
            self.files.rename(path, moved)
            return moved, size
        except OSError:  # read-only, or gone: then it is only not used
            return None, 0

    def _checked(self, manifest: Manifest, path: Path) -> Manifest:
        if path.name != file_name(manifest.tenant, manifest.name):
            raise CorruptError("under the name of another agent")
        wanted = (self.ids.weights_id, self.ids.numerics_id, self.ids.layout.digest)
        if (manifest.weights_id, manifest.numerics_id, manifest.layout) != wanted:
            raise CorruptError("of another model")
        return manifest

    def _header(self, name: BlockName) -> bytes:
        """All that a block file says, but for its checksum: one comparison shows that it is the one that is meant."""
        said = {
            "format": FORMAT,
            "version": VERSION,
            "key": name.key.hex(),
            "parent": name.parent.hex(),
            "tokens": json.dumps(token_list(name.tokens), separators=(",", ":")),
            "weights_id": self.ids.weights_id,
            "numerics_id": self.ids.numerics_id,
            "layout": self._layout,
        }
        header = container.blank_header(said, self._tensors)
        assert len(header) == container.ALIGNMENT, "a block of more tokens needs a larger header"
        return header

    def check_version(self, key: Key) -> None:
        """Raises VersionError if this block is of another version; else it says nothing."""
        try:
            container.check_version(container.read_header(self.block_path(key))[0], FORMAT, VERSION)
        except container.VersionError:
            raise
        except (StoreError, OSError):
            pass

    def _difference(self, header: bytes, name: BlockName) -> str:
        """Why a header is not the expected one, in words."""
        try:
            said, _ = container.read_metadata(header)
        except StoreError as error:
            return str(error)
        wanted, _ = container.read_metadata(self._header(name))
        for key, value in wanted.items():
            if key != "checksum" and said.get(key) != value:
                return f"{key} is {str(said.get(key))[:80]!r}, expected {value[:80]!r}"
        return "checksum: its header is not as it was written"

    def block_path(self, key: Key) -> Path:
        return self._blocks / (key.hex() + SUFFIX)

    def manifest_path(self, tenant: str, name: str) -> Path:
        return self._manifests / file_name(tenant, name)

    def _unlink(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(path)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from (entry for entry in entries if entry.name.endswith(SUFFIX) and not entry.name.startswith("."))
    except OSError:  # not there, or not ours: `AgentStore.read_only` says what is the matter
        return
