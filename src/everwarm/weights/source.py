"""Where weights come from: straight out of the GGUF file, or out of a pack that was built from it.

A source builds one tensor at a time; the cache owns what it has built. The pack is opened if there is a good one,
built and opened if there is none, and left out (with one warning) where it can't be written.
"""

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from everwarm.errors import PackError
from everwarm.kernels.backend import Backend, Weight
from everwarm.kernels.native import NativeBackend
from everwarm.weights.dequant import dequantize
from everwarm.weights.gguf import GGUFFile, TensorInfo
from everwarm.weights.identity import weights_id
from everwarm.weights.pack import LAYOUT, U8, Entry, Pack, write_pack

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Source(Protocol):
    """Builds the tensors of one model in the form that a backend computes with."""

    tensors: Mapping[str, TensorInfo]

    def build(self, name: str) -> Weight:
        """An unknown name raises the file's error, which suggests near ones."""


class FileSource:
    """Packs or dequantises out of the GGUF file, into memory of its own."""

    def __init__(self, file: GGUFFile, backend: Backend) -> None:
        self.tensors = file.tensors
        self._file = file
        self._backend = backend

    def build(self, name: str) -> Weight:
        data = self._file.data(name)
        info = self.tensors[name]
        return self._backend.weight(info.type.name, info.shape, data, lambda: dequantize(data, info.type, info.shape))


class PackSource:
    """Maps a pack: building a tensor costs nothing."""

    def __init__(self, file: GGUFFile, backend: NativeBackend, pack: Pack) -> None:
        self.tensors = file.tensors
        self.pack = pack
        self._file = file
        self._backend = backend

    def build(self, name: str) -> Weight:
        if name not in self.pack.entries:
            self._file.data(name)  # the error for an unknown name
        entry, data = self.pack.entries[name], self.pack.data(name)
        return data.view(np.float32) if entry.kind == "vector" else self._backend.attach(entry.kind, entry.shape, data)


def pack_path(home: Path, weights: str) -> Path:
    return home / "packs" / f"{weights[:32]}.{LAYOUT}.safetensors"


def packed_source(file: GGUFFile, backend: NativeBackend, home: Path, progress: Progress | None = None) -> Source:
    """The pack of this model, built now if there is no good one; the file itself if it can't be written."""
    weights = weights_id(file, home)
    path = pack_path(home, weights)
    try:
        return PackSource(file, backend, _open(path, weights, file))
    except FileNotFoundError:
        _log.info("packing %s into %s", file.path, path)
    except PackError as error:
        _log.warning("%s; building the pack again", error)
    try:
        _build(file, backend, path, weights, progress)
        return PackSource(file, backend, _open(path, weights, file))
    except (OSError, PackError) as error:
        _log.warning("%s: the pack can't be kept, running from memory: %s", path, error)
        return FileSource(file, backend)


def _open(path: Path, weights: str, file: GGUFFile) -> Pack:
    pack = Pack(path, weights)
    if pack.entries.keys() != file.tensors.keys():
        raise PackError(f"{path}: holds {len(pack.entries):,} tensors, the model has {len(file.tensors):,}")
    return pack


def _build(file: GGUFFile, backend: NativeBackend, path: Path, weights: str, progress: Progress | None) -> None:
    entries = []
    for name, info in file.tensors.items():
        kind, size = ("vector", 4 * info.shape[0]) if len(info.shape) == 1 else backend.plan(info.type.name, info.shape)
        entries.append(Entry(name, kind, info.shape, size))

    def fill(entry: Entry, out: U8) -> None:
        data, info = file.data(entry.name), file.tensors[entry.name]
        if entry.kind == "vector":
            out[:] = dequantize(data, info.type, info.shape).view(np.uint8)
        else:
            backend.pack_into(info.type.name, info.shape, data, lambda: dequantize(data, info.type, info.shape), out)

    write_pack(path, weights, entries, fill, version("everwarm"), progress)
