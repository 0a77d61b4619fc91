"""The weight cache under SmolLM2: what is promised to people, on the model that they try first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import everwarm
from everwarm.bench.weights.optimum import optimum, zipf
from everwarm.bench.weights.traces import StandIn
from everwarm.bench.weights.weights import measure_access
from everwarm.llm import LLM
from everwarm.weights.cache.cache import WeightCache
from short_and_long import short_and_long

pytestmark = pytest.mark.model


@pytest.fixture
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with everwarm.load(smollm2_path, verify="eager") as llm:
        yield llm


@pytest.mark.slow
@short_and_long("tokens", 25, 250)  # a thousand in all
def test_no_misses_after_preloading(llm: LLM, tokens: int) -> None:
    llm.weights.preload()
    for prompt in ("The sea", "A list of", "Once upon a time", "import"):
        done = llm.generate(prompt, max_tokens=tokens, ignore_eos=True)
        assert (len(done.tokens), done.weights.misses, done.weights.hit_rate) == (tokens, 0, 1.0)
    assert llm.weights.stats().unexpected_misses == 0
    assert llm.weights.verify(deep=True) == []


def test_without_preloading_each_tensor_is_missed_once(llm: LLM) -> None:
    first, second = (llm.generate("The sea", max_tokens=3, ignore_eos=True) for _ in range(2))
    assert (first.weights.misses, second.weights.misses) == (len(llm._file.tensors), 0)


@pytest.mark.parametrize("budget", ["25%", "50%"])
def test_a_budget_changes_no_bit(llm: LLM, smollm2_path: Path, budget: str) -> None:
    ids = llm.tokenize("The weights are streamed from disk, and nobody can tell.")
    expected = llm.logits(ids)
    with everwarm.load(smollm2_path, weight_budget=budget) as small:
        for _ in range(2):
            assert (small.logits(ids) == expected).all()
        assert small.weights.stats().misses + small.weights.stats().prefetch_hits > len(llm._file.tensors)


def test_a_cached_access_is_a_hundred_times_faster_than_the_first(smollm2_path: Path) -> None:
    with everwarm.load(smollm2_path, backend="reference") as llm:
        for access in measure_access(llm):
            assert access.ratio >= 100
            assert access.same_memory


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_after_the_hot_set_has_moved_the_cache_is_near_the_optimum_within_a_window(llm: LLM, share: float) -> None:
    """The cache plans by itself after each request of four passes; nobody tells it that something has moved."""
    sizes = {name: size for name, size in llm._source.sizes.items() if name.startswith("blk.")}
    window = 60 * len(sizes)
    now = [0.0]
    budget = int(share * sum(sizes.values()))
    cache = WeightCache(StandIn(sizes), budget, background=False, window_s=60.0, clock=lambda: now[0])

    def run(trace: list[str]) -> float:
        before = cache.stats()
        for number, start in enumerate(range(0, len(trace), len(sizes))):
            with cache.computing():
                for name in trace[start : start + len(sizes)]:
                    cache.get(name)
                now[0] += 1.0
            if number % 4 == 3:
                cache.optimize()
        return (cache.stats() - before).byte_hit_rate

    before, after = (zipf(list(sizes), 2 * window, 1.2, seed) for seed in (1, 2))
    run(before)
    run(after[:window])
    assert run(after[window:]) >= 0.9 * optimum(after, sizes, budget, warmup=window)
    cache.close()
