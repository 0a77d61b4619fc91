"""How fast raw blocks become float32, per tensor type: ours against the gguf package, in GB/s of float32 output.

Proves that building the float32 weights of the reference backend is not slower than the package we test against. Both
decode the same blocks (random quants, sane scales) into fresh memory, on one thread, best of several runs. The ceiling
is what this machine needs to allocate and fill that memory; F32 is a view in both and is left out.

    python benchmarks/dequant.py [TYPE ...]
"""

import json
import sys
import time
from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

from everwarm.weights.dequant.dequant import SUPPORTED, dequantize
from everwarm.weights.types import TensorType

SHAPE = (2048, 4096)
OUTPUT_BYTES = SHAPE[0] * SHAPE[1] * 4


def speed(work: Callable[[], object], runs: int) -> float:
    """GB/s of output, from the fastest run."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return OUTPUT_BYTES / min(seconds) / 1e9


def random_rows(tensor_type: TensorType) -> npt.NDArray[np.uint8]:
    """Random bytes without 0x7C-0x7F and 0xFC-0xFF: a float16 with such a high byte is not finite."""
    row_bytes = SHAPE[1] // tensor_type.block_elements * tensor_type.block_bytes
    rows = np.random.default_rng(0).integers(0, 256, (SHAPE[0], row_bytes), dtype=np.uint8)
    rows[rows & 0x7C == 0x7C] ^= 0x40
    return rows


def measure(tensor_type: TensorType) -> tuple[float, float]:
    rows = random_rows(tensor_type)
    flat, qtype = rows.reshape(-1), gguf.GGMLQuantizationType[tensor_type.name]
    with np.errstate(all="ignore"):
        theirs = speed(lambda: gguf.quants.dequantize(rows, qtype), runs=3)
    return speed(lambda: dequantize(flat, tensor_type, SHAPE), runs=7), theirs


def main(names: list[str]) -> None:
    types = [TensorType[name] for name in names] or sorted(SUPPORTED - {TensorType.F32})
    ceiling = speed(lambda: np.empty(SHAPE, np.float32).fill(1.0), runs=7)
    print(f"ceiling (allocate and fill): {ceiling:.2f} GB/s\n")
    print(f"{'type':8} {'everwarm':>9} {'gguf':>6} {'ratio':>6}   GB/s of float32")
    speeds = {}
    for tensor_type in types:
        ours, theirs = measure(tensor_type)
        speeds[tensor_type.name] = {"everwarm": round(ours, 2), "gguf": round(theirs, 2)}
        print(f"{tensor_type.name:8} {ours:9.2f} {theirs:6.2f} {ours / theirs:5.1f}x", flush=True)
    print(json.dumps({"benchmark": "dequant", "unit": "GB/s", "ceiling": round(ceiling, 2), "types": speeds}))


if __name__ == "__main__":
    main(sys.argv[1:])
