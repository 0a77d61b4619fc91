"""One GGUF file: header, metadata, and the list of its tensors.

In: a path. Out: a `Part`. Invariant: counts are checked before anything is read by them, and a tensor is listed only if
it is of a known type, in whole blocks, aligned, inside the file and apart from all others. Bytes after the last tensor
are fine, and so is a file without tensors (a vocabulary).
"""

import itertools
import math
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from everwarm.types import MetadataValue
from everwarm.weights.gguf.mapped import DAMAGED, Cursor, MappedFile, shown
from everwarm.weights.gguf.metadata import read_metadata
from everwarm.weights.types import TensorType

MAX_PAIRS = 65_536
MAX_TENSORS = 131_072
MAX_TENSOR_NAME_BYTES = 1_024  # the specification says 64, other programs write more
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**63 - 1
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 2 << 20
MAX_PARTS = 65_535  # split.count has 16 bits

_MAGIC = b"GGUF"
_OTHER_MAGICS = {
    b"vers": "this is a Git LFS pointer: run `git lfs pull`",
    b"<!DO": "this is a web page: download the file behind it",
    b"lmgg": "this is GGML, from before GGUF: fetch a GGUF file",
    b"tjgg": "this is GGJT, from before GGUF: fetch a GGUF file",
}
_START = struct.Struct("<4sI")  # magic, version
_COUNTS = struct.Struct("<QQ")  # tensors, metadata pairs
_DIMENSIONS = struct.Struct("<I")
_PLACES = [struct.Struct(f"<{dimensions}QIQ") for dimensions in range(MAX_DIMENSIONS + 1)]  # shape, type, offset
_SMALLEST_PAIR = 13  # length of the key, type, one byte
_SMALLEST_TENSOR = 32  # length of the name, one dimension, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    name: str
    type: TensorType
    shape: tuple[int, ...]  # NumPy's order: outermost first, the elements of a row last
    offset: int  # from the start of its file
    size_bytes: int
    part: int  # index into GGUFFile.parts

    def rows(self, name: str, first: int, count: int) -> "TensorInfo":
        """Some of its rows (of a stack of matrices: some matrices; of a vector: some numbers) under another name."""
        assert 0 <= first < first + count <= self.shape[0]
        each = self.size_bytes // self.shape[0]
        shape = (count, *self.shape[1:])
        return TensorInfo(name, self.type, shape, self.offset + first * each, count * each, self.part)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a model; the only one unless the model is split."""

    file: MappedFile
    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    tensors: list[TensorInfo]
    number: int  # from 0
    count: int


def read_part(path: Path, opened: ExitStack) -> Part:
    """Read one file; `opened` owns it from then on."""
    file = MappedFile(path)
    opened.callback(file.close)
    cursor = Cursor(file)
    version = _read_version(cursor)
    at = cursor.position
    tensor_count, pair_count = cursor.unpack(_COUNTS, "tensor count and metadata count")
    _check_count(cursor, "tensor count", at, tensor_count, MAX_TENSORS, _SMALLEST_TENSOR)
    _check_count(cursor, "metadata count", at + 8, pair_count, MAX_PAIRS, _SMALLEST_PAIR)
    metadata = read_metadata(cursor, pair_count)
    alignment = _integer(file, metadata, "general.alignment", DEFAULT_ALIGNMENT, 1, MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise file.error(f"metadata key general.alignment: {alignment:,} is not a power of two; {DAMAGED}")
    count = _integer(file, metadata, "split.count", 1, 0, MAX_PARTS) or 1  # 0 is how some programs say "not split"
    number = _integer(file, metadata, "split.no", 0, 0, count - 1)
    tensors = _read_tensors(cursor, tensor_count, alignment, number)
    return Part(file, version, alignment, metadata, tensors, number, count)


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.file.view(0, min(4, cursor.end)))
    if magic != _MAGIC:
        advice = _OTHER_MAGICS.get(magic, "give the path of a .gguf file")
        raise cursor.error("magic", f"not a GGUF file, it starts with {magic!r} and not with {_MAGIC!r}", advice=advice)
    version: int
    _, version = cursor.unpack(_START, "version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        problem, advice = f"big-endian (GGUF version {swapped}), only little-endian is read", "convert its byte order"
    elif version == 1:
        problem, advice = "GGUF version 1, only 2 and 3 are read", "fetch or convert the model anew"
    else:
        problem, advice = f"GGUF version {version:,}, only 2 and 3 are read", "a newer everwarm may know it"
    raise cursor.error("version", problem, at=4, advice=advice)


def _check_count(cursor: Cursor, field: str, at: int, count: int, most: int, item_bytes: int) -> None:
    room = (cursor.end - cursor.position) // item_bytes
    if count > min(most, room):
        limit = f"at most {most:,} are allowed" if most < room else f"the file has room for {room:,} at most"
        raise cursor.error(field, f"{count:,}, but {limit}", at=at)


def _integer(
    file: MappedFile, metadata: dict[str, MetadataValue], key: str, default: int, least: int, most: int
) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise file.error(f"metadata key {key}: a {type(value).__name__}, but it has to be an integer; {DAMAGED}")
    if not least <= value <= most:
        raise file.error(f"metadata key {key}: {value:,} is not between {least:,} and {most:,}; {DAMAGED}")
    return value


def _read_tensors(cursor: Cursor, count: int, alignment: int, part: int) -> list[TensorInfo]:
    entries = [_read_entry(cursor, f"tensor {index:,} of {count:,}", alignment) for index in range(count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = [
        TensorInfo(name, kind, shape, start + offset, kind.size_bytes(math.prod(shape)), part)
        for name, kind, shape, offset in entries
    ]
    _check_places(cursor.file, tensors)
    return tensors


def _read_entry(cursor: Cursor, field: str, alignment: int) -> tuple[str, TensorType, tuple[int, ...], int]:
    at = cursor.position
    name = cursor.name(field, MAX_TENSOR_NAME_BYTES)
    field = f"tensor {shown(name)}"
    (dimensions,) = cursor.unpack(_DIMENSIONS, field)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(field, f"{dimensions:,} dimensions, only 1 to {MAX_DIMENSIONS} are allowed", at=at)
    *reversed_shape, number, offset = cursor.unpack(_PLACES[dimensions], field)
    shape = tuple(reversed(reversed_shape))
    if 0 in shape:
        raise cursor.error(field, f"shape {shape} has a dimension of 0, at least 1 is needed", at=at)
    if math.prod(shape) > MAX_ELEMENTS:
        raise cursor.error(field, f"shape {shape} has more than {MAX_ELEMENTS:,} elements", at=at)
    try:
        kind = TensorType(number)
    except ValueError:
        problem = f"type {number:,} is unknown, the newest known is {max(TensorType)} ({max(TensorType).name})"
        raise cursor.error(field, problem, at=at, advice="fetch another quantisation, or a newer everwarm") from None
    if shape[-1] % kind.block_elements:
        problem = f"rows of {shape[-1]:,} elements are not whole blocks of {kind.name} ({kind.block_elements} elements)"
        raise cursor.error(field, problem, at=at)
    if offset % alignment:
        raise cursor.error(field, f"offset {offset:,} is not a multiple of general.alignment ({alignment:,})", at=at)
    return name, kind, shape, offset


def _check_places(file: MappedFile, tensors: list[TensorInfo]) -> None:
    if not tensors:
        return
    last = max(tensors, key=_end)
    excess = _end(last) - file.size_bytes
    if excess > 0:
        problem = f"{excess:,} bytes past the end of the file"
        sizes = f"file is truncated? expected {_end(last):,} bytes, found {file.size_bytes:,}"
        raise file.error(f"tensor {shown(last.name)} at byte {last.offset:,}: {problem} ({sizes}); fetch it again")
    for before, after in itertools.pairwise(sorted(tensors, key=lambda info: info.offset)):
        if _end(before) > after.offset:
            problem = f"overlaps tensor {shown(before.name)}, which ends at byte {_end(before):,}"
            raise file.error(f"tensor {shown(after.name)} at byte {after.offset:,}: {problem}; {DAMAGED}")


def _end(info: TensorInfo) -> int:
    return info.offset + info.size_bytes
