"""The weight cache: what a predecessor got wrong gets a test each, and threads against a plain model of it."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import everwarm
from everwarm.errors import ConfigError, EverwarmError, RequestError
from everwarm.sizes import Share
from everwarm.weights.cache import cache as cache_module
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.cache.place import ring_bytes
from everwarm.weights.cache.ring import Flight
from everwarm.weights.memory import Buffers, root_of
from everwarm.weights.pack.source import Built, Source
from short_and_long import short_and_long
from tiny import Tiny
from waiting_until import PATIENCE_S, wait_until

LAYERS, PER_LAYER, SIZE = 8, 4, 4096
NAMES = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_q", "attn_k", "ffn_up", "ffn_down")]
TOTAL = len(NAMES) * SIZE


class Memory:
    """A source whose tensors are bytes that follow from their names. It counts, and it fails when told to."""

    reads = True

    def __init__(self, sizes: dict[str, int] | None = None, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.sizes = sizes or dict.fromkeys(NAMES, SIZE)
        self.delay = delay
        self.built: list[str] = []
        self.building: set[str] = set()
        self.doubled = 0
        self.failing: set[str] = set()
        self._lock = threading.Lock()

    def build(self, name: str, buffers: Buffers | None) -> Built:
        if name not in self.sizes:
            raise RequestError(f"no tensor {name}")
        with self._lock:
            self.doubled += name in self.building
            self.building.add(name)
            self.built.append(name)
        try:
            time.sleep(self.delay())
            if name in self.failing:
                raise OSError(f"{name}: bad block")
            array = (buffers or Buffers()).take(self.sizes[name])[: self.sizes[name]]
            array[:] = content(name)
            return Built(array, array, root_of(array))
        finally:
            with self._lock:
                self.building.discard(name)

    def rows(self, name: str, numbers: Sequence[int]) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    def checksum(self, name: str) -> str | None:
        return None

    def altered(self) -> list[str]:
        return []

    def mended(self) -> Source:
        return self


def after_all_have_asked(asking: list[int], count: int) -> float:
    """The delay of a source that waits for so many threads, and then for a moment, so that they wait for it."""
    wait_until(lambda: len(asking) >= count)
    return 0.05


def content(name: str) -> int:
    return sum(name.encode()) % 256


def scan(cache: WeightCache, passes: int = 1) -> None:
    """What a forward pass does."""
    for _ in range(passes):
        with cache.computing():
            for layer in range(LAYERS):
                cache.enter(layer)
                for name in NAMES[layer * PER_LAYER : (layer + 1) * PER_LAYER]:
                    assert cache.get(name)[0] == content(name)


@contextmanager
def watchdog(seconds: float = 2 * PATIENCE_S) -> Iterator[None]:
    """Fail, rather than hang, if something deadlocks."""
    import faulthandler

    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_hit_is_the_same_memory_and_nothing_is_built_twice() -> None:
    source = Memory()
    cache = WeightCache(source)
    assert cache.get(NAMES[0]) is cache.get(NAMES[0])
    scan(cache, 3)
    assert sorted(source.built) == sorted(NAMES)
    stats = cache.stats()
    assert (stats.misses, stats.hits) == (len(NAMES), 2 + 3 * len(NAMES) - len(NAMES))
    assert stats.resident_bytes == stats.peak_bytes == TOTAL
    assert stats.mapped
    assert stats.layers[0].misses == PER_LAYER
    assert stats.by_tensor[NAMES[0]].hits == 4


def test_preload_leaves_no_miss_and_a_second_one_does_nothing() -> None:
    cache = WeightCache(Memory())
    assert cache.preload().loaded == len(NAMES)
    before = cache.stats()
    assert cache.preload().loaded == 0
    assert cache.stats() == before
    scan(cache)
    stats = cache.stats()
    assert (stats.misses, stats.preloaded, stats.hit_rate, stats.unexpected_misses) == (0, len(NAMES), 1.0, 0)
    assert stats.pinned_bytes == TOTAL
    assert stats.instance == before.instance
    assert cache.verify(deep=True) == []


def test_preload_of_more_than_fits_says_what_does_not_and_evicts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = WeightCache(Memory(), TOTAL // 2)
    with caplog.at_level(logging.WARNING):
        done = cache.preload()
    assert done.loaded == len(NAMES) // 2
    assert done.left_out_bytes == TOTAL // 2 == sum(SIZE for _ in done.left_out)
    assert "do not fit" in caplog.text
    stats = cache.stats()
    assert (stats.evictions, stats.pinned_bytes) == (0, TOTAL // 2)
    assert cache.verify() == []
    scan(cache, 3)
    assert cache.stats().unexpected_misses == 0
    assert cache.stats().evictions == 0


def test_a_layer_can_be_preloaded_in_parts() -> None:
    source = Memory()
    cache = WeightCache(source)
    cache.preload_layer(2, "attention")
    assert source.built == ["blk.2.attn_q", "blk.2.attn_k"]
    cache.preload_layer(2)
    assert source.built[2:] == ["blk.2.ffn_up", "blk.2.ffn_down"]
    for layer, part, message in ((99, "both", "this model has 8"), (0, "head", "attention, feed-forward or both")):
        with pytest.raises(RequestError, match=message):
            cache.preload_layer(layer, part)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_value_keeps_its_share_of_a_scan_and_lru_nothing(share: float) -> None:
    rates = {}
    for policy in ("value", "pinned-prefix", "lru"):
        source = Memory()
        cache = WeightCache(source, Share(share), policy, background=False)
        scan(cache, 2)
        cache.optimize()
        before = cache.stats()
        scan(cache, 10)
        cache.optimize()
        rates[policy] = (cache.stats() - before).byte_hit_rate
        assert cache.stats().peak_bytes <= share * TOTAL + cache.stats().ring_bytes
        cache.close()
    assert rates["value"] >= 0.95 * share
    assert rates["pinned-prefix"] >= 0.95 * share
    assert rates["lru"] == 0.0


@pytest.mark.parametrize("policy", ["value", "lru", "pinned-prefix"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_memory_is_never_more_than_the_budget_and_one_ring(
    policy: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any instant: when a tensor is begun, and when memory is taken for it, spare memory included."""
    pages = dict(zip(NAMES, [4096, 8192, 12288, 40960] * LAYERS, strict=True))
    cache = WeightCache(Memory(pages), Share(share), policy)
    begin, take = cache._begin, cache._buffers.take
    rings, held = [0], []

    def check() -> None:
        rings.append(max(rings[-1], cache._ring.size))  # it shrinks as more of a layer is kept
        held.append(max(cache._in_use.bytes, cache._buffers.taken_bytes) - cache.budget - rings[-1])

    def checked_begin(name: str, ahead: bool = False) -> Flight:
        flight = begin(name, ahead)
        check()
        return flight

    def checked_take(size: int) -> npt.NDArray[np.uint8]:
        array = take(size)
        with cache._lock:
            check()
        return array

    monkeypatch.setattr(cache, "_begin", checked_begin)
    monkeypatch.setattr(cache._buffers, "take", checked_take)
    with watchdog():
        for _ in range(10):
            scan(cache, 2)
            cache.optimize()
    cache.close()
    assert len(held) > len(NAMES)
    assert max(held) <= 0


def test_reading_ahead_takes_the_streamed_part_off_the_computation() -> None:
    """If computing a layer takes as long as reading the next one."""
    source = Memory(delay=lambda: 0.001)
    cache = WeightCache(source, Share(0.5), ahead=1)
    with watchdog():
        for _ in range(4):
            for layer in range(LAYERS):
                cache.enter(layer)
                wait_until(lambda: all(flight.built is not None for flight in list(cache._ring.flights.values())))
                for name in NAMES[layer * PER_LAYER : (layer + 1) * PER_LAYER]:
                    cache.get(name)
    stats = cache.stats()
    assert stats.prefetch_hits > stats.misses > 0
    assert stats.peak_bytes <= TOTAL // 2 + stats.ring_bytes
    cache.close()
    assert cache.stats().resident_bytes == 0


def test_what_has_to_be_built_is_built_ahead_only_if_asked_to() -> None:
    source = Memory()
    source.reads = False
    for ahead, expected in ((None, False), (1, True)):
        cache = WeightCache(source, Share(0.5), ahead=ahead)
        scan(cache, 4)
        cache.close()
        stats = cache.stats()
        assert (stats.prefetch_hits + stats.prefetch_wasted > 0) is expected


def test_what_was_read_ahead_for_nothing_is_counted() -> None:
    cache = WeightCache(Memory(), Share(0.5), ahead=1)
    for layer in range(4):  # fills the budget
        for name in NAMES[layer * PER_LAYER : (layer + 1) * PER_LAYER]:
            cache.get(name)
    cache.enter(4)
    # Their bytes count from the moment they are read; they wait in the ring a little later.
    wait_until(lambda: sum(flight.built is not None for flight in list(cache._ring.flights.values())) == PER_LAYER)
    cache.enter(0)  # nobody asked for layer 5
    assert cache.stats().prefetch_wasted == PER_LAYER
    assert cache.stats().resident_bytes == TOTAL // 2
    cache.close()


def test_prefetch_of_a_layer_makes_hits_of_misses() -> None:
    cache = WeightCache(Memory())
    cache.prefetch(3)
    wait_until(lambda: cache.stats().resident == PER_LAYER)
    assert cache.get("blk.3.attn_q") is not None
    assert (cache.stats().misses, cache.stats().hits) == (0, 1)
    cache.close()


def test_memory_of_an_evicted_tensor_in_use_stays_counted_and_whole() -> None:
    cache = WeightCache(Memory(), Share(0.5), background=False)
    used = cache.get(NAMES[0])
    view = used[10:20]
    cache.evict([NAMES[0]])
    assert cache.stats().resident_bytes == SIZE
    for name in NAMES[1:]:
        cache.get(name)  # whose memory might be taken from it
    assert (used == content(NAMES[0])).all()
    before = cache.stats().resident_bytes
    del used
    assert cache.stats().resident_bytes == before
    del view
    assert cache.stats().resident_bytes == before - SIZE


def test_pinning_more_than_the_budget_is_refused_and_changes_nothing() -> None:
    cache = WeightCache(Memory(), Share(0.5))
    cache.pin(NAMES[:8])
    before = cache.stats()
    with pytest.raises(ConfigError, match=f"raise the budget to {17 * SIZE:,}"):
        cache.pin(NAMES[:17])
    assert cache.stats() == before
    with pytest.raises(RequestError, match="unpin it first"):
        cache.evict(NAMES[7:9])
    cache.unpin(NAMES[:8])
    cache.evict(NAMES[:8])
    assert cache.stats().resident_bytes == 0
    cache.close()


def _evict_behind_its_back(cache: WeightCache) -> None:
    del cache._kept.ready[NAMES[5]]


def _alter_a_byte(cache: WeightCache) -> None:
    cache._kept.data[NAMES[5]][100] ^= 1


def _swap_the_storage(cache: WeightCache) -> None:
    cache._kept.ready[NAMES[5]] = cache._kept.data[NAMES[5]] = cache._kept.data[NAMES[5]].copy()


def _shrink_the_budget(cache: WeightCache) -> None:
    cache._kept.budget = 5 * SIZE


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (_evict_behind_its_back, "not there"),
        (_alter_a_byte, "other bytes"),
        (_swap_the_storage, "not in the memory"),
        (_shrink_the_budget, "beyond the budget"),
    ],
)
def test_verify_names_what_is_wrong(harm: Callable[[WeightCache], None], what: str) -> None:
    cache = WeightCache(Memory())
    cache.preload(NAMES[:6])
    harm(cache)
    assert [(problem.tensor, what in problem.what) for problem in cache.verify(deep=True)] == [(NAMES[5], True)]


def test_a_miss_of_what_was_preloaded_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    cache = WeightCache(Memory())
    cache.preload()
    _evict_behind_its_back(cache)
    with caplog.at_level(logging.WARNING):
        cache.get(NAMES[5])
    assert cache.stats().unexpected_misses == 1
    assert f"unexpected miss of {NAMES[5]}" in caplog.text


def test_a_failure_reaches_those_who_asked_and_nobody_else() -> None:
    asking: list[int] = []
    source = Memory(delay=lambda: after_all_have_asked(asking, 4))
    cache = WeightCache(source, Share(0.5), background=False)
    source.failing = {NAMES[3]}
    errors: list[BaseException] = []

    def ask() -> None:
        asking.append(1)
        try:
            cache.get(NAMES[3])
        except OSError as error:
            errors.append(error)

    with watchdog():
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert cache.get(NAMES[0])[0] == content(NAMES[0])
        for thread in threads:
            thread.join()
    assert len(errors) == 4
    assert cache.stats().resident_bytes == SIZE
    source.failing = set()
    assert cache.get(NAMES[3])[0] == content(NAMES[3])
    assert cache.stats().misses == 2


def test_a_failed_prefetch_is_no_error_until_the_tensor_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    source = Memory()
    source.failing = {"blk.1.attn_q"}
    cache = WeightCache(source)
    cache.prefetch(1)
    wait_until(lambda: "prefetch of blk.1.attn_q failed" in caplog.text)
    with pytest.raises(OSError, match="bad block"):
        cache.get("blk.1.attn_q")
    cache.close()


def test_resize_shrinks_and_grows_without_losing_what_is_pinned() -> None:
    cache = WeightCache(Memory())
    cache.preload(NAMES[:4])
    scan(cache)
    assert cache.stats().resident_bytes == TOTAL
    cache.resize(Share(0.25))
    assert cache.stats().resident_bytes <= TOTAL // 4
    assert cache.verify(deep=True) == []
    scan(cache, 2)
    assert cache.stats().resident_bytes <= TOTAL // 4 + cache.stats().ring_bytes
    assert cache.stats().by_tensor[NAMES[0]].misses == 0
    with pytest.raises(ConfigError, match="at least"):
        cache.resize(PER_LAYER * SIZE - 1)
    cache.resize(TOTAL)
    scan(cache, 2)
    assert cache.stats().resident_bytes == TOTAL
    cache.close()


def test_resize_below_what_is_pinned_is_refused() -> None:
    cache = WeightCache(Memory())
    cache.preload()
    with pytest.raises(ConfigError, match="unpin some first"):
        cache.resize(Share(0.5))
    assert cache.stats().resident_bytes == TOTAL


def test_two_threads_that_miss_the_same_tensor_build_it_once() -> None:
    asking: list[int] = []
    source = Memory(delay=lambda: after_all_have_asked(asking, 8))
    cache = WeightCache(source)
    got: list[np.ndarray] = []

    def ask() -> None:
        asking.append(1)
        got.append(cache.get(NAMES[0]))

    with watchdog():
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert source.built == [NAMES[0]]
    assert all(tensor is got[0] for tensor in got)
    assert (cache.stats().misses, cache.stats().hits) == (1, 7)


def test_preloading_in_one_thread_and_computing_in_another_changes_nothing() -> None:
    source = Memory(delay=lambda: 0.0005)
    cache = WeightCache(source)
    with watchdog():
        thread = threading.Thread(target=cache.preload)
        thread.start()
        scan(cache, 3)
        thread.join()
    stats = cache.stats()
    assert sorted(source.built) == sorted(NAMES)
    assert stats.misses + stats.preloaded == len(NAMES)
    assert stats.hits + stats.misses == 3 * len(NAMES)
    assert cache.verify(deep=True) == []


@pytest.mark.parametrize("budget", [Share(0.25), Share(0.6), None])
@pytest.mark.parametrize("policy", ["value", "lru", "pinned-prefix"])
@short_and_long("operations", 1_000, 10_000)
def test_eight_threads_of_random_operations(budget: Share | None, policy: str, operations: int) -> None:
    """Against a plain count of what was asked: no deadlock, no double work, no wrong bytes, exact accounting."""
    random_delay = random.Random(0)
    source = Memory(delay=lambda: random_delay.choice((0, 0, 0, 0.0001)))
    cache = WeightCache(source, budget, policy)
    asked = [0] * 8
    wrong: list[str] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        for _ in range(operations):
            name = choose.choice(NAMES)
            what = choose.random()
            if what < 0.8:
                asked[number] += 1
                tensor = cache.get(name)
                if tensor[0] != content(name) or tensor[-1] != content(name):
                    wrong.append(name)
            elif what < 0.88:
                cache.prefetch(choose.randrange(LAYERS))
            elif what < 0.92:
                cache.enter(choose.randrange(LAYERS))
            elif what < 0.95:
                with suppress(RequestError):
                    cache.evict([name])
            elif what < 0.97:
                with suppress(ConfigError):
                    cache.pin([name])
                cache.unpin([name])
            elif what < 0.99:
                cache.optimize()
            else:
                assert cache.stats().resident_bytes >= 0

    with watchdog():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    cache._ring.close()  # so that nothing is on its way
    assert wrong == []
    assert source.doubled == 0
    stats = cache.stats()
    assert stats.hits + stats.prefetch_hits + stats.misses == sum(asked)
    assert cache._kept.bytes == stats.resident * SIZE <= cache.budget
    cache.close()
    assert cache.stats().resident_bytes == 0


def test_the_window_forgets_and_the_total_does_not() -> None:
    now = [0.0]
    cache = WeightCache(Memory(), window_s=16.0, clock=lambda: now[0])

    def scan_for(seconds: float) -> None:
        with cache.computing():
            scan(cache)
            now[0] += seconds

    scan_for(5.0)
    scan_for(5.0)
    assert cache.stats().window.uses == cache.stats().uses == 2 * len(NAMES)
    scan_for(30.0)
    scan_for(5.0)
    assert cache.stats().uses == 4 * len(NAMES)
    stats = cache.stats()
    assert stats.window.uses == len(NAMES)
    assert {name: counts.uses for name, counts in stats.window_by_tensor.items()} == dict.fromkeys(NAMES, 1)
    assert {name: counts.uses for name, counts in stats.by_tensor.items()} == dict.fromkeys(NAMES, 4)
    assert sum(counts.uses for counts in stats.window_layers.values()) * 4 == sum(
        counts.uses for counts in stats.layers.values()
    )


def test_a_pause_does_not_empty_the_window() -> None:
    now = [0.0]
    cache = WeightCache(Memory(), Share(0.5), background=False, window_s=16.0, clock=lambda: now[0])
    for _ in range(4):
        with cache.computing():
            scan(cache)
            now[0] += 2.0
    cache.optimize()
    counts = {name: cache.tracker.count(name) for name in NAMES}
    kept = set(cache._kept.ready)
    now[0] += 3600.0
    cache.optimize()
    assert {name: cache.tracker.count(name) for name in NAMES} == counts
    assert min(counts.values()) > 0
    assert set(cache._kept.ready) == kept
    assert cache.stats().window.uses == 4 * len(NAMES)


@pytest.mark.parametrize(
    ("budget", "message"),
    [(PER_LAYER * SIZE - 1, f"give at least {PER_LAYER * SIZE:,}"), (Share(0.01), "give at least")],
)
def test_a_budget_that_no_layer_fits_is_refused(budget: int | Share, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightCache(Memory(), budget)


def test_experts_are_entries_of_their_own_and_the_hot_ones_stay() -> None:
    sizes = {f"blk.{layer}.ffn_up_exps.weight#{expert}": SIZE for layer in range(4) for expert in range(16)}
    now = [0.0]
    cache = WeightCache(Memory(sizes), Share(0.5), background=False, window_s=16.0, clock=lambda: now[0])
    choose = random.Random(1)

    def passes(count: int, hot: range) -> float:
        before = cache.stats()
        for _ in range(count):
            with cache.computing():
                now[0] += 0.5
                for layer in range(4):
                    for expert in choose.choices([*hot], k=3) + choose.choices(range(16), k=1):
                        cache.get(f"blk.{layer}.ffn_up_exps.weight#{expert}")
            cache.optimize()
        return (cache.stats() - before).byte_hit_rate

    passes(32, range(4))
    assert passes(32, range(4)) >= 0.8
    passes(32, range(12, 16))  # the hot set moves; one window later it is kept
    assert passes(32, range(12, 16)) >= 0.8


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("budget", ["60%", "80%"])
def test_a_small_budget_changes_no_bit(tmp_path: Path, backend: str, budget: str) -> None:
    path = tmp_path / "tiny.gguf"
    Tiny(type="Q4_1", layers=6).write(path)
    with everwarm.load(path, backend=backend) as whole:
        expected = whole.logits([1, 2, 3, 4, 5])
    with everwarm.load(path, backend=backend, weight_budget=budget) as small:
        for _ in range(3):
            assert (small.logits([1, 2, 3, 4, 5]) == expected).all()
        stats = small.weights.stats()
        assert not stats.mapped
        assert stats.peak_bytes <= stats.budget + _whole_ring(small.weights)
        assert stats.byte_hit_rate > 0


def _whole_ring(cache: WeightCache) -> int:
    """The ring if nothing were kept."""
    streamed = [sum(cache._sizes[name] for name in stage) for stage in cache._ring.stages]
    return ring_bytes(streamed, cache._ring.ahead)


def test_bad_budgets_and_names_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    Tiny().write(path)
    for budget in ("1KB", "-5", "lots", "200%"):
        with pytest.raises(EverwarmError) as refused:
            everwarm.load(path, weight_budget=budget)
        assert "\n" not in str(refused.value)
    with everwarm.load(path) as llm, pytest.raises(EverwarmError, match=r"blk.0.attn_q.weight"):
        llm.weights.get("blk.0.attn_qq.weight")


def test_without_a_budget_weights_and_what_is_on_its_way_take_four_fifths_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = sum(Memory().sizes.values())
    for available, mapped in ((2 * total, True), (int(total / 0.8) + 1, True), (int(total / 0.8) - 10, False)):
        monkeypatch.setattr(cache_module, "available_bytes", lambda available=available: available)
        cache = WeightCache(Memory(), background=False)
        assert cache.mapped == mapped
        scan(cache)
        assert cache.stats().peak_bytes <= max(0.8 * available, total if mapped else 0)
        if not mapped:
            assert cache.budget + cache.stats().ring_bytes <= 0.8 * available
        cache.close()
