"""What each policy of the weight cache keeps on a trace of accesses, beside the best that any cache could.

The cache is the real one. On synthetic traces its source is a stand-in with the model's sizes that builds nothing, the
clock is ours, a tensor costs time in proportion to its size, and nothing is read ahead: so the figures are the same in
every run. The trace of real requests is recorded from the model itself: which experts it uses depends on its tokens.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from everwarm.bench.weights import optimum
from everwarm.bench.weights.requests import REQUESTS, WARMUP, WARMUP_TOKENS, ask, tokens_each
from everwarm.kernels.backend import F32, Weight
from everwarm.llm import LLM
from everwarm.model.transformer import Span, Transformer
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.cache.place import is_expert
from everwarm.weights.cache.policy import POLICIES
from everwarm.weights.cache.stats import Counts
from everwarm.weights.memory import Buffers
from everwarm.weights.pack.source import Built, Source

REQUEST = 4  # passes after which the cache may plan again, as after a generation
REPLAYED_WARMUP, REPLAYED = 4, 4  # requests
WINDOW_S = 60.0  # a pass takes a second, so all of a run is seen
ZIPF = 1.0
_SEED = 1
_BYTES_S = 1e9


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A policy on a trace under a budget: shares of bytes, after the warm-up."""

    trace: str
    budget: float  # share of the model
    policy: str
    hit_rate: float
    optimum: float


class Uncached(WeightCache):
    """No cache: each use builds or reads the tensor again. What is handed out is counted nowhere."""

    def __init__(self, source: Source, buffers: Buffers | None) -> None:
        super().__init__(source, sum(source.sizes.values()))
        self._from, self._into = source, buffers

    @property
    def mapped(self) -> bool:
        """Nothing stays where it is."""
        return False

    def get(self, name: str) -> Weight:
        return self._from.build(name, self._into).tensor

    def table(self, name: str) -> None:
        """Nothing is kept, so rows are read by themselves."""


class Recorder(Uncached):
    """Writes down what is asked for."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, None)
        self.trace: list[str] = []

    def get(self, name: str) -> Weight:
        self.trace.append(name)
        return super().get(name)


@dataclass(frozen=True, slots=True)
class Trace:
    """The tensors that some requests use, in order."""

    names: list[str]
    warmup: int  # so many of them before anything is measured


def record_pass(llm: LLM) -> list[str]:
    """The tensors that one decoded token uses, in order."""
    with closing(Recorder(llm._source)) as recorder, closing(llm.new_kv()) as kv:
        model = Transformer(llm.config, recorder, llm.backend)
        recorder.trace.clear()
        model.forward([Span([1], kv, 0)])
        return recorder.trace


def record_requests(llm: LLM, prompt_tokens: int, passes: int) -> Trace:
    """What the requests of a row use (`row.run`). The model is not fit for anything else afterwards."""
    with closing(Recorder(llm._source)) as recorder:
        llm.model = Transformer(llm.config, recorder, llm.backend)
        recorder.trace.clear()
        for number in range(WARMUP):
            ask(llm, prompt_tokens, number, WARMUP_TOKENS)
        warmup = len(recorder.trace)
        for number in range(WARMUP, WARMUP + REQUESTS):
            ask(llm, prompt_tokens, number, tokens_each(passes))
        return Trace(recorder.trace, warmup)


def share_of_hot_experts(trace: Sequence[str], names: Collection[str]) -> float | None:
    """How much of the use of experts falls on the quarter of them that is used most; None without experts."""
    uses = Counter(name for name in trace if is_expert(name))
    count = sum(map(is_expert, names)) // 4
    return sum(number for _, number in uses.most_common(count)) / uses.total() if uses else None


def synthetic_rows(sizes: Mapping[str, int], budgets: Sequence[float]) -> list[TraceRow]:
    """Every policy on a scan, random and skewed trace under every budget."""
    names, passes = list(sizes), REQUEST * (REPLAYED_WARMUP + REPLAYED)
    count = len(names) * passes
    traces = {
        "scan": optimum.scan(names, passes),
        "random": optimum.random_trace(names, count, _SEED),
        f"zipf {ZIPF:g}": optimum.zipf(names, count, ZIPF, _SEED),
    }
    warmup = len(names) * REQUEST * REPLAYED_WARMUP
    rows = []
    for kind, trace in traces.items():
        for share in budgets:
            budget = int(share * sum(sizes.values()))
            best = optimum.optimum(trace, sizes, budget, warmup)
            for policy in POLICIES:
                counts = replay(trace, sizes, budget, policy)
                rows.append(TraceRow(kind, share, policy, counts.byte_hit_rate, best))
    return rows


def replay(trace: Sequence[str], sizes: Mapping[str, int], budget: int, policy: str) -> Counts:
    """Run a trace through the cache, a pass being as many accesses as there are tensors; counts after the warm-up."""
    clock = _Clock()
    cache = WeightCache(StandIn(sizes), budget, policy, background=False, window_s=WINDOW_S, clock=clock)
    before = Counts()
    for number, start in enumerate(range(0, len(trace), len(sizes))):
        if number == REQUEST * REPLAYED_WARMUP:
            before = cache.stats()
        with cache.computing():
            for name in trace[start : start + len(sizes)]:
                cache.get(name)
            clock.now += 1.0
        if number % REQUEST == REQUEST - 1:
            cache.optimize()
    counts = cache.stats() - before
    cache.close()
    return counts


class _Clock:
    """Seconds that pass when we say so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StandIn:
    """Says that its tensors have these sizes and take time in proportion to them, and gives a byte for each."""

    reads = True

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def build(self, name: str, buffers: Buffers | None) -> Built:
        byte = np.zeros(1, np.uint8)
        return Built(byte, byte, byte, self.sizes[name] / _BYTES_S)

    def rows(self, name: str, numbers: Sequence[int]) -> F32:
        raise NotImplementedError

    def checksum(self, name: str) -> str | None:
        return None

    def altered(self) -> list[str]:
        return []

    def mended(self) -> "Source":
        return self
