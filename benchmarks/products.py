"""How fast the native kernels multiply by a matrix of each quantised type: one row (decode) and 512 rows (prefill).

Proves that a type of few bits is computed from its bits: bytes of the form against those of the file, GB/s of packed
weights read for one row beside a plain read of memory, GOPS for 512 rows beside what the processor's integer products
give. The matrices are random blocks; the types take turns, and the figures are medians. The matrices of one type are
together larger than the last-level cache.

    python benchmarks/products.py [TYPE ...] [--threads 2] [--rounds 5] [--rows 1,512]
"""

import argparse
import json
import statistics
import time

import numpy as np
import numpy.typing as npt
from random_blocks import random_blocks

from everwarm.kernels import _native
from everwarm.kernels.native import aligned_bytes, supported_isas
from everwarm.weights.types import TensorType

SHAPE = (2048, 8192)  # outputs, inputs: the widest matrix of a 1B llama
MEMORY_BYTES = 64 << 20


def main() -> None:
    quantised = [name for name, (elements, _) in _native.TENSOR_TYPES.items() if elements > 1]
    parser = argparse.ArgumentParser(description="Products by quantised matrices, type by type.")
    parser.add_argument("types", nargs="*", default=quantised)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="1,512")
    parser.add_argument("--isa", default=supported_isas()[0])
    options = parser.parse_args()

    engine = _native.Engine(options.isa, options.threads)
    counts = [int(count) for count in options.rows.split(",")]
    forms = {name: make_forms(engine, name) for name in options.types}
    seconds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in forms for count in counts}
    memory = np.ones(512 << 20, np.uint8)
    reads, peaks = [], []
    for _ in range(options.rounds):
        reads.append(engine.read_bandwidth(memory))
        peaks.append(engine.integer_peak())
        for name, count in seconds:
            seconds[name, count].append(measure(engine, forms[name], count))
    read, peak = statistics.median(reads), max(peaks)
    print(f"a plain read of memory: {read / 1e9:.1f} GB/s; integer products: {peak / 1e9:.0f} GOPS\n")
    print(f"{'type':8} {'bits':>6} {'form/file':>9}" + "".join(f"{f'{count} rows':>24}" for count in counts))
    report = {}
    for name, of_type in forms.items():
        element_bytes = TensorType[name].block_bytes / TensorType[name].block_elements
        ratio = of_type[0].size_bytes / (SHAPE[0] * SHAPE[1] * element_bytes)
        line, report[name] = f"{name:8} {element_bytes * 8:6.2f} {ratio:9.3f}", {"form/file": round(ratio, 3)}
        for count in counts:
            took = statistics.median(seconds[name, count])
            bytes_s, ops_s = of_type[0].size_bytes / took, 2 * count * SHAPE[0] * SHAPE[1] / took
            line += f"{bytes_s / 1e9:7.1f} GB/s{ops_s / 1e9:8.0f} GOPS"
            report[name][str(count)] = {"GB/s": round(bytes_s / 1e9, 2), "GOPS": round(ops_s / 1e9, 1)}
        print(line, flush=True)
    print(
        json.dumps({"benchmark": "products", "read": round(read / 1e9, 1), "peak": round(peak / 1e9), "types": report})
    )


def make_forms(engine: _native.Engine, name: str) -> list[_native.Form]:
    """As many matrices as no cache holds, of the same blocks."""
    blocks = random_blocks(np.random.default_rng(0), SHAPE, name).reshape(-1)
    first = _native.Form(name, *SHAPE)
    packed = aligned_bytes(first.size_bytes)
    engine.pack(first, blocks, packed)
    forms = []
    for _ in range(max(1, MEMORY_BYTES // first.size_bytes)):
        form, memory = _native.Form(name, *SHAPE), aligned_bytes(first.size_bytes)
        memory[:] = packed
        form.attach(memory)
        forms.append(form)
    return forms


def measure(engine: _native.Engine, forms: list[_native.Form], count: int) -> float:
    """Seconds of one product."""
    values: npt.NDArray[np.float32] = np.random.default_rng(1).standard_normal((count, SHAPE[1]), np.float32)
    x, out = _native.Rows(SHAPE[1]), _native.Rows(SHAPE[0])
    x.set(values)
    engine.quantise(x)
    some = forms if count < 64 else forms[:1]
    started = time.perf_counter()
    for form in some:
        engine.linear(x, [form], [None], [out], False)
    return (time.perf_counter() - started) / len(some)


if __name__ == "__main__":
    main()
