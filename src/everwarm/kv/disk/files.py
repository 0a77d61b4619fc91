"""What the agent store does to files: one method per system call, so that tests can record them and let them fail.

Order matters after a crash: `replace` writes under a temporary name, syncs the data, then renames. Whoever calls it
syncs the directory before relying on the new name.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from everwarm.kv.container import Part
from everwarm.opening import open_regular

TEMPORARY = ".part"
_numbers = count()  # two threads that replace the same file must not share a temporary one


class Files:
    """Operations of the operating system, with modes that keep prompts private."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        """May write less than all."""
        return os.writev(descriptor, parts)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directories(files: Files, path: Path) -> None:
    """Make a directory and what is missing above it, and make sure of their names: also of those that a process has
    made that was killed before it could.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        files.make_directory(directory)
        files.sync_directory(directory.parent)
    for directory in {path, path.parent} - set(missing):
        with suppress(PermissionError):  # someone else's, so someone else has made it
            files.sync_directory(directory.parent)


def replace(files: Files, path: Path, parts: Sequence[Part]) -> None:
    """Put a whole file in place, or leave nothing behind and raise OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}{TEMPORARY}")
    try:
        try:
            descriptor = files.create(temporary)
        except FileExistsError:  # of a process that had this pid before a crash
            files.unlink(temporary)
            descriptor = files.create(temporary)
        try:
            _write_all(files, descriptor, [_view(part) for part in parts])
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            files.unlink(temporary)
        raise


def _view(part: Part) -> memoryview:
    return memoryview(part if isinstance(part, bytes) else part.data).cast("B")


def _write_all(files: Files, descriptor: int, parts: list[memoryview]) -> None:
    while parts:
        count = files.write(descriptor, parts)
        if count == 0:
            raise OSError(5, "the system wrote nothing")
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]


def read_into(path: Path | str, parts: Sequence[memoryview]) -> int:
    """Fill the parts from the beginning of a file; the bytes that there were, at most what fits."""
    descriptor = open_regular(path)
    try:
        left, total = [memoryview(part).cast("B") for part in parts], 0
        while left:
            count = os.preadv(descriptor, left, total)
            if count == 0:
                break
            total += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
        return total
    finally:
        os.close(descriptor)
