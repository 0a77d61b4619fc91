"""Experts in the weight cache: the likely ones stay, in what other tensors leave of the budget."""

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.bench.weights.optimum import optimum
from everwarm.bench.weights.traces import StandIn
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.cache.experts import HotExperts

LAYERS, EXPERTS, ACTIVE = 8, 32, 4
DENSE = {f"blk.{layer}.attn_q.weight": 1000 for layer in range(LAYERS)}
ROUTED = {f"blk.{layer}.ffn_up.{expert}.weight": 1000 for layer in range(LAYERS) for expert in range(EXPERTS)}
SIZES = DENSE | ROUTED


def hot(kept: dict[str, int], *pinned: str) -> HotExperts:
    return HotExperts(tuple("abcdefgh"), dict.fromkeys("abcdefghX", 10), kept.keys(), lambda name: name not in pinned)


def pass_of(experts: HotExperts, names: str) -> None:
    for name in names:
        experts.use(name)
    experts.end_pass()


def test_the_one_that_was_used_longest_ago_goes_first() -> None:
    experts = hot(dict.fromkeys("abc", 10))
    for names in ("a", "b", "c"):
        pass_of(experts, names)
    experts.use("d")
    assert experts.make_way(10, "d") == ["a"]


def test_one_that_is_used_often_outlasts_one_that_was_used_lately() -> None:
    experts = hot(dict.fromkeys("ab", 10))
    for _ in range(60):
        pass_of(experts, "a")
    pass_of(experts, "b")
    for _ in range(4):
        pass_of(experts, "")
    experts.use("c")
    assert experts.make_way(10, "c") == ["b"]


def test_a_newcomer_replaces_nobody_who_is_as_likely() -> None:
    experts = hot(dict.fromkeys("ab", 10))
    for _ in range(3):
        pass_of(experts, "abc")
    experts.use("c")
    assert experts.make_way(10, "c") is None


def test_those_that_the_same_pass_uses_stay() -> None:
    experts = hot(dict.fromkeys("ab", 10))
    pass_of(experts, "ab")
    for _ in range(5):
        pass_of(experts, "c")
    for name in "bc":
        experts.use(name)
    assert experts.make_way(10, "c") == ["a"]
    assert experts.make_way(20, "c") is None


def test_what_is_pinned_stays_and_what_is_gone_is_not_named() -> None:
    kept = dict.fromkeys("abc", 10)
    experts = hot(kept, "a")
    pass_of(experts, "abc")
    for _ in range(5):
        pass_of(experts, "d")
    experts.use("d")
    del kept["b"]
    assert experts.make_way(10, "d") == ["c"]


def test_for_what_every_pass_uses_anyone_goes_the_least_likely_first() -> None:
    experts = hot(dict.fromkeys("abcX", 10))
    for names in ("c", "a", "b"):
        pass_of(experts, names)
    assert experts.make_way_for_others(0) == []
    assert experts.make_way_for_others(15) == ["c", "a"]
    assert experts.make_way_for_others(31) is None  # X is no expert


@given(st.lists(st.text("abcdefgh", max_size=4), max_size=30), st.sets(st.sampled_from("abcdefgh")), st.integers(0, 50))
def test_whoever_makes_way_is_kept_and_is_enough(passes: list[str], kept: set[str], needed: int) -> None:
    experts = hot(dict.fromkeys(kept, 10))
    for names in passes:
        pass_of(experts, names)
    experts.use("a")
    for way in (experts.make_way(needed, "a"), experts.make_way_for_others(needed)):
        if way is not None:
            assert set(way) <= kept
            assert len(set(way)) == len(way)
            assert needed <= 10 * len(way) < max(needed, 0) + 10


def requests(stay: float, seed: int = 1, passes: int = 400) -> list[list[str]]:
    """Passes of a mixture whose k-th most popular expert is 1 / k as likely as the first; each that is in use stays in
    use for the next token with a probability.
    """
    generator = random.Random(seed)
    popularity = [generator.sample([1 / rank for rank in range(1, EXPERTS + 1)], EXPERTS) for _ in range(LAYERS)]
    chosen: list[list[int]] = [[] for _ in range(LAYERS)]
    found = []
    for _ in range(passes):
        one = []
        for layer in range(LAYERS):
            chosen[layer] = [expert for expert in chosen[layer] if generator.random() < stay]
            while len(chosen[layer]) < ACTIVE:
                (expert,) = generator.choices(range(EXPERTS), popularity[layer])
                if expert not in chosen[layer]:
                    chosen[layer].append(expert)
            one.append(f"blk.{layer}.attn_q.weight")
            one += [f"blk.{layer}.ffn_up.{expert}.weight" for expert in sorted(chosen[layer])]
        found.append(one)
    return found


def hit_rate(passes: Sequence[Sequence[str]], share: float) -> float:
    """Of the second half, in the cache."""
    cache = WeightCache(StandIn(SIZES), int(share * sum(SIZES.values())), background=False)
    before = cache.stats()
    for number, one in enumerate(passes):
        if number == len(passes) // 2:
            before = cache.stats()
        with cache.computing():
            for name in one:
                cache.get(name)
        if number % 64 == 63:
            cache.optimize()
        assert cache._kept.bytes <= cache.budget
    rate = (cache.stats() - before).byte_hit_rate
    cache.close()
    return rate


def lru_hit_rate(passes: Sequence[Sequence[str]], share: float) -> float:
    """The same of LRU; all tensors have the same size."""
    kept: OrderedDict[str, None] = OrderedDict()
    hits = uses = 0
    for number, name in ((number, name) for number, one in enumerate(passes) for name in one):
        uses += number >= len(passes) // 2
        hits += name in kept and number >= len(passes) // 2
        kept[name] = None
        kept.move_to_end(name)
        if len(kept) > int(share * len(SIZES)):
            kept.popitem(last=False)
    return hits / uses


@pytest.mark.parametrize("share", [0.25, 1 / 3, 0.5])
@pytest.mark.parametrize(("stay", "least"), [(0.0, 0.75), (0.5, 0.88), (0.75, 0.94)])
def test_value_is_near_the_optimum_and_above_lru(stay: float, share: float, least: float) -> None:
    """If tokens have nothing to do with each other, popularity is all there is to know: it alone gives 0.86."""
    passes = requests(stay)
    half = sum(map(len, passes[: len(passes) // 2]))
    best = optimum([name for one in passes for name in one], SIZES, int(share * sum(SIZES.values())), half)
    rate = hit_rate(passes, share)
    assert least * best <= rate <= best
    assert rate > lru_hit_rate(passes, share)


def test_what_every_pass_uses_is_kept_before_any_expert() -> None:
    budget = sum(DENSE.values()) + 40 * 1000
    cache = WeightCache(StandIn(SIZES), budget, background=False)
    for one in requests(0.5, passes=20):
        with cache.computing():
            for name in one:
                cache.get(name)
    counts = cache.stats().by_tensor
    assert all(counts[name].misses == 1 for name in DENSE)
    assert Counter(name in DENSE for name in cache._kept.ready)[False] == 40
    cache.close()


def test_a_plan_of_the_others_leaves_experts_alone() -> None:
    cache = WeightCache(StandIn(SIZES), sum(DENSE.values()) + 40 * 1000, background=False)
    passes = requests(0.5, passes=20)
    for one in passes:
        with cache.computing():
            for name in one:
                cache.get(name)
    before = set(cache._kept.ready)
    cache.optimize()
    assert before == set(cache._kept.ready)
    with cache.computing():
        for name in passes[-1]:
            cache.get(name)
    assert before & DENSE.keys() == DENSE.keys() == cache._kept.ready.keys() & DENSE.keys()
    assert len(cache._kept.ready) == len(before)
    cache.close()
