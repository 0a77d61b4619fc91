"""The bytes of a GGUF file: a read-only mapping, and a cursor that never leaves it.

In: a path. Out: views, numbers and strings. Invariant: nothing is read before its place and its length have been
compared with the size of the file, and every failure is a `GGUFError` of one line: path, field, byte offset, limit,
next step.

A process that touches a mapped page which its file has lost is killed. So the size is asked again before each view is
handed out; what no reader can prevent is a file that shrinks under a view already handed out. Tensors are therefore
read (`read_into`), not mapped, and whoever reads asks `stamp` afterwards whether the file is still as it was.
"""

import errno
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import GGUFError
from everwarm.opening import open_regular

Bytes = NDArray[np.uint8]

MAX_HEADER_BYTES = 256 << 20
"""Metadata and tensor infos end before this byte. Real ones take 40 MB at most; it bounds the work on hostile ones."""

DAMAGED = "the file is truncated or damaged: fetch it again"

_LENGTH = struct.Struct("<Q")


class MappedFile:
    """One file, mapped read-only. Views keep the mapping alive, also after `close()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Models are often links: the cache of the Hugging Face hub is made of them.
            descriptor = open_regular(path, follow=True)
        except FileNotFoundError:
            raise self.error("no such file; check the path") from None
        except (OSError, ValueError) as problem:
            if getattr(problem, "errno", None) == errno.EINVAL:
                kind = "a directory" if path.is_dir() else "not a regular file"
                raise self.error(f"is {kind}; give the path of a .gguf file") from None
            raise self.error(f"can't be opened ({_reason(problem)}); check the path and its permissions") from None
        try:
            self.size_bytes = os.fstat(descriptor).st_size
            if not self.size_bytes:
                raise self.error("is empty (0 bytes); fetch it again")
            self._map: mmap.mmap | None = mmap.mmap(descriptor, self.size_bytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:
            os.close(descriptor)
            raise self.error(f"can't be mapped ({_reason(problem)}); copy it to a local disk") from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor

    def view(self, offset: int, size: int) -> Bytes:
        """A read-only window on the mapping: no copy."""
        return np.frombuffer(self.mapping(), np.uint8, size, offset)

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out` from `offset` on. Unlike a view, it takes no memory beside it, and a shorter file is an error."""
        if self._descriptor is None:
            raise self.error("is closed; read what you need before close()")
        done = 0
        while done < out.nbytes:
            try:
                count = os.preadv(self._descriptor, [out.data[done:]], offset + done)
            except OSError as problem:
                raise self.error(f"can't be read at byte {offset + done:,} ({_reason(problem)})") from None
            if not count:
                raise self.error(f"ends at byte {offset + done:,}, shorter than when it was opened; open it again")
            done += count

    def stamp(self) -> tuple[int, int]:
        """Size and time of the last change of its bytes. A new name, or none, changes neither."""
        status = self._status()
        return status.st_size, status.st_mtime_ns

    def fingerprint(self) -> str:
        """What changes when anything about the file does, and differs between files."""
        status = self._status()
        return fingerprint(status)

    def _status(self) -> os.stat_result:
        if self._descriptor is None:
            raise self.error("is closed; read what you need before close()")
        return os.fstat(self._descriptor)

    def mapping(self) -> mmap.mmap:
        """The mapping itself, once it is sure that the file still holds all of it."""
        if self._map is None:
            raise self.error("is closed; read what you need before close()")
        found = self._map.size()
        if found < self.size_bytes:
            raise self.error(f"shrank from {self.size_bytes:,} to {found:,} bytes while open; open it again")
        return self._map

    def close(self) -> None:
        """Unmap the file now, or with the last view on it."""
        if self._map is not None:
            with suppress(BufferError):  # someone holds a view, and with it the mapping
                self._map.close()
            self._map = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def error(self, text: str) -> GGUFError:
        """A message of one line whatever the path and the file put into it."""
        line = f"{self.path}: {text}"
        return GGUFError("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))


class Cursor:
    """Reads a header front to back. `field` is what the error message calls the thing being read."""

    def __init__(self, file: MappedFile, position: int = 0) -> None:
        self.file = file
        self.position = position
        self.end = min(file.size_bytes, MAX_HEADER_BYTES)
        self._map = file.mapping()

    def skip(self, size: int, field: str) -> int:
        """Step over so many bytes and say where they began."""
        start = self.position
        if size > self.end - start:
            raise self.error(field, f"{size:,} bytes are past the end of {self.describe_end()}")
        self.position = start + size
        return start

    def unpack(self, layout: struct.Struct, field: str) -> tuple[Any, ...]:
        return layout.unpack_from(self._map, self.skip(layout.size, field))

    def string(self, field: str) -> bytes:
        """A string as GGUF writes it: its length in 8 bytes, then its bytes."""
        (length,) = self.unpack(_LENGTH, field)
        start = self.skip(length, field)
        return self._map[start : self.position]

    def name(self, field: str, max_bytes: int) -> str:
        """A string that names something: short, and valid UTF-8."""
        start = self.position
        (length,) = self.unpack(_LENGTH, field)
        if length > max_bytes:
            raise self.error(field, f"a name of {length:,} bytes, at most {max_bytes:,} are allowed", at=start)
        begin = self.skip(length, field)
        try:
            return self._map[begin : self.position].decode()
        except UnicodeDecodeError:
            raise self.error(field, "a name that is not valid UTF-8", at=start) from None

    def describe_end(self) -> str:
        if self.end < self.file.size_bytes:
            return f"what a header may take ({self.end:,} bytes)"
        return f"the file ({self.end:,} bytes)"

    def error(self, field: str, problem: str, *, at: int | None = None, advice: str = DAMAGED) -> GGUFError:
        offset = self.position if at is None else at
        return self.file.error(f"{field} at byte {offset:,}: {problem}; {advice}")


def fingerprint(status: os.stat_result) -> str:
    """A file by what changes when it does."""
    times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{times}"


def shown(name: str) -> str:
    """A name as messages show it: not longer than a line can bear."""
    return name if len(name) <= 80 else f"{name[:77]}..."


def _reason(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or str(problem)
