"""Block formats whose weights come from a table: the IQ formats (grids) and the 4-bit floats MXFP4 and NVFP4.

Same contract as `dequant_linear`: a record layout and a decoding function per type, float operations in an order that
yields the same bits as the gguf package's. Signs go on the integers before scaling, which rounds symmetrically.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from everwarm.weights.dequant import codebooks
from everwarm.weights.dequant.unpack import (
    Blocks,
    Floats,
    block_format,
    f32,
    fields,
    flat_bytes,
    lookup,
    scale,
    spread,
    sub_scales,
)
from everwarm.weights.types import TensorType


def _signed(magnitudes: npt.NDArray[Any], masks: npt.NDArray[np.uint64]) -> npt.NDArray[np.int8]:
    """Negated where the mask's byte is 0xFF = -1: x ^ -1 = -x - 1."""
    minus = masks.reshape(-1).view(np.int8)
    return (magnitudes.reshape(-1).view(np.int8) ^ minus) - minus


def _joined(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Grid indices from their low bytes and the bits above them."""
    indices = high.reshape(-1).astype(np.uint16)
    indices <<= 8
    indices |= flat_bytes(low)
    return indices


def _nibbles(field: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return fields(flat_bytes(field), bits=4, count=2)


def _half_steps(blocks: Blocks, scales: npt.NDArray[Any], factor: float) -> Floats:
    return sub_scales(blocks["d"], scales.astype(np.float32) + np.float32(0.5)) * np.float32(factor)


def _iq2_xxs(blocks: Blocks, out: Floats) -> None:
    words = blocks["qs"].copy()  # (blocks, 8, 2): four grid indices, then four times 7 signs and a 4-bit scale
    signs_and_scale = np.ascontiguousarray(words[..., 1])
    grid = np.take(codebooks.IQ2_XXS_GRID, np.ascontiguousarray(words[..., 0]).view(np.uint8))
    signs = np.take(codebooks.EVEN_SIGN_MASKS, fields(signs_and_scale, bits=7, count=4))
    scale(out, _signed(grid, signs), _half_steps(blocks, signs_and_scale >> 28, 0.25))


def _iq2_xs(blocks: Blocks, out: Floats) -> None:
    indices = blocks["qs"].copy()  # (blocks, 32): 9 bits of grid index, 7 of signs
    grid = np.take(codebooks.IQ2_XS_GRID, indices & 511)
    signs = np.take(codebooks.EVEN_SIGN_MASKS, indices >> 9)
    scale(out, _signed(grid, signs), _half_steps(blocks, _nibbles(blocks["scales"]), 0.25))


def _iq2_s(blocks: Blocks, out: Floats) -> None:
    high = fields(flat_bytes(blocks["qh"]), bits=2, count=4)
    grid = np.take(codebooks.IQ2_S_GRID, _joined(blocks["qs"], high))
    signs = np.take(codebooks.SIGN_MASKS, flat_bytes(blocks["signs"]))
    scale(out, _signed(grid, signs), _half_steps(blocks, _nibbles(blocks["scales"]), 0.25))


def _iq3_xxs(blocks: Blocks, out: Floats) -> None:
    signs_and_scale = blocks["signs"].copy()
    grid = np.take(codebooks.IQ3_XXS_GRID, flat_bytes(blocks["qs"]))
    signs = np.take(codebooks.EVEN_SIGN_MASKS, fields(signs_and_scale, bits=7, count=4))
    scale(out, _signed(grid, signs), _half_steps(blocks, signs_and_scale >> 28, 0.5))


def _iq3_s(blocks: Blocks, out: Floats) -> None:
    high = fields(flat_bytes(blocks["qh"]), bits=1, count=8)
    grid = np.take(codebooks.IQ3_S_GRID, _joined(blocks["qs"], high))
    signs = np.take(codebooks.SIGN_MASKS, flat_bytes(blocks["signs"]))
    scale(out, _signed(grid, signs), sub_scales(blocks["d"], _nibbles(blocks["scales"]) * 2 + 1))


def _iq1_s(blocks: Blocks, out: Floats) -> None:
    high = blocks["qh"].copy()  # (blocks, 8): four times 3 bits of grid index, a 3-bit scale, the sign of the shift
    above = fields(high, bits=3, count=4)
    above |= (high >> 15 << 3)[..., None]
    _shifted_rows(out, _joined(blocks["qs"], above), sub_scales(blocks["d"], (high >> 12 & 7) * 2 + 1))


def _iq1_m(blocks: Blocks, out: Floats) -> None:
    words = blocks["scales"].copy()  # (blocks, 4): four 3-bit scales and a nibble of the block's float16
    nibbles = words >> 12
    bits = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    above = _nibbles(blocks["qh"])  # 3 bits of grid index, the sign of the shift
    scales = sub_scales(bits.view("<f2"), fields(words, bits=3, count=4) * 2 + 1)
    _shifted_rows(out, _joined(blocks["qs"], above), scales)


def _shifted_rows(out: Floats, indices: npt.NDArray[np.uint16], scales: Floats) -> None:
    # mode="clip" writes straight into `out`; every 12-bit index is in range.
    np.take(codebooks.IQ1_ROWS, indices, axis=0, out=out.reshape(-1, 8), mode="clip")
    out *= spread(scales, out)


def _by_nibble(levels: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What each byte's low nibble stands for, and its high nibble."""
    return bytes(levels[byte & 15] % 256 for byte in range(256)), bytes(levels[byte >> 4] % 256 for byte in range(256))


_IQ4 = _by_nibble(codebooks.IQ4_LEVELS)
_FP4 = _by_nibble(codebooks.FP4_LEVELS)


def _iq4_nl(blocks: Blocks, out: Floats) -> None:
    scale(out, lookup(blocks["qs"], _IQ4, run=16), f32(blocks["d"]))


def _iq4_xs(blocks: Blocks, out: Floats) -> None:
    scales = fields(blocks["scales_h"].copy(), bits=2, count=8).astype(np.uint8) << 4
    scales |= _nibbles(blocks["scales_l"]).reshape(-1, 8)
    scale(out, lookup(blocks["qs"], _IQ4, run=16), sub_scales(blocks["d"], scales.view(np.int8) - np.int8(32)))


# Half of each 8-bit exponent's power of two, since FP4_LEVELS are doubled; the two smallest are denormal.
_E8M0_HALF = np.array([0x00200000 << x if x < 2 else (x - 1) << 23 for x in range(256)], np.uint32).view(np.float32)


def _mxfp4(blocks: Blocks, out: Floats) -> None:
    scale(out, lookup(blocks["qs"], _FP4, run=16), np.take(_E8M0_HALF, blocks["e"]))


def _ue4m3_half(byte: int) -> float:
    """Half of an unsigned 4-bit exponent, 3-bit mantissa float; ggml ignores the top bit and reads 0x7F (NaN) as 0."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte == 0x7F:
        return 0.0
    return mantissa * 2.0**-10 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 11)


_UE4M3_HALF = np.array([_ue4m3_half(byte) for byte in range(256)], np.float32)


def _nvfp4(blocks: Blocks, out: Floats) -> None:
    scale(out, lookup(blocks["qs"], _FP4, run=8), np.take(_UE4M3_HALF, flat_bytes(blocks["d"])))


CODEBOOK = {
    TensorType.IQ1_S: block_format(_iq1_s, d="<f2", qs="V32", qh="8<u2"),
    TensorType.IQ1_M: block_format(_iq1_m, qs="V32", qh="V16", scales="4<u2"),
    TensorType.IQ2_XXS: block_format(_iq2_xxs, d="<f2", qs="(8,2)<u4"),
    TensorType.IQ2_XS: block_format(_iq2_xs, d="<f2", qs="32<u2", scales="V8"),
    TensorType.IQ2_S: block_format(_iq2_s, d="<f2", qs="V32", signs="V32", qh="V8", scales="V8"),
    TensorType.IQ3_XXS: block_format(_iq3_xxs, d="<f2", qs="V64", signs="8<u4"),
    TensorType.IQ3_S: block_format(_iq3_s, d="<f2", qs="V64", qh="V8", signs="V32", scales="V4"),
    TensorType.IQ4_NL: block_format(_iq4_nl, d="<f2", qs="V16"),
    TensorType.IQ4_XS: block_format(_iq4_xs, d="<f2", scales_h="<u2", scales_l="V4", qs="V128"),
    TensorType.MXFP4: block_format(_mxfp4, e="u1", qs="V16"),
    TensorType.NVFP4: block_format(_nvfp4, d="V4", qs="V32"),
}
