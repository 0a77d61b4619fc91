"""Block formats whose weights are evenly spaced: weight = scale * integer, or scale * integer - minimum.

F16 and BF16, the legacy quants (Q4_0 ... Q8_0), the K quants and the ternary ones. Each format is a record layout (the
struct `block_*` in ggml's `ggml-common.h`) and a function that decodes records into a flat float32 array. The order of
the float operations is that of the gguf package, so that results are equal to the last bit.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from everwarm.weights.dequant.unpack import (
    BYTE_BITS,
    Blocks,
    Bytes,
    Floats,
    block_format,
    f32,
    flat_bytes,
    lookup,
    planes,
    scale,
    spread,
    sub_scales,
)
from everwarm.weights.types import TensorType

_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _f16(blocks: Blocks, out: Floats) -> None:
    # Twice as fast as astype, which converts bit by bit; mode="clip" writes straight into `out`.
    np.take(_HALVES, blocks["bits"], out=out, mode="clip")


def _bf16(blocks: Blocks, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[:] = blocks["bits"]
    bits <<= np.uint32(16)


def _centred(quants: Bytes, zero: int) -> npt.NDArray[np.int8]:
    return quants.view(np.int8) - np.int8(zero)


def _q4_0(blocks: Blocks, out: Floats) -> None:
    scale(out, _centred(planes(blocks["qs"], bits=4, run=16), 8), f32(blocks["d"]))


def _q4_1(blocks: Blocks, out: Floats) -> None:
    scale(out, planes(blocks["qs"], bits=4, run=16), f32(blocks["d"]))
    out += spread(f32(blocks["m"]), out)


def _five_bits(blocks: Blocks) -> Bytes:
    quants = planes(blocks["qs"], bits=4, run=16)
    quants |= np.take(BYTE_BITS << 4, flat_bytes(blocks["qh"])).view(np.uint8)
    return quants


def _q5_0(blocks: Blocks, out: Floats) -> None:
    scale(out, _centred(_five_bits(blocks), 16), f32(blocks["d"]))


def _q5_1(blocks: Blocks, out: Floats) -> None:
    scale(out, _five_bits(blocks), f32(blocks["d"]))
    out += spread(f32(blocks["m"]), out)


def _q8_0(blocks: Blocks, out: Floats) -> None:
    scale(out, flat_bytes(blocks["qs"]).view(np.int8), f32(blocks["d"]))


def _q2_k(blocks: Blocks, out: Floats) -> None:
    scales = flat_bytes(blocks["scales"])  # a byte holds a scale, and a minimum in its high nibble
    scale(out, planes(blocks["qs"], bits=2, run=32), sub_scales(blocks["d"], scales & 15))
    out -= spread(sub_scales(blocks["dmin"], scales >> 4), out)


def _q3_k(blocks: Blocks, out: Floats) -> None:
    scales = planes(blocks["scales_l"], bits=4, run=8)
    scales |= planes(blocks["scales_h"], bits=2, run=4, at=4)
    quants = planes(blocks["qs"], bits=2, run=32)
    quants |= planes(blocks["hmask"], bits=1, run=32, at=2)  # a set bit means that 4 is *not* subtracted
    scale(out, _centred(quants, 4), sub_scales(blocks["d"], _centred(scales, 32)))


def _six_bits(scales: npt.NDArray[Any]) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 minimums of Q4_K and Q5_K, six bits each: (blocks, 3) words -> (blocks * 8,) each.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minimums 0-3; the top two bits of both are those of number 4-7, whose low
    nibbles share bytes 8-11.
    """
    low_scales, low_minimums, high = np.ascontiguousarray(scales.T)
    unpacked = np.empty((2, len(scales), 2), np.uint32)
    for i, (low, nibbles) in enumerate(((low_scales, high), (low_minimums, high >> 4))):
        unpacked[i, :, 0] = low & 0x3F3F3F3F
        unpacked[i, :, 1] = (nibbles & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)
    return unpacked[0].view(np.uint8).reshape(-1), unpacked[1].view(np.uint8).reshape(-1)


def _q4_k(blocks: Blocks, out: Floats) -> None:
    scales, minimums = _six_bits(blocks["scales"])
    scale(out, planes(blocks["qs"], bits=4, run=32), sub_scales(blocks["d"], scales))
    out -= spread(sub_scales(blocks["dmin"], minimums), out)


def _q5_k(blocks: Blocks, out: Floats) -> None:
    scales, minimums = _six_bits(blocks["scales"])
    quants = planes(blocks["qs"], bits=4, run=32)
    quants |= planes(blocks["qh"], bits=1, run=32, at=4)
    scale(out, quants, sub_scales(blocks["d"], scales))
    out -= spread(sub_scales(blocks["dmin"], minimums), out)


def _q6_k(blocks: Blocks, out: Floats) -> None:
    quants = planes(blocks["ql"], bits=4, run=64)
    quants |= planes(blocks["qh"], bits=2, run=32, at=4)
    scale(out, _centred(quants, 32), sub_scales(blocks["d"], flat_bytes(blocks["scales"]).view(np.int8)))


# A byte of TQ1_0 is a fraction of 256 in base 3: digit k is the integer part after multiplying k + 1 times by 3.
_TRITS = tuple(bytes(((byte * 3**k % 256 * 3 >> 8) - 1) % 256 for byte in range(256)) for k in range(5))


def _tq1_0(blocks: Blocks, out: Floats) -> None:
    trits = np.empty((len(blocks), 256), np.int8)
    trits[:, :160] = lookup(blocks["qs32"], _TRITS, run=32).reshape(-1, 160)
    trits[:, 160:240] = lookup(blocks["qs16"], _TRITS, run=16).reshape(-1, 80)
    trits[:, 240:] = lookup(blocks["qh"], _TRITS[:4], run=4).reshape(-1, 16)
    scale(out, trits.reshape(-1), f32(blocks["d"]))


def _tq2_0(blocks: Blocks, out: Floats) -> None:
    scale(out, _centred(planes(blocks["qs"], bits=2, run=32), 1), f32(blocks["d"]))


LINEAR = {
    TensorType.F16: block_format(_f16, bits="<u2"),
    TensorType.BF16: block_format(_bf16, bits="<u2"),
    TensorType.Q4_0: block_format(_q4_0, d="<f2", qs="V16"),
    TensorType.Q4_1: block_format(_q4_1, d="<f2", m="<f2", qs="V16"),
    TensorType.Q5_0: block_format(_q5_0, d="<f2", qh="V4", qs="V16"),
    TensorType.Q5_1: block_format(_q5_1, d="<f2", m="<f2", qh="V4", qs="V16"),
    TensorType.Q8_0: block_format(_q8_0, d="<f2", qs="V32"),
    TensorType.Q2_K: block_format(_q2_k, scales="V16", qs="V64", d="<f2", dmin="<f2"),
    TensorType.Q3_K: block_format(_q3_k, hmask="V32", qs="V64", scales_l="V8", scales_h="V4", d="<f2"),
    TensorType.Q4_K: block_format(_q4_k, d="<f2", dmin="<f2", scales="3<u4", qs="V128"),
    TensorType.Q5_K: block_format(_q5_k, d="<f2", dmin="<f2", scales="3<u4", qh="V32", qs="V128"),
    TensorType.Q6_K: block_format(_q6_k, ql="V128", qh="V64", scales="V16", d="<f2"),
    TensorType.TQ1_0: block_format(_tq1_0, qs32="V32", qs16="V16", qh="V4", d="<f2"),
    TensorType.TQ2_0: block_format(_tq2_0, qs="V64", d="<f2"),
}
