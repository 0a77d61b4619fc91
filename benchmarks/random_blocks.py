"""Random blocks of any quantised type, whose weights are of ordinary size."""

from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quant_shape_to_byte_shape

POOL = 2048  # different blocks that a tensor is drawn from


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], type_name: str) -> npt.NDArray[np.uint8]:
    """Blocks drawn from a pool of different ones."""
    kind = gguf.GGMLQuantizationType[type_name]
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    pool = _pool(type_name)
    drawn = pool[rng.integers(0, len(pool), int(np.prod(shape)) // elements)]
    return drawn.reshape(quant_shape_to_byte_shape(shape, kind))


@cache
def _pool(type_name: str) -> npt.NDArray[np.uint8]:
    """Random bytes, as far as their greatest weight is about that of a trained matrix: 0.02 to 0.1."""
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[type_name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    pool = np.empty((0, size), np.uint8)
    while len(pool) < POOL:
        candidates = rng.integers(0, 256, (16384, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            greatest = np.abs(dequantize(candidates, kind)).max(axis=-1)
        pool = np.concatenate([pool, candidates[(greatest > 0.02) & (greatest < 0.1)]])
    return pool
