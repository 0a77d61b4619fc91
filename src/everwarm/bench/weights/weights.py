"""Proves what the weight cache is worth: what a first use costs and what a later one, which policy keeps how much of a
model under which budget and how near that is to the best possible, and what it means for speed, memory and disk.

In: a model, a form of its weights, budgets as shares of their bytes. Out: rows. Policies on synthetic traces are
replayed (`weights_traces`); real requests run in a process of their own for each row (`weights_row`). `steady` asks
whether speed stays the same, request after request, once everything is preloaded.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from everwarm.bench.speed import measure_ceiling
from everwarm.bench.weights.optimum import optimum
from everwarm.bench.weights.requests import prompt
from everwarm.bench.weights.row import FILE, FORMS, NO_CACHE, PACK, Row, Setup, measure
from everwarm.bench.weights.traces import (
    TraceRow,
    record_pass,
    record_requests,
    share_of_hot_experts,
    synthetic_rows,
)
from everwarm.errors import ConfigError
from everwarm.llm import LLM, load
from everwarm.weights.cache.cache import AHEAD, WeightCache
from everwarm.weights.cache.place import is_expert, largest_layer
from everwarm.weights.cache.policy import POLICIES
from everwarm.weights.memory import Buffers
from everwarm.weights.pack.source import FileSource, PackSource

NEAR = 0.03  # a smaller `--prefetch-ahead` is as good as the best one if it is this near
WINDOW = 100  # tokens
_HITS = 2000

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WeightsOptions:
    """What to measure."""

    model: Path
    form: str
    budgets: Sequence[float]
    passes: int
    ahead: Sequence[int]
    prompt_tokens: int
    threads: int | None


@dataclass(frozen=True, slots=True)
class Access:
    """First use against later uses of tensors of one kind: medians over tensors, and the least ratio."""

    kind: str  # matrices or vectors
    tensors: int
    bytes: int
    cold_s: float  # all of them, built from the model file
    pack_s: float | None  # all of them, read from the pack
    cold_median_s: float
    hit_ns: float
    ratio: float
    least_ratio: float
    same_memory: bool  # every hit returned what the first use had built


@dataclass(frozen=True, slots=True)
class RealRow:
    """Real requests under one budget, beside the optimum for their trace."""

    name: str
    budget: float
    optimum: float
    row: Row
    weights_rss: int | None = (
        None  # peak RSS less what loading took and what the row that keeps all has besides weights
    )


@dataclass(frozen=True, slots=True)
class Report:
    """Everything but steadiness."""

    total_bytes: int
    tensors: int
    least_budget: int
    uses_per_pass: int
    hot_experts: float | None  # share of the uses of experts that falls on the quarter used most
    access: list[Access]
    traces: list[TraceRow]
    notes: list[str]
    rows: list[RealRow]
    prefetch_budget: float | None
    prefetch: list[Row]
    recommended_ahead: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """One of the consecutive requests."""

    ttft_s: float
    prefill_tok_s: float
    tok_s: float
    misses: int
    instance: str  # of the weight cache
    machine: float | None  # integer products per second, measured right after it: what the neighbours left over
    slowest_window: float | None  # the slowest 100 tokens, relative to what their growing context explains


@dataclass(frozen=True, slots=True)
class Steady:
    """Consecutive requests, and what to compare them with."""

    requests: list[Request]
    problems: list[str]  # what `verify` found before and after
    decode_limit_tok_s: float | None  # if each token read the weights once, at the speed of memory


def run(asked: WeightsOptions, tell: Tell) -> Report:
    """Measure everything, the quick things first."""
    tell("opening the model")
    with load(asked.model, backend=FORMS[asked.form], threads=asked.threads, pack="on") as llm:
        sizes = dict(llm._source.sizes)
        total, least = sum(sizes.values()), largest_layer(sizes)
        for share in asked.budgets:
            if int(share * total) < least:
                raise ConfigError(
                    f"--budgets {share:g}: {int(share * total):,} bytes are below what the largest layer of this model "
                    f"needs: give at least {least / total + 0.00005:.4f}"
                )
        uses_per_pass = len(record_pass(llm))
        tell("first and later uses")
        access = measure_access(llm)
        tell("all requests, recorded")
        trace = record_requests(llm, asked.prompt_tokens, asked.passes)
    partial = [share for share in asked.budgets if int(share * total) < total]
    tell("policies on synthetic traces")
    traces = [] if any(map(is_expert, sizes)) else synthetic_rows(sizes, partial)  # which experts? the requests know
    largest = max(sizes, key=sizes.__getitem__)
    notes = [
        f"{share:.0%}: {largest} alone ({sizes[largest]:,} bytes) exceeds the budget ({int(share * total):,}), and all "
        "others are less: the optimum would keep a part of it, the cache keeps whole tensors only"
        for share in partial
        if sizes[largest] > share * total > total - sizes[largest]
    ]

    usual = AHEAD if asked.form == "packed" else 0  # what is built is not built ahead unless asked for

    def setup(share: float, policy: str, ahead: int = usual, source: str = PACK) -> Setup:
        budget = least if policy == NO_CACHE else int(share * total)
        return Setup(
            str(asked.model), asked.form, budget, policy, ahead, asked.passes, asked.prompt_tokens, source,
            asked.threads,
        )  # fmt: skip

    rows = []
    for source in (FILE, PACK) if asked.form == "packed" else (FILE,):
        name = "no cache: file" if source == FILE else "no cache: pack"
        tell(name)
        rows.append(RealRow(name, 0.0, 0.0, measure(setup(0.0, NO_CACHE, source=source))))
    for share in asked.budgets:
        best = optimum(trace.names, sizes, int(share * total), trace.warmup)
        for policy in POLICIES if share in partial else ("value",):
            tell(f"real requests: budget {share:g}, {policy}")
            name = policy if share in partial else "all kept"
            rows.append(RealRow(name, share, best, measure(setup(share, policy))))
    whole = [one.row for one in rows if one.budget == 1]
    if whole:  # its weights are mapped from the pack, or, as f32, all in anonymous memory
        besides = whole[0].anonymous_rss - (0 if asked.form == "packed" else total)
        rows = [
            replace(one, weights_rss=one.row.peak_rss - one.row.loaded_rss - besides) if 0 < one.budget < 1 else one
            for one in rows
        ]
    prefetch = []
    for ahead in asked.ahead if partial else ():
        tell(f"real requests: {ahead} layers ahead")
        prefetch.append(measure(setup(min(partial), "value", ahead)))
    hot = share_of_hot_experts(trace.names[trace.warmup :], sizes)
    return Report(
        total, len(sizes), least, uses_per_pass, hot, access, traces, notes, rows,
        min(partial) if prefetch else None, prefetch, recommend(prefetch),
    )  # fmt: skip


def recommend(rows: Sequence[Row]) -> int | None:
    """The fewest layers ahead that are as fast as the best, or nearly."""
    best = max((row.tok_s for row in rows), default=0.0)
    return min((row.ahead for row in rows if row.tok_s >= (1 - NEAR) * best), default=None)


def measure_access(llm: LLM) -> list[Access]:
    """Time the first use of every tensor, then many later ones. One tensor at a time is in memory."""
    source = FileSource(llm._file, llm.backend)
    pack = llm._source if isinstance(llm._source, PackSource) else None
    cache = WeightCache(source, sum(source.sizes.values()))
    buffers = Buffers(limit=max(source.sizes.values()))
    found: dict[str, list[tuple[int, float, float, float, bool]]] = {}
    for name, size in source.sizes.items():
        started = time.perf_counter()
        tensor = cache.get(name)
        cold_s = time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(_HITS):
            cache.get(name)
        hit_s = (time.perf_counter() - started) / _HITS
        again = cache.get(name)
        same = again is tensor and (not isinstance(tensor, np.ndarray) or again.ctypes.data == tensor.ctypes.data)
        started = time.perf_counter()
        if pack is not None:
            pack.build(name, buffers)
        read_s = time.perf_counter() - started
        del tensor, again
        cache.evict([name])
        vector = len(llm._file.tensors[name].shape) == 1
        found.setdefault("vectors" if vector else "matrices", []).append((size, cold_s, read_s, hit_s, same))
    cache.close()
    return [
        Access(
            kind=kind,
            tensors=len(rows),
            bytes=sum(size for size, *_ in rows),
            cold_s=sum(cold for _, cold, *_ in rows),
            pack_s=sum(read for _, _, read, *_ in rows) if pack else None,
            cold_median_s=statistics.median(cold for _, cold, *_ in rows),
            hit_ns=statistics.median(hit for *_, hit, _ in rows) * 1e9,
            ratio=statistics.median(cold / hit for _, cold, _, hit, _ in rows),
            least_ratio=min(cold / hit for _, cold, _, hit, _ in rows),
            same_memory=all(same for *_, same in rows),
        )
        for kind, rows in found.items()
    ]


def steady(asked: WeightsOptions, requests: int, tell: Tell) -> Steady:
    """Consecutive requests after `preload` and `warm_up`, as a server begins; all of them count."""
    tell("loading everything")
    done = []
    with load(asked.model, backend=FORMS[asked.form], threads=asked.threads, pack="on", verify="eager") as llm:
        llm.weights.preload()
        llm.warm_up()
        problems = llm.weights.verify()
        for number in range(requests):
            tell(f"request {number + 1} of {requests}")
            ids = prompt(asked.prompt_tokens, llm.config.vocab_size, number)
            times: list[float] = []
            asked_for: dict[str, Any] = {
                "max_tokens": asked.passes,
                "ignore_eos": True,
                "temperature": 0.0,
                "cache": False,
            }
            one = llm.generate(tokens=ids, on_event=_stamp(times), **asked_for)
            done.append(
                Request(
                    ttft_s=one.ttft_s,
                    prefill_tok_s=len(ids) / one.ttft_s,
                    tok_s=one.decode_tok_s or 1 / one.ttft_s,
                    misses=one.weights.misses,
                    instance=llm.weights.instance,
                    machine=llm.backend.integer_peak(),
                    slowest_window=slowest_window(times),
                )
            )
        problems += llm.weights.verify()
        limit = None
        if (ceiling := measure_ceiling(llm.backend)) is not None:
            used = sum(llm._source.sizes[name] for name in record_pass(llm))
            limit = ceiling.read_bytes_s / used
    return Steady(done, [f"{problem.tensor} {problem.what}" for problem in problems], limit)


def _stamp(times: list[float]) -> Callable[[object], None]:
    return lambda _: times.append(time.perf_counter())


def slowest_window(times: Sequence[float]) -> float | None:
    """Times of tokens, cut into windows: the slowest, relative to a line through all. None if under three.

    Attention takes time in proportion to the context, so without disturbance windows lie on a line. It is laid through
    medians (Theil-Sen), which a slow window does not move.
    """
    took = [times[end] - times[end - WINDOW] for end in range(WINDOW, len(times), WINDOW)]
    if len(took) < 3:
        return None
    slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(took), 2))
    start = statistics.median(seconds - slope * i for i, seconds in enumerate(took))
    return max(seconds / (start + slope * i) for i, seconds in enumerate(took))


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean."""
    return statistics.pstdev(values) / statistics.fmean(values)
