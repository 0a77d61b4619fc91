"""A `BlockStore` in a local directory.

    agents/                          one store for all models; `lock` names who writes, `tenants.json` holds the salts
      <weights id>-<numerics id>/    the first 16 digits of each; `model.json` has them whole
        blocks/<key>.safetensors
        manifests/<digest>.safetensors
      quarantine/                    files that were not what they should be

Nothing is changed in place. Directories are 0700, files 0600: they hold prompts.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.container import Part
from everwarm.kv.disk.files import TEMPORARY, Files, make_directories, read_into, replace
from everwarm.kv.disk.lock import StoreLock
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, QUARANTINE, Blob, ConflictError, OneWriter
from everwarm.opening import open_regular, read_whole


class DirectoryStore(OneWriter):
    """Blobs as files."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        """Makes nothing: `lock` and `prepare` do."""
        self.root = root
        self.files = files or Files()

    @property
    def identity(self) -> str:
        return os.path.realpath(self.root)

    def lock(self) -> StoreLock:
        try:
            make_directories(self.files, self.root)
            return StoreLock(self.root)
        except OSError as error:
            raise StoreError(f"{self.root}: can't be written: {error.strerror or error}") from None

    def prepare(self, model: str) -> None:
        for directory in (self.root, *(self._directory(model, area) for area in ("", BLOCKS, MANIFESTS))):
            self.files.make_directory(directory)
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.endswith(TEMPORARY):
                        self.files.unlink(Path(entry.path))

    def models(self) -> list[str]:
        try:
            found = [entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.root}: can't be read: {error.strerror or error}") from None
        return sorted(name for name in found if any((self.root / name / area).is_dir() for area in (BLOCKS, MANIFESTS)))

    def list(self, model: str, area: str) -> Iterator[tuple[Blob, int]]:
        try:
            entries = os.scandir(self._directory(model, area))
        except OSError:  # not there, or not ours: whoever wants to write is told what is the matter
            return
        with entries:
            for entry in entries:
                with suppress(OSError):  # just deleted
                    if area or entry.is_file(follow_symlinks=False):
                        yield Blob(model, area, entry.name), entry.stat(follow_symlinks=False).st_size

    def read(self, blob: Blob) -> bytes:
        return read_whole(self.path(blob))

    def get(self, blob: Blob, buffers: Sequence[memoryview]) -> int:
        return read_into(
            f"{self.root}/{blob.model}/{blob.area}/{blob.name}", buffers
        )  # a Path takes as long as opening

    def size(self, blob: Blob) -> int:
        return self.path(blob).stat(follow_symlinks=False).st_size

    def put(self, blob: Blob, parts: Sequence[Part]) -> None:
        replace(self.files, self.path(blob), parts)

    def sync(self, model: str, area: str) -> None:
        self.files.sync_directory(self._directory(model, area))

    def commit(self, blob: Blob, parts: Sequence[Part], *, expected: int) -> None:
        stored = self._generation(blob)
        if stored != expected:
            raise ConflictError(
                f"{self.where(blob)} has generation {stored} and not {expected}: something else has changed it"
            )
        replace(self.files, self.path(blob), parts)
        self.sync(blob.model, blob.area)

    def delete(self, blob: Blob) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(self.path(blob))

    def set_aside(self, blob: Blob) -> tuple[Blob | None, int]:
        name = ".".join(part for part in (blob.model, blob.area, blob.name) if part)
        directory = self._directory("", QUARANTINE)
        try:
            size = self.size(blob)
            self.files.make_directory(directory)
            free = (f"{name}.{number}" if number else name for number in count())
            moved = Blob("", QUARANTINE, next(name for name in free if not os.path.lexists(directory / name)))
            self.files.rename(self.path(blob), self.path(moved))
            return moved, size
        except OSError:  # read-only, or gone: then it is only not used
            return None, 0

    def usage(self, without: frozenset[str] = frozenset()) -> int:
        return _directory_bytes(self.root, without)

    def free_bytes(self) -> int:
        place = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(place).free

    def half_written(self, blob: Blob) -> bool:
        return blob.name.startswith(".") and blob.name.endswith(TEMPORARY)

    def where(self, blob: Blob | None = None) -> str:
        return str(self.root if blob is None else self.path(blob))

    def path(self, blob: Blob) -> Path:
        return self._directory(blob.model, blob.area) / blob.name

    def _directory(self, model: str, area: str) -> Path:
        return self.root / model / area

    def _generation(self, blob: Blob) -> int | None:
        """The generation that a manifest's header tells; 0 if there is no manifest, None if it can't be read."""
        try:
            descriptor = open_regular(self.path(blob))
        except FileNotFoundError:
            return 0
        with open(descriptor, "rb") as file:
            first = file.read(8)
            try:
                length = container.header_length(first, os.fstat(descriptor).st_size)
                return int(container.read_metadata(first + file.read(length - 8))[0]["generation"])
            except (StoreError, KeyError, ValueError):
                return None


def _directory_bytes(directory: Path | str, without: frozenset[str] = frozenset()) -> int:
    """Bytes of all files below a directory, but for some of the directories in it."""
    total = 0
    with suppress(OSError):  # just deleted (another process writes), or not ours
        for entry in os.scandir(directory):
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
                elif entry.name not in without:
                    total += _directory_bytes(entry.path)
    return total
