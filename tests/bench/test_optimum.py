"""The optimum against an exhaustive search on tiny cases, and against what arithmetic says; traces as described."""

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.bench.weights.optimum import moe, optimum, random_trace, scan, zipf

NAMES = [f"t{k}" for k in range(40)]


def exhaustive(trace: Sequence[str], sizes: Mapping[str, int], budget: int, warmup: int) -> float:
    """Hit rate of the best of all ways to keep some bytes after each access: those there were, and those just read."""
    names = sorted(sizes)

    @functools.cache
    def best(at: int, kept: tuple[int, ...]) -> int:
        if at == len(trace):
            return 0
        this = names.index(trace[at])
        choices = [range(sizes[name] + 1 if k == this else kept[k] + 1) for k, name in enumerate(names)]
        ways = (way for way in itertools.product(*choices) if sum(way) <= budget)
        return (kept[this] if at >= warmup else 0) + max(best(at + 1, way) for way in ways)

    accessed = sum(sizes[name] for name in trace[warmup:])
    return best(0, (0,) * len(names)) / accessed if accessed else 0.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from("abcd"), max_size=9),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.integers(0, 6),
    st.integers(0, 5),
)
def test_no_way_of_keeping_bytes_is_better(trace: list[str], size: list[int], budget: int, warmup: int) -> None:
    sizes = dict(zip("abcd", size, strict=True))
    assert optimum(trace, sizes, budget, warmup) == exhaustive(trace, sizes, budget, warmup)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_scan_is_served_as_far_as_the_budget_goes(share: float) -> None:
    sizes = {name: 100 + k for k, name in enumerate(NAMES)}
    budget = int(sum(sizes.values()) * share)
    trace = scan(NAMES, 5)
    assert optimum(trace, sizes, budget, warmup=len(NAMES)) == budget / sum(sizes.values())
    assert optimum(trace, sizes, budget) == pytest.approx(budget / sum(sizes.values()) * 4 / 5)


def test_a_tensor_bigger_than_the_budget_is_kept_in_part() -> None:
    assert optimum(["a", "a", "a"], {"a": 10}, 5, warmup=1) == 0.5


def test_what_is_not_used_again_is_not_kept() -> None:
    assert optimum(list("axbxcx"), dict.fromkeys("abcx", 1), 1) == 2 / 6


def test_nothing_accessed_is_nothing_hit() -> None:
    assert optimum([], {}, 10) == 0.0
    assert optimum(["a"], {"a": 1}, 10, warmup=3) == 0.0


def test_100_000_accesses_take_seconds_at_most() -> None:
    names = [f"t{k}" for k in range(2_000)]
    started = time.process_time()
    rate = optimum(zipf(names, 100_000, 1.0, seed=1), dict.fromkeys(names, 10), 5_000, warmup=20_000)
    assert 0.5 < rate < 1
    assert time.process_time() - started < 5


def test_traces_are_decided_by_their_seed() -> None:
    makers: tuple[Callable[[int], list[str]], ...] = (
        lambda seed: random_trace(NAMES, 500, seed),
        lambda seed: zipf(NAMES, 500, 1.0, seed),
        lambda seed: moe(3, 8, 2, 20, 1.0, seed),
    )
    for make in makers:
        assert make(7) == make(7)
        assert make(7) != make(8)


def test_a_scan_is_all_names_in_order_again_and_again() -> None:
    assert scan(["a", "b"], 3) == ["a", "b", "a", "b", "a", "b"]


def test_random_names_are_equally_likely() -> None:
    counts = Counter(random_trace(NAMES, 40_000, seed=3))
    assert all(850 < counts[name] < 1150 for name in NAMES)  # 1000 expected, standard deviation 31


def test_zipf_halves_from_the_first_to_the_second() -> None:
    counts = Counter(zipf(NAMES, 40_000, 1.0, seed=3)).most_common(4)
    harmonic = sum(1 / rank for rank in range(1, 41))
    assert [count for _, count in counts] == pytest.approx([40_000 / harmonic / rank for rank in (1, 2, 3, 4)], rel=0.1)
    assert Counter(zipf(NAMES, 40_000, 1.0, seed=5)).most_common(1)[0][0] != counts[0][0]


def test_every_layer_of_a_mixture_uses_as_many_different_experts_as_are_active() -> None:
    trace = moe(layers=3, experts=8, active=2, passes=50, exponent=1.0, seed=5)
    assert len(trace) == 3 * 2 * 50
    for at in range(0, len(trace), 2):
        layer = at // 2 % 3
        experts = [name.removeprefix(f"blk.{layer}.ffn_exps.") for name in trace[at : at + 2]]
        assert len(set(experts)) == 2
        assert all(expert in "01234567" for expert in experts)


def test_experts_of_a_mixture_are_drawn_by_popularity() -> None:
    counts = Counter(moe(layers=1, experts=4, active=1, passes=20_000, exponent=1.0, seed=5)).most_common()
    assert [count / 20_000 for _, count in counts] == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)
