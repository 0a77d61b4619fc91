"""The pack: every tensor of one model in the form that the kernels eat, in one file that is mapped at start-up.

In: tensors of a GGUF file, packed by a backend. Out: a valid safetensors file, never changed in place, only replaced
by rename.

    8 bytes      length of the header
    header       JSON, padded with spaces so that data begin at a multiple of 4,096
    data         tensors in order, each on 64 bytes; between them padding tensors, because the format allows no holes

A quantised matrix is a tensor of bytes (U8), a vector is F32. `__metadata__` says which model, which layout and which
version of everwarm; `tensors` in it is a JSON object with kind, shape and checksum (xxh3-64) of each.
"""

import errno
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from everwarm.errors import PackError
from everwarm.kernels.native import ALIGNMENT, aligned_bytes
from everwarm.weights.memory import PAGE, U8, Buffers, open_for_streaming

FORMAT = "everwarm-pack"
VERSION = "1"
LAYOUT = "panel16-group32-1"
"""How forms lie in memory: see src/native/forms.h. All instruction sets share it."""

HEADER_ALIGNMENT = 4096
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


class Pack:
    """An open pack: mapped, its header checked, its data not read."""

    def __init__(self, path: Path, weights_id: str | None = None) -> None:
        """Raises PackError if the file is not a whole pack of these weights (None: of any) in today's layout."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # an empty file can't be mapped
            raise PackError(f"{path}: can't be opened: {error}") from None
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._reading = threading.Lock()
        self._descriptor: int | None = None  # for `read`
        self._direct = False
        self.metadata, self.entries, self._offsets = self._read_header()
        wanted = {"format": FORMAT, "version": VERSION, "layout": LAYOUT}
        if weights_id is not None:
            wanted["weights_id"] = weights_id
        for key, value in wanted.items():
            if self.metadata.get(key) != value:
                raise PackError(f"{path}: {key} is {self.metadata.get(key)!r}, expected {value!r}")

    def data(self, name: str) -> U8:
        """The bytes of a tensor: a read-only view into the mapping, on 64 bytes. Each call makes an array of its own,
        so that its life says whether someone uses this tensor.
        """
        start, end = self._offsets[name]
        return np.frombuffer(self._map, np.uint8, end - start, start)

    def read(self, name: str, buffers: Buffers) -> U8:
        """The bytes of a tensor, read into memory of its own, past the page cache where possible; on 64 bytes."""
        start, end = self._offsets[name]
        first = start // PAGE * PAGE
        memory = buffers.take(end - first)
        with self._reading:
            if self._descriptor is None:
                self._descriptor, self._direct = open_for_streaming(self.path)
        view, done = memory.data, 0
        while first + done < end:
            count = self._read_some(view[done:], first + done)
            if count == 0:
                raise PackError(f"{self.path}: ends at {first + done:,}, tensor {name} reaches to {end:,}")
            done += count
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, first, end - first, os.POSIX_FADV_DONTNEED)
        return memory[start - first : end - first]

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
                self._descriptor, self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), False
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

    def _read_header(self) -> tuple[dict[str, str], dict[str, Entry], dict[str, tuple[int, int]]]:
        size = len(self._bytes)
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise PackError(f"{self.path}: a header of {length:,} bytes in a file of {size:,}")
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes())
            metadata = header.pop("__metadata__")
            described = json.loads(metadata["tensors"])
            offsets = {name: tuple(header[name]["data_offsets"]) for name in described}
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            entries = {
                name: Entry(
                    name, str(d["kind"]), tuple(d["shape"]), offsets[name][1] - offsets[name][0], str(d["checksum"])
                )
                for name, d in described.items()
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise PackError(f"{self.path}: the header can't be read: {error!r}") from None
        if end != size:
            raise PackError(f"{self.path}: {size:,} bytes, expected {end:,} (truncated?)")
        base = 8 + length
        absolute = {name: (base + start, base + stop) for name, (start, stop) in offsets.items()}
        for name, (start, stop) in absolute.items():
            if not base <= start <= stop <= size or start % ALIGNMENT:
                raise PackError(f"{self.path}: tensor {name} lies at {start:,} to {stop:,} of {size:,}")
        return metadata, entries, absolute


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
    header, offsets, total = _layout(weights_id, version, entries)
    free = shutil.disk_usage(path.parent).free
    if free < total + (64 << 20):
        raise OSError(f"{total:,} bytes are needed, {free:,} are free")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    done, all_bytes = 0, sum(entry.size_bytes for entry in entries)
    summed = []
    try:
        with temporary.open("w+b") as file:
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
