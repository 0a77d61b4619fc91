"""Tokens per second of CPU time on one thread, everwarm beside llama.cpp's `llama-bench`, in turns.

Proves how fast prefill and decode compute where other programs take the cores: time in which somebody else runs is not
counted. Memory is still shared, so decode of large models suffers from neighbours; `everwarm bench speed` on a quiet
machine is the better figure. llama-bench's loading is taken out by subtracting a short run from a long one. Medians.

    EVERWARM_LLAMA_BENCH=PATH python benchmarks/cpu_time.py MODEL.gguf ... [--rounds 3]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import time
from contextlib import closing
from pathlib import Path

import everwarm
from everwarm.llm import LLM
from everwarm.model.transformer import Span

PREFILL, DECODE, SHORT = 256, 16, 32
BENCH = os.environ.get("EVERWARM_LLAMA_BENCH", ".venv-peers/bin/llama-bench")


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of CPU time, one thread.")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    report = {}
    for path in options.models:
        series: dict[str, list[float]] = {"prefill": [], "llama prefill": [], "decode": [], "llama decode": []}
        with everwarm.load(path, threads=1) as llm:
            llm.weights.preload()
            for _ in range(options.rounds):
                series["prefill"].append(PREFILL / prefill_seconds(llm))
                series["decode"].append(DECODE / decode_seconds(llm))
                long, short = peer_seconds(path, "-p", PREFILL + SHORT), peer_seconds(path, "-p", SHORT)
                series["llama prefill"].append(PREFILL / (long - short))
                long, short = peer_seconds(path, "-n", DECODE + 2), peer_seconds(path, "-n", 2)
                series["llama decode"].append(DECODE / (long - short))
        found = {name: round(statistics.median(values), 1) for name, values in series.items()}
        report[path.name] = found
        ratios = [f"{work} {found[work] / found[f'llama {work}']:.2f} x" for work in ("prefill", "decode")]
        print(f"{path.name}: {found}, {', '.join(ratios)}", flush=True)
    print(json.dumps({"benchmark": "cpu_time", "unit": "tokens per second of CPU time", "models": report}))


def prefill_seconds(llm: LLM) -> float:
    ids = token_ids(llm)
    with closing(llm.new_kv()) as kv:
        llm.model.forward([Span(ids[:8], kv, 8)])
    with closing(llm.new_kv()) as kv:
        started = time.process_time()
        llm.model.forward([Span(ids, kv, PREFILL - 1)])
        return time.process_time() - started


def decode_seconds(llm: LLM) -> float:
    ids = token_ids(llm)
    with closing(llm.new_kv()) as kv:
        llm.model.forward([Span(ids[:1], kv, 0)])
        started = time.process_time()
        for i in range(DECODE):
            llm.model.forward([Span([ids[i]], kv, 0)])
        return time.process_time() - started


def token_ids(llm: LLM) -> list[int]:
    return [(i * 7919 + 13) % min(llm.config.vocab_size, 20000) for i in range(PREFILL)]


def peer_seconds(model: Path, work: str, tokens: int) -> float:
    other = "-n" if work == "-p" else "-p"
    command = [BENCH, "-m", str(model), "-t", "1", "-r", "1", "--no-warmup", "-fa", "1", "-o", "json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([*command, work, str(tokens), other, "0"], capture_output=True, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


if __name__ == "__main__":
    main()
