"""Files of the agent store: safetensors with a checksum over all of it.

    8 bytes      length of the header
    header       JSON, padded with spaces to a multiple of 4,096 (with the length). It begins with
                 {"__metadata__":{"checksum":"<32 hex digits>", so that the checksum has a fixed place
    data         the tensors, one after the other

The checksum (xxh3-128) covers the header, its own digits read as zeros, and the data.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from everwarm.errors import StoreError

ALIGNMENT = 4096
_BEGIN = b'{"__metadata__":{"checksum":"'
_AT = 8 + len(_BEGIN)
_ZEROS = b"0" * 32
_MOST_HEADER = 1 << 20
_MOST_DIMENSIONS = 8
Array = npt.NDArray[Any]
Part = bytes | Array
_TYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype(np.uint8), "U32": np.dtype("<u4")}


class VersionError(StoreError):
    """A file of another version of its format: a miss with this reason; it is left where it is."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    type: str  # U8 or U32
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(_TYPES[self.type].itemsize)


def blank_header(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> bytes:
    """The header with zeros for a checksum."""
    said: dict[str, object] = {"__metadata__": {"checksum": _ZEROS.decode(), **metadata}}
    end = 0
    for tensor in tensors:
        said[tensor.name] = {
            "dtype": tensor.type,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size_bytes],
        }
        end += tensor.size_bytes
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=True).encode()
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def checksum(blank: bytes, data: Sequence[Array]) -> bytes:
    """32 hex digits."""
    digest = xxhash.xxh3_128(blank)
    for part in data:
        digest.update(part.data)
    return digest.hexdigest().encode()


def with_checksum(blank: bytes, digits: bytes) -> bytes:
    return blank[:_AT] + digits + blank[_AT + 32 :]


def split_checksum(header: bytes) -> tuple[bytes, bytes]:
    """A header with zeros in place of its checksum, and the checksum."""
    return with_checksum(header, _ZEROS), header[_AT : _AT + 32]


def encode(metadata: Mapping[str, str], tensors: Sequence[tuple[Tensor, Array]]) -> list[Part]:
    """The parts of a file, to be written one after the other."""
    blank = blank_header(metadata, [tensor for tensor, _ in tensors])
    data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for _, array in tensors]
    return [with_checksum(blank, checksum(blank, data)), *data]


def read_metadata(header: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a header says; the caller has checked nothing yet. Raises StoreError."""
    try:
        if not header[8:].startswith(_BEGIN):
            raise ValueError("it does not begin as ours do")
        said = json.loads(header[8:])
        metadata = said.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that are not texts")
        tensors, end = {}, 0
        for name, entry in said.items():
            if len(entry["shape"]) > _MOST_DIMENSIONS:
                raise ValueError(f"tensor {name} has {len(entry['shape'])} dimensions")
            tensor = Tensor(name, entry["dtype"], tuple(int(n) for n in entry["shape"]))
            if min(tensor.shape, default=0) < 0 or entry["data_offsets"] != [end, end + tensor.size_bytes]:
                raise ValueError(f"tensor {name} lies where it should not")
            end += tensor.size_bytes
            tensors[name] = tensor
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(f"the header can't be read: {error}") from None
    return metadata, tensors


def check_version(metadata: Mapping[str, str], format_name: str, version: str) -> None:
    """Raises StoreError if it is another kind of file, VersionError if it is another version of this kind."""
    if metadata.get("format") != format_name:
        raise StoreError(f"format is {str(metadata.get('format'))[:80]!r}, expected {format_name!r}")
    if "version" not in metadata:
        raise StoreError(f"a file of the format {format_name} without a version")
    if metadata["version"] != version:
        said = metadata["version"][:20]
        raise VersionError(f"version {said!r} of the format {format_name}, this everwarm reads {version}")


def header_length(first: bytes, size: int) -> int:
    """Bytes of the header and its length, from a file's first 8 bytes and its size. Raises StoreError."""
    length = int.from_bytes(first[:8], "little") + 8
    if len(first) < 8 or length % ALIGNMENT or not ALIGNMENT <= length <= min(_MOST_HEADER, size):
        raise StoreError(f"a header of {length:,} bytes in a file of {size:,}")
    return length


def decode(file: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    """Metadata and tensors of a whole file. Raises StoreError unless every byte is as it was written."""
    length = header_length(file, len(file))
    blank, digits = split_checksum(file[:length])
    data = np.frombuffer(file, np.uint8, offset=length)
    if checksum(blank, [data]) != digits:
        raise StoreError("checksum: it is not as it was written")
    metadata, tensors = read_metadata(blank)
    if sum(tensor.size_bytes for tensor in tensors.values()) != len(data):
        raise StoreError(f"{len(data):,} bytes of data, the header says otherwise")
    arrays, end = {}, 0
    for name, tensor in tensors.items():
        arrays[name] = data[end : end + tensor.size_bytes].view(_TYPES[tensor.type]).reshape(tensor.shape)
        end += tensor.size_bytes
    return metadata, arrays
