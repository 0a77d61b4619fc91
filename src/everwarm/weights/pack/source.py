"""Where weights come from: straight out of the GGUF file, or out of a pack that was built from it.

A source builds one tensor at a time; the cache owns what it has built. The pack is opened if there is a good one,
built and opened if there is none, and left out (with one warning) where it can't be written.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from everwarm.errors import PackError
from everwarm.kernels.backend import F32, Backend, Weight
from everwarm.weights.dequant.dequant import dequantize
from everwarm.weights.gguf.file import GGUFFile, TensorInfo
from everwarm.weights.memory import U8, Buffers, root_of
from everwarm.weights.pack.file import LAYOUT, AlteredError, Entry, Pack, write_pack
from everwarm.weights.pack.identity import pack_is_another, remember_pack, weights_id

_log = logging.getLogger(__name__)

# What reading costs, to compare tensors by: their bytes, so that the policy keeps as many bytes as fit. By measured
# time it would not: each read takes 0.3 ms whatever its size, so small tensors are dearer per byte. See ADR 6.
_READ_BYTES_S = 1e9

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A tensor, its bytes, and the array at the root of its memory: alive as long as anyone uses the tensor."""

    tensor: Weight
    data: U8
    root: npt.NDArray[Any]
    cost_s: float | None = None  # of building it again, undisturbed; None: the time that it took


class Source(Protocol):
    """Builds the tensors of one model in the form that a backend computes with."""

    @property
    def reads(self) -> bool:
        """Whether a tensor is read as it is, and not computed: then the disk works while the processor does."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor, as built. The order is that of the file."""

    def build(self, name: str, buffers: Buffers | None) -> Built:
        """In memory taken from `buffers`; with None, where it costs least: in a mapped pack, just there.

        An unknown name raises the file's error, which suggests near ones.
        """

    def rows(self, name: str, numbers: Sequence[int]) -> F32:
        """Some rows of a matrix as floats, read by themselves: what the whole one in its form says, bit for bit."""

    def checksum(self, name: str) -> str | None:
        """Of the bytes that `build` gives, where it is known without building."""

    def altered(self) -> list[str]:
        """Tensors that were built without memory of their own and are no longer what they were, because someone has
        written into the file. It is asked before and after each step, and costs a microsecond if nobody has.
        """

    def mended(self) -> "Source":
        """Where altered tensors can be had from."""


class FileSource:
    """Packs or dequantises out of the GGUF file."""

    reads = False

    def __init__(self, file: GGUFFile, backend: Backend) -> None:
        self._file = file
        self._backend = backend
        self.sizes = {name: _planned(backend, info)[2] for name, info in file.tensors.items()}

    def build(self, name: str, buffers: Buffers | None) -> Built:
        started = time.thread_time()
        # Nothing may stay mapped: its bytes would change with the file, and no budget knows of pages of a mapping.
        data = self._file.read(name)
        info = self._file.tensors[name]

        kind, size = self._backend.plan(info.type.name, info.shape)
        memory = (buffers or Buffers()).take(size)[:size]
        self._backend.pack_into(
            info.type.name, info.shape, data, partial(dequantize, data, info.type, info.shape), memory
        )
        tensor = self._backend.attach(kind, info.shape, memory)
        return Built(tensor, memory, root_of(memory), time.thread_time() - started)

    def rows(self, name: str, numbers: Sequence[int]) -> F32:
        return _rows(self._file, name, numbers)

    def checksum(self, name: str) -> str | None:
        return None

    def altered(self) -> list[str]:
        return []

    def mended(self) -> Source:
        return self


class PackSource:
    """Maps a pack, or reads from it: nothing is computed."""

    reads = True

    def __init__(self, file: GGUFFile, backend: Backend, pack: Pack) -> None:
        self.pack = pack
        self.sizes = {name: entry.size_bytes for name, entry in pack.entries.items()}
        self._file = file
        self._backend = backend
        self._bad: set[str] = set()  # tensors that turned out to be altered

    def build(self, name: str, buffers: Buffers | None) -> Built:
        if name in self._bad:
            return self.mended().build(name, buffers)
        entry = self.pack.entries.get(name)
        if entry is None:
            self._file.data(name)  # the error for an unknown name
        assert entry is not None
        try:
            data = self.pack.data(name) if buffers is None else self.pack.read(name, buffers)
        except AlteredError as error:
            _log.error("%s; built from %s from now on", error, self._file.path)
            self._bad.add(name)
            return self.mended().build(name, buffers)
        tensor = self._backend.attach(entry.kind, entry.shape, data)
        return Built(tensor, data, root_of(data), data.nbytes / _READ_BYTES_S)

    def rows(self, name: str, numbers: Sequence[int]) -> F32:
        return _rows(self._file, name, numbers)  # a form has the rows of sixteen outputs interleaved, the file has not

    def checksum(self, name: str) -> str | None:
        return self.pack.entries[name].checksum

    def altered(self) -> list[str]:
        return [] if self.pack.as_opened() else self.pack.changed()

    def mended(self) -> Source:
        return FileSource(self._file, self._backend)


def pack_path(home: Path, weights: str) -> Path:
    return home / "packs" / f"{weights[:32]}.{LAYOUT}.safetensors"


def packed_source(file: GGUFFile, backend: Backend, home: Path, progress: Progress | None = None) -> Source:
    """The pack of this model, built now if there is no good one; the file itself if it can't be written."""
    weights = weights_id(file, home)
    path = pack_path(home, weights)
    planned = [Entry(name, *_planned(backend, info)) for name, info in file.tensors.items()]
    try:
        pack = _open(path, weights, planned)
        if pack_is_another(pack):
            pack.close()
            raise PackError(f"{path}: its checksums are not those of the pack that was written here")
        return PackSource(file, backend, pack)
    except FileNotFoundError:
        _log.info("packing %s into %s", file.path, path)
    except PackError as error:
        _log.warning("%s; building the pack again", error)
    try:
        _build(file, backend, path, weights, planned, progress)
        pack = _open(path, weights, planned)
        remember_pack(pack, pack.fingerprint())
        return PackSource(file, backend, pack)
    except (OSError, PackError) as error:
        _log.warning("%s: the pack can't be kept, running from memory: %s", path, error)
        return FileSource(file, backend)


def _rows(file: GGUFFile, name: str, numbers: Sequence[int]) -> F32:
    info = file.tensors[name]
    return dequantize(file.read_rows(name, numbers), info.type, (len(numbers), info.shape[-1]))


def _planned(backend: Backend, info: TensorInfo) -> tuple[str, tuple[int, ...], int]:
    """The form that a tensor gets: its kind, its shape and its bytes."""
    kind, size = backend.plan(info.type.name, info.shape)
    return kind, info.shape, size


def _open(path: Path, weights: str, planned: list[Entry]) -> Pack:
    pack = Pack(path, weights)
    try:
        pack.check(planned)
    except PackError:
        pack.close()
        raise
    return pack


def _build(
    file: GGUFFile,
    backend: Backend,
    path: Path,
    weights: str,
    planned: list[Entry],
    progress: Progress | None,
) -> None:
    def fill(entry: Entry, out: U8) -> None:
        data, info = file.read(entry.name), file.tensors[entry.name]
        backend.pack_into(info.type.name, info.shape, data, partial(dequantize, data, info.type, info.shape), out)

    write_pack(path, weights, planned, fill, version("everwarm"), progress)
