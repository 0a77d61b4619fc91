"""Proves how fast prefill and decode are, beside what the machine could do and, if asked, beside llama.cpp in one run.

Every measurement is repeated; with a peer, its runs and ours alternate, so that a noisy neighbour hits both. The figure
is the median. llama.cpp is measured by its own `llama-bench`, with the better of flash attention on and off.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from everwarm import config
from everwarm.engine.prefill import PREFILL_CHUNK, prefill
from everwarm.errors import ConfigError
from everwarm.kernels.backend import Backend
from everwarm.llm import LLM
from everwarm.model.transformer import Span
from everwarm.setting_kinds import Given
from everwarm.settings import Settings

PEER = "llama.cpp"
_CEILING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured: a prefill of some tokens, or a decode of some tokens behind `depth` others."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}" + (f" at depth {self.depth}" if self.kind == "decode" else "")


@dataclass(slots=True)
class Series:
    """Tokens per second of one work by one runner, run by run."""

    work: Work
    runner: str
    tok_s: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.tok_s)

    @property
    def spread(self) -> float:
        """Half of the range, relative to the median."""
        return (max(self.tok_s) - min(self.tok_s)) / 2 / self.median


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine could do."""

    read_bytes_s: float
    integer_ops_s: float


def measure_ceiling(backend: Backend) -> Ceiling | None:
    """None if the backend can't tell."""
    memory = np.ones(_CEILING_BYTES, np.uint8)
    reads = [speed for _ in range(5) if (speed := backend.read_bandwidth(memory)) is not None]
    peaks = [peak for _ in range(3) if (peak := backend.integer_peak()) is not None]
    return Ceiling(statistics.median(reads), max(peaks)) if reads and peaks else None


def run(
    model: Path,
    works: Sequence[Work],
    runs: int,
    settings: Mapping[str, Given],
    isas: Sequence[str | None],
    peer: bool,
    tell: Callable[[str], None],
) -> tuple[list[Series], Ceiling | None]:
    """Measure all works with each instruction set (None: the best one; `blas`: the reference backend) and the peer."""
    bench = find_llama_bench() if peer else None
    threads = config.resolve(Settings, settings).settings.threads or config.cores()
    series: list[Series] = []
    ceiling = None
    for isa in isas:
        chosen: dict[str, Given] = {"backend": "reference"} if isa == "blas" else {"isa": isa}
        with LLM(model, config.resolve(Settings, {**settings, **chosen}).settings) as llm:
            llm.weights.preload()
            ceiling = ceiling or measure_ceiling(llm.backend)
            runner = f"everwarm {llm.backend.instructions}"
            for work in works:
                ours, theirs = Series(work, runner), [Series(work, f"{PEER} fa={flash}") for flash in (0, 1)]
                for number in range(runs):
                    tell(f"{work.name}: run {number + 1} of {runs}, {runner}")
                    ours.tok_s.append(measure(llm, work))
                    for flash in (0, 1) if bench and isa is isas[0] else ():
                        theirs[flash].tok_s.append(llama_bench(bench or "", model, work, flash, threads))
                series.append(ours)
                if theirs[0].tok_s:
                    best = max(theirs, key=lambda one: one.median)
                    series.append(best)
    return series, ceiling


def measure(llm: LLM, work: Work) -> float:
    """Tokens per second of one run, after a short warm-up."""
    model = llm.model
    ids = [(i * 7919 + 13) % min(llm.config.vocab_size, 20000) for i in range(max(work.tokens, work.depth, 1))]
    with closing(llm.new_kv()) as kv:
        model.forward([Span(ids[:8], kv, 8)])
    with closing(llm.new_kv()) as kv:
        if work.kind == "prefill":
            started = time.perf_counter()
            for _ in prefill(model, kv, ids[: work.tokens], logits_from=work.tokens - 1):
                pass
        else:
            for low in range(0, work.depth, PREFILL_CHUNK):
                chunk = ids[low : min(low + PREFILL_CHUNK, work.depth)]
                model.forward([Span(chunk, kv, len(chunk))])
            started = time.perf_counter()
            for i in range(work.tokens):
                model.forward([Span([ids[i % len(ids)]], kv, 0)])
        return work.tokens / (time.perf_counter() - started)


def llama_bench(program: str, model: Path, work: Work, flash: int, threads: int) -> float:
    """One run of llama.cpp's own benchmark."""
    size = ["-p", str(work.tokens), "-n", "0"]
    if work.kind == "decode":
        size = ["-p", "0", "-n", str(work.tokens), "-d", str(work.depth)]
    arguments = [program, "-m", str(model), "-t", str(threads), "-r", "1", "-fa", str(flash), "-o", "json", *size]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
    try:
        return float(json.loads(result.stdout)[0]["avg_ts"])
    except (ValueError, LookupError):
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{program} failed (exit code {result.returncode}): {last}") from None


def find_llama_bench() -> str:
    """EVERWARM_LLAMA_BENCH, what `make peers` has built, or what the path has."""
    given = os.environ.get("EVERWARM_LLAMA_BENCH")
    for candidate in (given, ".venv-peers/bin/llama-bench", "llama-bench"):
        if candidate and (found := shutil.which(candidate)):
            return found
    raise ConfigError("llama-bench was not found: run `make peers`, or set EVERWARM_LLAMA_BENCH to its path")
