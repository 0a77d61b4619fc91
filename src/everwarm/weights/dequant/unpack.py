"""Moves that all block formats share: pull small integers out of packed bytes, and scale them into float32.

Blocks come in as a 1-D record array (one record per block, members named as in ggml), integers go out as one flat array
in the order of the tensor's elements. Bit fields are cut out of 64-bit words and moved as whole runs of bytes (void
items): the obvious broadcast over (blocks, fields, bytes) pays NumPy's cost of an inner loop for every 16 or 32 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.void]  # (blocks,) records
Floats = npt.NDArray[np.float32]  # (blocks * elements per block,)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BlockFormat:
    """How one tensor type lies in memory, and the function that decodes blocks of it into a flat float32 array."""

    layout: np.dtype[np.void]
    decode: Callable[[Blocks, Floats], None]


def block_format(decode: Callable[[Blocks, Floats], None], **members: str) -> BlockFormat:
    """Members in memory order, without padding; runs of packed bytes are void items such as V16."""
    return BlockFormat(np.dtype(list(members.items())), decode)


def planes(field: npt.NDArray[Any], bits: int, run: int, at: int = 0) -> Bytes:
    """Bit fields where each run of bytes holds all its lowest fields first, then all its second lowest, and so on.

    That is how ggml packs quants: byte j of a run of 16 with 4-bit fields holds elements j and j + 16. The result has
    one byte per field, shifted left by `at` so that two results can be joined with `|`.
    """
    words: npt.NDArray[Any] = field.copy().view(np.uint64 if field.itemsize % 8 == 0 else np.uint32)
    mask = words.dtype.type(int.from_bytes(bytes([(1 << bits) - 1]) * words.itemsize))
    out = np.empty((words.nbytes // run, 8 // bits), f"V{run}")
    for k in range(8 // bits):
        plane = words >> (bits * k)
        plane &= mask
        plane <<= at
        out[:, k] = plane.view(f"V{run}")
    return out.view(np.uint8).reshape(-1)


def fields(values: npt.NDArray[Any], bits: int, count: int) -> npt.NDArray[Any]:
    """The `count` lowest bit fields of every integer, lowest first: (...,) -> (..., count)."""
    out = np.empty((*values.shape, count), values.dtype)
    for k in range(count):
        out[..., k] = values >> (bits * k)
    out &= (1 << bits) - 1
    return out


def lookup(field: npt.NDArray[Any], tables: tuple[bytes, ...], run: int) -> npt.NDArray[np.int8]:
    """Like `planes`, but what byte b holds for plane k is `tables[k][b]`, a signed byte.

    bytes.translate is faster than np.take, which widens every index to 64 bits first.
    """
    packed = field.tobytes()
    out = np.empty((len(packed) // run, len(tables)), f"V{run}")
    for k, table in enumerate(tables):
        out[:, k] = np.frombuffer(packed.translate(table), f"V{run}")
    return out.view(np.int8).reshape(-1)


# For each byte, one word that holds its eight bits as bytes 0 or 1, lowest bit first.
BYTE_BITS = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").view(np.uint64)


def flat_bytes(field: npt.NDArray[Any]) -> Bytes:
    return field.copy().view(np.uint8).reshape(-1)


def f32(half: npt.NDArray[Any]) -> Floats:
    return half.astype(np.float32)


def spread(scales: Floats, out: Floats) -> Floats:
    """Each scale repeated over the elements that it covers; faster than broadcasting over runs of 16 or 32."""
    return np.repeat(scales.reshape(-1), out.size // scales.size)


def scale(out: Floats, integers: npt.NDArray[Any], scales: Floats) -> None:
    """out = integers * scales, each scale covering an equal run of elements."""
    out[:] = integers
    out *= spread(scales, out)


def sub_scales(halves: npt.NDArray[Any], factors: npt.NDArray[Any]) -> Floats:
    """The scale of each super-block times the factors of its sub-blocks, flat."""
    product = np.empty(factors.size, np.float32)
    scale(product, factors.reshape(-1), f32(halves))
    return product
