"""The weight cache: the one owner of a model's tensors in the form that the kernels compute with.

In: a source and a budget in bytes. Out: tensors by name. If the budget holds the model, everything is kept: a hit is
one look-up in a dictionary, takes no lock, and no policy runs. If not, a policy says what is kept (`kept`), in memory
of its own; the rest is read or built for each use, one or more layers ahead of the computation, through a ring of
bounded size (`ring`). A tensor is in use as long as anyone refers to it: its memory is neither reused nor taken for
free before that.

Threads: a miss is materialised by one thread while others that want the same tensor wait for it; no lock is held
meanwhile. `+= 1` on an entry of a dictionary is whole in CPython: threads are switched at calls and loops only.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

from everwarm.errors import ConfigError, RequestError
from everwarm.kernels.backend import F32, Weight
from everwarm.sizes import Share
from everwarm.weights.cache.counters import Counters
from everwarm.weights.cache.kept import Kept, Pin, Problem
from everwarm.weights.cache.place import experts_by_layer, largest_layer, place_of, ring_bytes, stages
from everwarm.weights.cache.ring import Flight, Ring
from everwarm.weights.cache.stats import Counts, WeightStats
from everwarm.weights.cache.tracker import AccessTracker, BusyClock
from everwarm.weights.memory import U8, Buffers, InUse, available_bytes, lock_in_ram, touch
from everwarm.weights.pack.file import checksum
from everwarm.weights.pack.source import Source

_log = logging.getLogger(__name__)

WINDOW_S = 60.0
SHARE_OF_MEMORY = 0.8  # that weights take by themselves, with what is on its way; KV and activations need the rest
AHEAD = 1  # layers to read ahead; what has to be built ahead would take the processor from the computation


@dataclass(frozen=True, slots=True)
class Preloaded:
    """What `preload` did."""

    loaded: int  # tensors that this call materialised
    left_out: tuple[str, ...]  # tensors that do not fit into the budget
    left_out_bytes: int


class WeightCache:
    """Tensors by name, under a budget."""

    def __init__(
        self,
        source: Source,
        budget: int | Share | None = None,
        policy: str = "value",
        *,
        ahead: int | None = None,
        background: bool = True,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._sources: dict[str, Source] = {}  # tensors that come from elsewhere, since the source turned out damaged
        self._sizes = dict(source.sizes)
        self.total_bytes = sum(self._sizes.values())
        self._lock = threading.RLock()
        self._clock, self._window_s = BusyClock(clock), window_s
        self.tracker = AccessTracker(window_s, self._clock)
        self._counters = Counters(self._sizes, window_s, self._clock())
        self._ahead = (AHEAD if source.reads else 0) if ahead is None else ahead
        self._kept = Kept(self._sizes, self._checked(budget), policy, self.tracker, self._counters.evictions)
        self._buffers, self._in_use = Buffers(), InUse()
        self._ring = Ring(
            self._sizes, self._ahead, background, self._lock, self._kept, self._in_use,
            lambda name: self._begin(name, ahead=True), self._read_ahead, self._counters.prefetch_wasted,
        )  # fmt: skip
        self._ready, self._hits = self._kept.ready, self._counters.hits  # all that a hit needs
        self._mapped = self._kept.holds_all
        self._in_order = self._watched = self._kept.needs_order
        self._unexpected = 0
        self._warned = self._closed = False
        self._before_release: list[Callable[[], None]] = []
        self.instance = uuid.uuid4().hex[:12]
        self.created = time.time()
        _log.info("weight cache %s: made, %s", self.instance, self.describe())

    @property
    def budget(self) -> int:
        return self._kept.budget

    @property
    def resident_bytes(self) -> int:
        """Kept, in the ring, and evicted but still in use."""
        return self._in_use.bytes

    @property
    def mapped(self) -> bool:
        """Whether everything fits, so that a pack is used where it is mapped."""
        return self._mapped

    # Use

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def get(self, name: str) -> Weight:
        """The tensor. It stays valid as long as it is referred to, even if it is evicted meanwhile."""
        tensor = self._ready.get(name)
        if tensor is None:
            return self._fetch(name)
        self._hits[name] += 1
        if self._watched:
            self._note_hit(name)
        return tensor

    def use_again(self, names: Sequence[str], tensors: Sequence[Weight]) -> bool:
        """Count a use of each, as `get` does, if all of them are still what `get` would return; else none."""
        if not all(map(is_, map(self._ready.get, names), tensors)):
            return False
        for name in names:
            self._hits[name] += 1
            if self._watched:
                self._note_hit(name)
        return True

    def table(self, name: str) -> Weight | None:
        """A tensor to look some rows up in; None where it is not kept: then `rows` has them.

        A look-up is no use of the whole tensor: it is not counted, and no reason to keep or to stream it.
        """
        table = self._ready.get(name)
        return self.get(name) if table is None and self._mapped else table

    def rows(self, name: str, numbers: Sequence[int]) -> F32:
        """Some rows of a matrix, read by themselves."""
        return self._source_of(name).rows(name, numbers)

    def as_built(self) -> bool:
        """Whether everything that is used where it is mapped is what was packed. What is not is built again from the
        model file, and used from now on. Asked before a step, and after it: then the step must not count.
        """
        altered = self._source.altered() if self._mapped else ()
        for name in altered:
            _log.error("weight cache %s: tensor %s was altered on disk; built again", self.instance, name)
            self.rebuild_from(name, self._source.mended())
        return not altered

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A forward pass. Only while there is one does the window of the access tracker move on."""
        self._watched = self._in_order or _log.isEnabledFor(logging.DEBUG)
        self._clock.start()
        try:
            yield
        finally:
            now = self._clock.stop()
            if not self._mapped:
                self._kept.end_pass()
            if self._counters.is_time(now):
                with self._lock:
                    self._tell_tracker(now)

    def enter(self, layer: int) -> None:
        """The computation begins with this layer: reading ahead for the next ones may begin."""
        if not self._mapped:
            with self._lock:
                self._ring.enter(layer)

    def expect(self, names: Iterable[str]) -> None:
        """Experts that a layer ahead will probably use: they are read in the background, if they are not kept."""
        if not self._mapped:
            with self._lock:
                self._ring.expect(names)

    def prefetch(self, layer: int) -> None:
        """Materialise what is missing of a layer, in the background. Does nothing if that is switched off."""
        with self._lock:
            self._ring.prefetch(layer)

    # What is kept

    def preload(
        self, names: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Preloaded:
        """Materialise and pin now; it counts as `preloaded`, not as misses. Progress: (bytes done, bytes in all).

        What does not fit into the budget is left out, and said; nothing that is pinned is evicted for it.
        """
        wanted = list(self._sizes) if names is None else [self._known(name) for name in names]
        with self._lock:
            fitting = self._kept.fitting(wanted)
            chosen = [name for name in wanted if name in fitting]
            self._promise(chosen)
        loaded = self._load(chosen, progress)
        left_out = tuple(name for name in wanted if name not in fitting)
        bytes_left_out = sum(self._sizes[name] for name in left_out)
        if left_out:
            _log.warning(
                "weight cache %s: %d of %d tensors (%s bytes) do not fit into the budget of %s bytes and are streamed",
                self.instance, len(left_out), len(wanted), f"{bytes_left_out:,}", f"{self.budget:,}",
            )  # fmt: skip
        return Preloaded(loaded, left_out, bytes_left_out)

    def preload_layer(self, layer: int, part: str = "both") -> Preloaded:
        """`preload` for the attention, the feed-forward or both parts of one layer."""
        if part not in ("attention", "feed-forward", "both"):
            raise RequestError(f"part {part!r}: expected attention, feed-forward or both")
        if layer not in self._ring.layers:
            raise RequestError(f"layer {layer}: this model has {len(self._ring.layers)}, from 0 on")
        places = {name: place_of(name) for name in self._sizes}
        return self.preload(
            name for name, place in places.items() if place.layer == layer and part in ("both", place.part)
        )

    def pin(self, names: Iterable[str]) -> None:
        """Exempt from eviction, and materialise what is not there. All of them or, if they do not fit, none."""
        asked = [self._known(name) for name in names]
        with self._lock:
            pinned = self._kept.pinned_bytes
            more = sum(self._sizes[name] for name in dict.fromkeys(asked) if name not in self._kept.pinned)
            if pinned + more > self.budget:
                raise ConfigError(
                    f"pin: {more:,} bytes more than the {pinned:,} that are pinned exceed the budget of "
                    f"{self.budget:,}: pin less, or raise the budget to {pinned + more:,}"
                )
            self._promise(asked)
        self._load(asked)

    def unpin(self, names: Iterable[str]) -> None:
        """Make evictable again."""
        with self._lock:
            for name in names:
                self._kept.pinned.pop(self._known(name), None)

    def evict(self, names: Iterable[str]) -> None:
        """Stop keeping these. What is in use stays in memory, and counted, until its last user is done."""
        with self._lock:
            asked = [self._known(name) for name in names]
            for name in asked:
                if name in self._kept.pinned:
                    raise RequestError(f"evict: {name} is pinned; unpin it first")
            self._tell_before_release()
            for name in asked:
                self._kept.evict(name)
            self._ring.notify()

    def before_release(self, callback: Callable[[], None]) -> None:
        """Have a function called before tensors are evicted: whoever refers to some lets go of them."""
        self._before_release.append(callback)

    def _tell_before_release(self) -> None:
        for callback in self._before_release:
            callback()

    def resize(self, budget: int | Share | None) -> None:
        """Another budget. Refused if what is pinned would not fit."""
        checked = self._checked(budget)
        with self._lock:
            pinned = self._kept.pinned_bytes
            if pinned > checked:
                raise ConfigError(f"resize: {pinned:,} bytes are pinned, more than {checked:,}: unpin some first")
            if self._mapped and self.total_bytes > checked:
                # What was mapped has to move: the system reclaims mappings in the order of the scan.
                self._tell_before_release()
                for name in list(self._ready):
                    self._kept.evict(name)
            self._kept.resize(checked)
            self._ring.drop_all_but(set())
            self._mapped = self._kept.holds_all
            self._in_order = self._watched = self._kept.needs_order
            moved = [name for name, pin in self._kept.pinned.items() if pin is None]
        self._load(moved)
        self._buffers.trim()
        _log.info("weight cache %s: resized, %s", self.instance, self.describe())

    def optimize(self) -> None:
        """Between requests: ask the policy again what to keep, now that more is known about uses and costs."""
        if self._mapped or not self._kept.policy.replans:
            return
        with self._lock:
            self._tell_tracker(self._clock())
            self._kept.plan()

    def rebuild_from(self, name: str, source: Source) -> None:
        """Take this tensor from another source from now on: it turned out to be damaged in its own."""
        with self._lock:
            self._sources[name] = source
            self._tell_before_release()
            pinned = name in self._kept.pinned
            self._kept.evict(name)
        if pinned:
            self._load([name])

    def close(self) -> None:
        """Forget every tensor. What is still in use elsewhere stays valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ring.close()
        with self._lock:
            self._tell_before_release()
            self._kept.clear()
        self._buffers.trim()
        counts = self.stats()
        _log.info(
            "weight cache %s: closed after %d hits, %d misses, %d evictions",
            self.instance, counts.hits, counts.misses, counts.evictions,
        )  # fmt: skip

    # What it tells

    def describe(self) -> str:
        """One line for people."""
        kept = "all mapped" if self._mapped else f"policy {self._kept.policy.name}, {self._ring.ahead} layers ahead"
        return f"{len(self._sizes)} tensors, {self.total_bytes:,} bytes, budget {self.budget:,} ({kept})"

    def verify(self, deep: bool = False) -> list[Problem]:
        """Whether every pinned tensor is there, where it was, in RAM, and all of it within the budget.

        With `deep`, also whether its bytes are those that were built or packed.
        """
        with self._lock:
            pinned = dict(self._kept.pinned)
        return self._kept.problems(pinned, deep, lambda name: self._source_of(name).checksum(name))

    def stats(self) -> WeightStats:
        """Counters since the cache was made, and what it holds now."""
        with self._lock:
            by_tensor = {name: self._counters.of(name) for name in self._sizes}
            before = self._counters.at_window_start(self._clock())
            window_by_tensor = {name: counts - before[name] for name, counts in by_tensor.items()}
            total, layers = _summed(by_tensor)
            window, window_layers = _summed(window_by_tensor)
            counted: dict[str, Any] = {field: getattr(total, field) for field in Counts.__dataclass_fields__}
            return WeightStats(
                **counted,
                instance=self.instance,
                created=self.created,
                policy=self._kept.policy.name,
                budget=self.budget,
                mapped=self._mapped,
                tensors=len(self._sizes),
                total_bytes=self.total_bytes,
                resident=len(self._ready),
                resident_bytes=self._in_use.bytes,
                pinned_bytes=self._kept.pinned_bytes,
                peak_bytes=self._in_use.peak,
                ring_bytes=0 if self._mapped else self._ring.size,
                unexpected_misses=self._unexpected,
                window=window,
                window_s=self._window_s,
                layers=layers,
                by_tensor=by_tensor,
                window_layers=window_layers,
                window_by_tensor=window_by_tensor,
            )

    def residency(self) -> dict[int | None, tuple[int, int]]:
        """Bytes of each layer that are in memory, and in all; None: what belongs to no layer."""
        found = dict[int | None, tuple[int, int]]()
        with self._lock:
            ready = frozenset(self._ready)
        for name, size in self._sizes.items():
            layer = place_of(name).layer
            here, whole = found.get(layer, (0, 0))
            found[layer] = here + (size if name in ready else 0), whole + size
        return found

    def totals(self) -> Counts:
        """Just the counters, cheaply enough to ask before and after each generation."""
        return self._counters.totals()

    # Inside

    def _checked(self, budget: int | Share | None) -> int:
        """The budget in bytes; a ConfigError if no layer fits into it."""
        if budget is None:
            room = int(SHARE_OF_MEMORY * available_bytes())
            streamed = [sum(self._sizes[name] for name in stage) for stage in stages(self._sizes)[0]]
            experts = [sum(map(self._sizes.__getitem__, names)) for names in experts_by_layer(self._sizes).values()]
            ring = ring_bytes(streamed, self._ahead) + max(experts, default=0)
            budget = self.total_bytes if self.total_bytes <= room else room - ring
        elif isinstance(budget, Share):
            budget = int(budget.fraction * self.total_bytes)
        least = largest_layer(self._sizes)
        if budget < least:
            raise ConfigError(
                f"a weight budget of {budget:,} bytes is below what the largest layer of this model needs: "
                f"give at least {least:,}"
            )
        return budget

    def _known(self, name: str) -> str:
        if name not in self._sizes:
            self._source.build(name, None)  # raises the file's error, which names the nearest
            raise RequestError(f"no tensor {name}")
        return name

    def _source_of(self, name: str) -> Source:
        return self._sources.get(name, self._source)

    def _fetch(self, name: str) -> Weight:
        """What `get` does when the tensor is not kept: wait for it, take it from the ring, or materialise it."""
        self._known(name)
        while True:
            with self._lock:
                if self._in_order:
                    self._kept.touch(name)
                tensor = self._ready.get(name)
                if tensor is not None:
                    self._hits[name] += 1
                    return tensor
                built = self._ring.take(name)
                if built is not None:
                    # It was read for this use, so this use is no hit, even if it is kept from now on.
                    self._counters.prefetch_hits[name] += 1
                    if self._kept.make_room(name):
                        self._kept.put(name, built)
                    _log.debug("prefetch hit %s", name)
                    return built.tensor
                flight = self._ring.flights.get(name)
                if flight is None:
                    flight = self._begin(name)
                    break
            started = time.perf_counter()
            flight.done.wait()
            with self._lock:
                self._counters.stall_s[name] += time.perf_counter() - started
                if flight.error is not None:
                    raise flight.error
                if not flight.ahead:
                    self._hits[name] += 1
                    return flight.tensor
        return self._miss(name, flight)

    def _promise(self, names: Iterable[str]) -> None:
        """Pin what is there, and what is still to come."""
        for name in names:
            self._kept.pinned.setdefault(name, None)

    def _load(self, names: Sequence[str], progress: Callable[[int, int], None] | None = None) -> int:
        """Materialise what was promised and is not there; how many that were. After an error nothing is owed."""
        total = sum(self._sizes[name] for name in names)
        done = loaded = 0
        try:
            for name in names:
                loaded += self._load_one(name)
                done += self._sizes[name]
                if progress:
                    progress(done, total)
        except BaseException:
            with self._lock:
                for name in filter(self._kept.owes, names):
                    del self._kept.pinned[name]
            raise
        return loaded

    def _load_one(self, name: str) -> bool:
        """Keep a pinned tensor. Whether this call materialised it."""
        while True:
            with self._lock:
                built = self._ring.take(name)
                if built is not None and self._kept.make_room(name):
                    self._kept.put(name, built)
                if name in self._ready:
                    if not self._kept.owes(name):
                        return False
                    data, flight = self._kept.data[name], None
                    break
                flight = self._ring.flights.get(name)
                if flight is None:
                    flight = self._begin(name)
                    break
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
        if flight is not None:
            self._materialise(name, flight, pin=True)
            with self._lock:
                self._counters.preloads[name] += 1
            return True
        pin = self._settle_in(name, data)
        with self._lock:
            if self._kept.owes(name) and self._kept.data.get(name) is data:
                self._kept.pinned[name] = pin
        return False

    def _read_ahead(self, name: str, flight: Flight) -> None:
        """What the ring's thread does. Whoever needs a tensor that failed will try again, and get the error."""
        try:
            self._materialise(name, flight)
        except Exception as error:
            _log.warning("weight cache %s: prefetch of %s failed: %s", self.instance, name, error)

    def _miss(self, name: str, flight: Flight) -> Weight:
        started = time.perf_counter()
        tensor = self._materialise(name, flight)
        with self._lock:
            self._counters.misses[name] += 1
            self._counters.stall_s[name] += time.perf_counter() - started
            _log.debug("miss %s", name)
            if self._kept.pinned.get(name) is not None:
                self._unexpected += 1
                _log.warning("weight cache %s: unexpected miss of %s: its entry is gone", self.instance, name)
        return tensor

    def _begin(self, name: str, ahead: bool = False) -> Flight:
        """Under the lock: nobody has it and nobody is at it, so the caller materialises it. Room is made first.

        What is read ahead goes into the ring, and whether it is kept is decided when it is used.
        """
        kept = (self._mapped or not ahead) and self._kept.make_room(name)
        self._in_use.expect(self._sizes[name])
        self._buffers.limit = self.budget + self._ring.size
        return self._ring.begin(name, ahead, kept)

    def _materialise(self, name: str, flight: Flight, pin: bool = False) -> Weight:
        """Build or read one tensor, without the lock; then keep it if room was made, else just hand it over."""
        started = time.perf_counter()
        try:
            built = self._source_of(name).build(name, None if self._mapped else self._buffers)
            pinned = self._settle_in(name, built.data) if pin else None
        except BaseException as error:
            with self._lock:
                self._in_use.give_up(self._sizes[name])
                if flight.kept:
                    self._kept.give_up(name)
                self._ring.fail(name, flight, error)
            raise
        elapsed = time.perf_counter() - started
        with self._lock:
            self._in_use.hold(built.root, self._sizes[name])
            self._counters.builds[name] += 1
            self._counters.materialise_s[name] += elapsed
            self.tracker.materialised(name, elapsed if built.cost_s is None else built.cost_s)
            if flight.kept:
                self._kept.put(name, built, pinned)
            self._ring.arrive(name, flight, built, waits=flight.ahead and not flight.kept)
        return built.tensor

    def _settle_in(self, name: str, data: U8) -> Pin:
        """What preloading does beyond materialising: pages into RAM, locked there if allowed; a checksum to compare."""
        touch(data)
        if not lock_in_ram(data) and not self._warned:
            self._warned = True
            _log.warning(
                "weight cache %s: the system does not let this process lock its weights in RAM (`ulimit -l`); "
                "they are in RAM now, but may be paged out when memory gets short",
                self.instance,
            )
        known = self._source_of(name).checksum(name)
        return Pin(data.ctypes.data, checksum(data) if known is None else None)

    def _note_hit(self, name: str) -> None:
        _log.debug("hit %s", name)
        if self._in_order:
            self._kept.touch(name)

    def _tell_tracker(self, now: float) -> None:
        for name, uses in self._counters.new_uses():
            self.tracker.record(name, uses)
        self.tracker.tick()
        self._counters.remember(now)


def _summed(by_tensor: Mapping[str, Counts]) -> tuple[Counts, dict[int, Counts]]:
    """All of it, and by layer."""
    total, layers = Counts(), dict[int, Counts]()
    for name, counts in by_tensor.items():
        total = total + counts
        layer = place_of(name).layer
        if layer is not None:
            layers[layer] = layers.get(layer, Counts()) + counts
    return total, layers
