"""Raw tensor bytes in, float32 weights out, for every tensor type that ggml can store weights in.

The result is bit-equal to `gguf.quants.dequantize` (NaNs and infinities included), which makes this the oracle that all
kernels are tested against. It works through a tensor in chunks, so that the temporaries of one chunk stay in cache.
"""

import math

import numpy as np
import numpy.typing as npt

from everwarm.errors import ModelError
from everwarm.weights.dequant.codebook import CODEBOOK
from everwarm.weights.dequant.linear import LINEAR
from everwarm.weights.types import TensorType

_FORMATS = LINEAR | CODEBOOK

SUPPORTED: frozenset[TensorType] = frozenset({TensorType.F32, *_FORMATS})

_CHUNK_ELEMENTS = 1 << 18  # 1 MiB of output


def dequantize(
    data: npt.NDArray[np.uint8],
    type: TensorType,  # noqa: A002
    shape: tuple[int, ...],
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """Raw bytes (uint8, 1-D) of a tensor -> float32 array of `shape` (NumPy order, outermost first), in `out` (1-D).

    Without `out`, F32 comes back read-only: a view of `data` where alignment allows, so that the file is not copied.
    """
    _check(data, type, shape)
    data = np.ascontiguousarray(data)
    if type is TensorType.F32:
        if out is None:
            return _as_f32(data).reshape(shape)
        out[:] = _as_f32(data)
        return out.reshape(shape)
    decode = _FORMATS[type].decode
    blocks = data.view(_FORMATS[type].layout)
    if out is None:
        out = np.empty(math.prod(shape), np.float32)
    step = max(1, _CHUNK_ELEMENTS // type.block_elements)
    with np.errstate(over="ignore", invalid="ignore"):  # scales in a file may be anything
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step]
            first = start * type.block_elements
            decode(chunk, out[first : first + len(chunk) * type.block_elements])
    return out.reshape(shape)


def _check(data: npt.NDArray[np.uint8], type: TensorType, shape: tuple[int, ...]) -> None:  # noqa: A002
    assert data.dtype == np.uint8
    assert data.ndim == 1
    if type not in SUPPORTED:
        known = ", ".join(sorted(t.name for t in SUPPORTED))
        raise ModelError(f"tensor type {type.name} can't be converted to float32; use a file with one of {known}")
    row = shape[-1] if shape else 1
    if row % type.block_elements:
        raise ModelError(
            f"{type.name} tensor of shape {shape}: rows of {row:,} elements are not made of whole blocks "
            f"(expected a multiple of {type.block_elements})"
        )
    expected = math.prod(shape) // type.block_elements * type.block_bytes
    if data.size != expected:
        raise ModelError(f"{type.name} tensor of shape {shape}: expected {expected:,} bytes, found {data.size:,}")


def _as_f32(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    floats = data.view("<f4")
    if not floats.flags.aligned:
        floats = floats.copy()
    floats.setflags(write=False)
    return floats
