"""One configuration of the weight cache, measured on real requests in a process of its own.

In: a `Setup` as JSON in the argument. Out: a `Row` as JSON on stdout. A process of its own, because peak memory and
bytes read from disk are counted per process. The checksums of the pack are read before anything is measured.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from everwarm.bench.weights.requests import REQUESTS, WARMUP, WARMUP_TOKENS, ask, tokens_each
from everwarm.errors import ConfigError, EverwarmError

FORMS = {"packed": "native", "f32": "reference"}
"""Form of the weights -> backend that computes with it."""

NO_CACHE = "none"
FILE, PACK = "file", "pack"

_UNCACHED_TOKENS = 3  # of each request without a cache, where a token can take seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """What to measure."""

    model: str
    form: str
    budget: int  # bytes
    policy: str  # of the cache; `none`: no cache
    ahead: int
    passes: int  # tokens to generate in all requests that are measured
    prompt_tokens: int
    source: str = PACK  # without a cache: `pack` reads each tensor at each use, `file` builds it from the model file
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What came out. Shares of bytes, after the warm-up; `tok_s` and `ttft_s` are medians over requests."""

    policy: str
    budget_bytes: int
    ahead: int
    hit_rate: float  # bytes served without being read or built again
    ring_rate: float  # bytes read ahead of their use
    miss_rate: float  # bytes that the computation waited for
    tok_s: float
    spread: float  # half of the range of tok_s, relative to it
    ttft_s: float
    cold_ttft_s: float  # of the first request
    cpu_s: float  # per token
    stall_s: float  # per token
    disk_bytes: float  # per pass
    import_rss: int  # bytes, after importing everwarm
    loaded_rss: int  # after opening the model, before the first weight
    peak_rss: int
    anonymous_rss: int  # what is no file's on top of `loaded_rss`, in the midst of one more request
    peak_weights: int  # what the cache says it held at most, ring included
    ring_bytes: int
    tokens: int


def measure(setup: Setup) -> Row:
    """Run a setup in a process of its own."""
    arguments = [sys.executable, "-m", "everwarm.bench.weights.row", json.dumps(asdict(setup))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"policy {setup.policy}, budget {setup.budget:,}: the run ended with code {done.returncode}: {last}"
        )
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def run(setup: Setup) -> Row:
    """Warm up, then measure."""
    from everwarm.llm import load

    import_rss = memory("VmRSS")
    with load(
        setup.model,
        backend=FORMS[setup.form],
        threads=setup.threads,
        weight_budget=setup.budget,
        weight_policy=None if setup.policy == NO_CACHE else setup.policy,
        prefetch_ahead=setup.ahead,
        prefetch="on",
        pack="on",
        verify="eager",
    ) as llm:
        if setup.policy == NO_CACHE:
            from everwarm.bench.weights.traces import Uncached
            from everwarm.model.transformer import Transformer
            from everwarm.weights.memory import Buffers
            from everwarm.weights.pack.source import FileSource

            source = llm._source if setup.source == PACK else FileSource(llm._file, llm.backend)
            room = Buffers(limit=2 * max(source.sizes.values()))
            llm.model = Transformer(llm.config, Uncached(source, room), llm.backend)
        loaded_rss, loaded_anonymous = memory("VmRSS"), memory("RssAnon")
        each = _UNCACHED_TOKENS if setup.policy == NO_CACHE else tokens_each(setup.passes)

        def request(number: int, tokens: int, on_event: Callable[[object], None] | None = None) -> tuple[float, float]:
            done = ask(llm, setup.prompt_tokens, number, tokens, on_event)
            return done.ttft_s, done.decode_tok_s or 1 / done.ttft_s

        cold_ttft = request(0, WARMUP_TOKENS if setup.policy != NO_CACHE else 1)[0]
        for number in range(1, WARMUP if setup.policy != NO_CACHE else 1):
            request(number, WARMUP_TOKENS)
        before, cpu, disk = llm.weights.stats(), time.process_time(), disk_bytes()
        done = [request(WARMUP + number, each) for number in range(REQUESTS)]
        cpu, disk = time.process_time() - cpu, disk_bytes() - disk
        stats = llm.weights.stats()
        counts = stats - before
        anonymous: list[int] = []
        request(WARMUP + REQUESTS, 2, lambda _: anonymous.append(memory("RssAnon") - loaded_anonymous))
        tokens = REQUESTS * each
        used = counts.hit_bytes + counts.prefetch_hit_bytes + counts.miss_bytes
        speeds = [tok_s for _, tok_s in done]
        median = statistics.median(speeds)
        return Row(
            policy=setup.policy,
            budget_bytes=setup.budget,
            ahead=setup.ahead,
            hit_rate=counts.byte_hit_rate,
            ring_rate=counts.prefetch_hit_bytes / used if used else 0.0,
            miss_rate=counts.miss_bytes / used if used else 1.0,
            tok_s=median,
            spread=(max(speeds) - min(speeds)) / 2 / median,
            ttft_s=statistics.median(ttft for ttft, _ in done),
            cold_ttft_s=cold_ttft,
            cpu_s=cpu / tokens,
            stall_s=counts.stall_s / tokens,
            disk_bytes=disk / tokens,
            import_rss=import_rss,
            loaded_rss=loaded_rss,
            peak_rss=memory("VmHWM"),
            anonymous_rss=max(anonymous),
            peak_weights=stats.peak_bytes,
            ring_bytes=stats.ring_bytes,
            tokens=tokens,
        )


def memory(field: str) -> int:
    """Bytes: VmRSS is what this process has in RAM now, RssAnon what of it is no file's, VmHWM the most it ever had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def disk_bytes() -> int:
    """Bytes that this process had fetched from disk so far; what the page cache served is not among them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(run(Setup(**json.loads(sys.argv[1]))))))
    except EverwarmError as error:
        print(error, file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)
