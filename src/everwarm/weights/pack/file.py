"""The pack: every tensor of one model in the form that the kernels eat, in one file that is mapped at start-up.

In: tensors of a GGUF file, packed by a backend. Out: a valid safetensors file, never changed in place, only replaced
by rename.

    8 bytes      length of the header
    header       JSON, padded with spaces so that data begin at a multiple of 4,096
    data         tensors in order, each on 64 bytes; between them padding tensors, because the format allows no holes

A quantised matrix is a tensor of bytes (U8), a vector is F32. `__metadata__` says which model, which layout and which
version of everwarm; `tensors` in it is a JSON object with kind, shape and checksum (xxh3-64) of each.

Nothing in a pack is believed: its header must be, byte for byte, the one that would be written for what it says, so
that every tensor has its own place; and its tensors must be those that the model needs (`check`). Whoever computes
with the mapping asks `as_opened` whether someone has written into the file meanwhile.
"""

import errno
import fcntl
import json
import mmap
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from everwarm.errors import PackError
from everwarm.kernels.native import ALIGNMENT, aligned_bytes
from everwarm.opening import create_new, open_regular
from everwarm.weights.gguf.mapped import fingerprint
from everwarm.weights.memory import PAGE, U8, Buffers, open_for_streaming

FORMAT = "everwarm-pack"
VERSION = "1"
LAYOUT = "panel16-group32-1"
"""How forms lie in memory: see src/native/forms.h. All instruction sets share it."""

HEADER_ALIGNMENT = 4096
_PART = ".part"
_MAX_HEADER = 100 << 20
_NO_CHECKSUM = "0" * 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a pack."""

    name: str
    kind: str  # of the form; `vector` for f32 vectors
    shape: tuple[int, ...]
    size_bytes: int
    checksum: str = _NO_CHECKSUM

    def described(self) -> str:
        """In words, however long a stranger has made them."""
        return f"{self.name[:80]} of kind {self.kind[:20]}, shape {str(self.shape)[:80]}, {self.size_bytes:,} bytes"


class AlteredError(PackError):
    """A tensor of an open pack is not as it was written."""


class Pack:
    """An open pack: mapped, its header checked, its data not read."""

    def __init__(self, path: Path, weights_id: str | None = None) -> None:
        """Raises PackError if the file is not a whole pack of these weights (None: of any) in today's layout."""
        self.path = path
        try:
            with open(open_regular(path), "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self._file = os.dup(file.fileno())  # the one that is mapped, whatever becomes of its name
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # an empty file can't be mapped
            reason = error.strerror if isinstance(error, OSError) else error
            raise PackError(f"{path}: can't be opened: {reason}") from None
        self._close = weakref.finalize(self, os.close, self._file)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._reading = threading.Lock()
        self._descriptor: int | None = None  # for `read`
        self._direct = False
        self._stamp = self._stamped()
        self.metadata, self.entries, self._offsets = self._read_header()
        if weights_id is not None and self.metadata["weights_id"] != weights_id:
            raise PackError(f"{path}: weights_id is {self.metadata['weights_id'][:80]!r}, expected {weights_id!r}")

    def check(self, planned: Sequence["Entry"]) -> None:
        """Raises PackError unless these are its tensors, in this order; checksums are not compared."""
        if len(planned) != len(self.entries):
            raise PackError(f"{self.path}: holds {len(self.entries):,} tensors, the model has {len(planned):,}")
        for found, wanted in zip(self.entries.values(), planned, strict=True):
            if (found.name, found.kind, found.shape, found.size_bytes) != (
                wanted.name, wanted.kind, wanted.shape, wanted.size_bytes,
            ):  # fmt: skip
                raise PackError(f"{self.path}: tensor {found.described()}, the model has {wanted.described()}")

    def as_opened(self) -> bool:
        """Whether nobody has written into the file, or cut it, since it was opened. Costs a microsecond."""
        return self._file < 0 or self._stamped() == self._stamp  # nobody computes once it is closed

    def changed(self) -> list[str]:
        """Names of the tensors whose bytes are no longer those that were written, since someone has touched the file.
        Raises PackError if it is shorter now: the mapping must not be touched any more.
        """
        for _ in range(3):
            stamp = self._stamped()
            if stamp[0] < len(self._bytes):
                raise PackError(f"{self.path}: was cut from {len(self._bytes):,} to {stamp[0]:,} bytes while in use")
            altered = list(self.altered())
            if self._stamped() == stamp:
                self._stamp = stamp
                return altered
        raise PackError(f"{self.path}: someone keeps writing into it; stop that and load the model again")

    def fingerprint(self) -> str:
        """What changes when anything about the file does."""
        return fingerprint(os.fstat(self._file))

    def _stamped(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def data(self, name: str) -> U8:
        """The bytes of a tensor: a read-only view into the mapping, on 64 bytes. Each call makes an array of its own,
        so that its life says whether someone uses this tensor.
        """
        start, end = self._offsets[name]
        return np.frombuffer(self._map, np.uint8, end - start, start)

    def read(self, name: str, buffers: Buffers) -> U8:
        """The bytes of a tensor, read into memory of its own, past the page cache where possible; on 64 bytes. Raises
        PackError if someone has written into the file and they are others now.
        """
        start, end = self._offsets[name]
        first = start // PAGE * PAGE
        memory = buffers.take(end - first)
        with self._reading:
            if self._descriptor is None:
                self._descriptor, self._direct = open_for_streaming(self.path, self._file)
        view, done = memory.data, 0
        while first + done < end:
            count = self._read_some(view[done:], first + done)
            if count == 0:
                raise PackError(f"{self.path}: ends at {first + done:,}, tensor {name} reaches to {end:,}")
            done += count
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, first, end - first, os.POSIX_FADV_DONTNEED)
        data = memory[start - first : end - first]
        if not self.as_opened() and checksum(data) != self.entries[name].checksum:
            raise AlteredError(f"{self.path}: tensor {name} was altered while in use")
        return data

    def _read_some(self, view: memoryview, offset: int) -> int:
        assert self._descriptor is not None
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as error:
            if not (self._direct and error.errno == errno.EINVAL):
                raise PackError(f"{self.path}: can't be read at {offset:,}: {error}") from None
        # The file system opens files for direct reading, but does not do it.
        with self._reading:
            if self._direct:
                os.close(self._descriptor)
                self._descriptor, self._direct = os.dup(self._file), False
        return self._read_some(view, offset)

    def altered(
        self, stop: Callable[[], bool] = lambda: False, read: Callable[[str], U8] | None = None
    ) -> Iterator[str]:
        """Reads everything; names of the tensors whose bytes are not those that were written. `stop` ends it early."""
        for name, entry in self.entries.items():
            if stop():
                return
            if checksum((read or self.data)(name)) != entry.checksum:
                yield name

    def close(self) -> None:
        """Close the file. The mapping goes with the last view of it."""
        with self._reading:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None
            self._close()
            self._file = -1

    def _read_header(self) -> tuple[dict[str, str], dict[str, Entry], dict[str, tuple[int, int]]]:
        size = len(self._bytes)
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise PackError(f"{self.path}: a header of {length:,} bytes in a file of {size:,}")
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes())
            metadata = header.pop("__metadata__")
            described = json.loads(metadata["tensors"])
            entries = {name: _entry(name, d, header[name]["data_offsets"]) for name, d in described.items()}
            weights_id, version = str(metadata["weights_id"]), str(metadata["everwarm"])
            written, offsets, end = _layout(weights_id, version, list(entries.values()))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise PackError(f"{self.path}: the header can't be read: {str(error)[:200]}") from None
        for key, value in {"format": FORMAT, "version": VERSION, "layout": LAYOUT}.items():
            if metadata.get(key) != value:
                raise PackError(f"{self.path}: {key} is {str(metadata.get(key))[:80]!r}, expected {value!r}")
        if written != self._bytes[: 8 + length].tobytes():
            raise PackError(f"{self.path}: the header is not as it is written: tensors lie where they should not")
        self.header_digest = str(xxhash.xxh3_128_hexdigest(written))
        if end != size:
            raise PackError(f"{self.path}: {size:,} bytes, expected {end:,} (truncated?)")
        places = {name: (offsets[name], offsets[name] + entry.size_bytes) for name, entry in entries.items()}
        return metadata, entries, places


def write_pack(
    path: Path,
    weights_id: str,
    entries: list[Entry],
    fill: Callable[[Entry, U8], None],
    version: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a pack under a temporary name, put it in place. `fill` writes one tensor's bytes. May raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_leftovers(path)
    header, offsets, total = _layout(weights_id, version, entries)
    free = shutil.disk_usage(path.parent).free
    if free < total + (64 << 20):
        raise OSError(f"{total:,} bytes are needed, {free:,} are free")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_PART}")
    done, all_bytes = 0, sum(entry.size_bytes for entry in entries)
    summed = []
    try:
        with open(create_new(temporary, 0o644), "w+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that someone is at it
            file.truncate(total)
            for entry in entries:
                memory = aligned_bytes(entry.size_bytes)
                fill(entry, memory)
                file.seek(offsets[entry.name])
                file.write(memory.data)
                summed.append(Entry(entry.name, entry.kind, entry.shape, entry.size_bytes, checksum(memory)))
                done += entry.size_bytes
                if progress:
                    progress(done, all_bytes)
            final, _, _ = _layout(weights_id, version, summed)
            assert len(final) == len(header)  # a checksum is as long as its placeholder
            file.seek(0)
            file.write(final)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Files that someone began to write and who is no longer there: they can be as large as the model."""
    for leftover in path.parent.glob(f".{path.name}.*{_PART}"):
        with suppress(OSError):  # someone's, or gone
            descriptor = open_regular(leftover)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(descriptor)


def _entry(name: str, described: Any, offsets: Any) -> Entry:
    """What a header says about a tensor. Raises TypeError, ValueError and the like."""
    start, end = offsets
    shape, kind, digits = described["shape"], described["kind"], described["checksum"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or type(shape) is not list:
        raise TypeError(f"tensor {name[:80]}: offsets and shape must be whole numbers")
    if type(kind) is not str or type(digits) is not str or len(digits) != len(_NO_CHECKSUM) or end < start:
        raise TypeError(f"tensor {name[:80]}: its kind, checksum or place can't be")
    return Entry(name, kind, tuple(shape), end - start, digits)


def checksum(data: U8) -> str:
    return str(xxhash.xxh3_64_hexdigest(data.data))


def _layout(weights_id: str, version: str, entries: list[Entry]) -> tuple[bytes, dict[str, int], int]:
    """(length and header, where each tensor starts in the file, size of the file)."""
    tensors: dict[str, object] = {}
    relative: dict[str, int] = {}
    at = 0
    for number, entry in enumerate(entries):
        relative[entry.name] = at
        vector = entry.kind == "vector"
        shape = [entry.size_bytes // 4] if vector else [entry.size_bytes]
        end = at + entry.size_bytes
        tensors[entry.name] = {"dtype": "F32" if vector else "U8", "shape": shape, "data_offsets": [at, end]}
        at = -(-end // ALIGNMENT) * ALIGNMENT
        if at > end:
            tensors[f"__padding_{number}"] = {"dtype": "U8", "shape": [at - end], "data_offsets": [end, at]}
    described = {e.name: {"kind": e.kind, "shape": list(e.shape), "checksum": e.checksum} for e in entries}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "layout": LAYOUT,
        "everwarm": version,
        "weights_id": weights_id,
        "tensors": json.dumps(described),
    }
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    start = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    return header, {name: start + offset for name, offset in relative.items()}, start + at
