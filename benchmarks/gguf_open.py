"""Open a GGUF file: ours beside the gguf package's `GGUFReader`, on the same file in the same process.

Proves that opening a model costs milliseconds whatever its vocabulary: both readers end with all metadata found and all
tensors located and none read. The ratio is large because the package makes NumPy views of every item of every array;
ours leaves arrays where they are, so the time to decode the vocabulary, paid once by whoever reads it, stands in a row
of its own. The file is in the page cache after the first round, which is not counted. The ceiling is a plain read of
the header's bytes.

    python benchmarks/gguf_open.py MODEL.gguf [--rounds 20]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf

from everwarm.weights.gguf.file import GGUFFile, StringArray


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to open a GGUF file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    model, rounds = options.model, options.rounds

    with GGUFFile(model) as file:
        header_bytes = min((info.offset for info in file.tensors.values()), default=file.size_bytes)
        tokens = len(vocabulary(file))
        tensors = len(file.tensors)
    ceiling = milliseconds(lambda: read_header(model, header_bytes), rounds)
    ours = milliseconds(lambda: GGUFFile(model).close(), rounds)
    with_vocabulary = milliseconds(lambda: open_and_decode(model), rounds)
    package = milliseconds(lambda: gguf.GGUFReader(model), max(3, rounds // 4))

    print(f"{model.name}: {tensors:,} tensors, {tokens:,} tokens, header of {header_bytes:,} bytes")
    print(f"{'':34}{'median ms':>12}{'min':>10}{'max':>10}")
    for name, times in {
        "ceiling: read the header": ceiling,
        "everwarm": ours,
        "everwarm, vocabulary decoded": with_vocabulary,
        "gguf package": package,
    }.items():
        print(f"{name:34}{statistics.median(times):12.2f}{min(times):10.2f}{max(times):10.2f}")
    result = {
        "benchmark": "gguf_open",
        "model": model.name,
        "tensors": tensors,
        "tokens": tokens,
        "ceiling_ms": round(statistics.median(ceiling), 3),
        "everwarm_ms": round(statistics.median(ours), 3),
        "everwarm_with_vocabulary_ms": round(statistics.median(with_vocabulary), 3),
        "gguf_package_ms": round(statistics.median(package), 3),
        "times_faster": round(statistics.median(package) / statistics.median(ours), 1),
    }
    print(json.dumps(result))


def milliseconds(work: Callable[[], object], rounds: int) -> list[float]:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def read_header(model: Path, header_bytes: int) -> bytes:
    with model.open("rb", buffering=0) as file:
        return file.read(header_bytes)


def open_and_decode(model: Path) -> list[object]:
    with GGUFFile(model) as file:
        return list(vocabulary(file))


def vocabulary(file: GGUFFile) -> Sequence[object]:
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    return tokens if isinstance(tokens, StringArray) else ()


if __name__ == "__main__":
    main()
