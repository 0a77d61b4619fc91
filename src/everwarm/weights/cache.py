"""The weight cache: the one owner of a model's tensors in the form that the kernels compute with.

In: a source and a budget in bytes. Out: tensors by name. If the budget holds the model, everything is kept: a hit is
one look-up in a dictionary, takes no lock, and no policy runs. If not, a policy says what is kept, in memory of its
own; the rest is read or built for each use, one or more layers ahead of the computation, through a ring of bounded
size. A tensor is in use as long as anyone refers to it: its memory is neither reused nor taken for free before that.

Threads: a miss is materialised by one thread while others that want the same tensor wait for it; no lock is held
meanwhile. `+= 1` on an entry of a dictionary is whole in CPython: threads are switched at calls and loops only.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.config import Share
from everwarm.errors import ConfigError, RequestError
from everwarm.kernels.backend import Weight
from everwarm.weights.counters import Counters
from everwarm.weights.memory import U8, Buffers, available_bytes, lock_in_ram, resident_share, touch, when_unused
from everwarm.weights.pack import checksum
from everwarm.weights.place import coming, largest_layer, place_of, ring_bytes, stages
from everwarm.weights.policy import POLICIES, Item
from everwarm.weights.source import Built, Source
from everwarm.weights.stats import Counts, WeightStats
from everwarm.weights.tracker import AccessTracker

_log = logging.getLogger(__name__)

WINDOW_S = 60.0
AHEAD = 1
_PATIENCE_S = 0.005  # how long the prefetcher sleeps before it looks again whether the ring has room


@dataclass(frozen=True, slots=True)
class Preloaded:
    """What `preload` did."""

    loaded: int  # tensors that this call materialised
    left_out: tuple[str, ...]  # tensors that do not fit into the budget
    left_out_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that `verify` found."""

    tensor: str
    what: str


class _Flight:
    """A tensor on its way: from the moment someone starts to materialise it until it is kept or handed over."""

    __slots__ = ("built", "by_prefetch", "done", "error", "tensor")

    def __init__(self, by_prefetch: bool) -> None:
        self.by_prefetch = by_prefetch
        self.done = threading.Event()
        self.tensor: Weight | None = None
        self.built: Built | None = None  # in the ring: whether it is kept is decided when it is used
        self.error: BaseException | None = None


class WeightCache:
    """Tensors by name, under a budget."""

    def __init__(
        self,
        source: Source,
        budget: int | Share | None = None,
        policy: str = "value",
        *,
        ahead: int = AHEAD,
        background: bool = True,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._sizes = dict(source.sizes)
        self.total_bytes = sum(self._sizes.values())
        self.budget = self._checked(budget)
        self._policy = POLICIES[policy]()
        self._ahead, self._background = ahead, background
        self._clock, self._window_s = clock, window_s
        self.tracker = AccessTracker(window_s, clock)
        self._stages, self._stage_of_layer = stages(self._sizes)
        self._mapped = self.total_bytes <= self.budget
        self._in_order = self._watched = self._policy.needs_order and not self._mapped

        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._buffers = Buffers()
        self._ready: dict[str, Weight] = {}  # what is kept; all that a hit looks at
        self._data: dict[str, U8] = {}  # its bytes
        self._pinned: dict[str, int] = {}  # name -> address of its bytes
        self._preloaded: dict[str, str | None] = {}  # name -> checksum, where the source has none
        self._flights: dict[str, _Flight] = {}
        self._sources: dict[str, Source] = {}  # tensors that come from elsewhere, since the source turned out damaged
        self._wanted: frozenset[str] | None = None  # the policy's plan; None before there is one
        self._refused: set[str] = set()  # what the policy would not keep, until it is asked for a plan again
        self._kept_bytes = self._live_bytes = self._peak_bytes = 0
        self._dead: deque[int] = deque()  # sizes of memory that nobody uses any more; appended to by finalizers

        self._counters = Counters(self._sizes, window_s, clock())
        self._hits = self._counters.hits
        self._unexpected = 0
        self._warned = False

        self._queue: deque[str] = deque()
        self._queued: set[str] = set()
        self._closed = False
        self._worker: threading.Thread | None = None
        self.instance = uuid.uuid4().hex[:12]
        self.created = time.time()
        _log.info("weight cache %s: made, %s", self.instance, self.describe())

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

    def enter(self, layer: int) -> None:
        """The computation begins with this layer: reading ahead for the next ones may begin."""
        if self._mapped or not self._background or not self._ahead:
            return
        at = self._stage_of_layer.get(layer)
        if at is not None:
            needed = coming(at, len(self._stages), self._ahead)
            self._drop_stale({name for stage in needed for name in self._stages[stage]})
            for stage in needed[1:]:
                self._ask_ahead(self._stages[stage])

    def prefetch(self, layer: int) -> None:
        """Materialise what is missing of a layer, in the background. Does nothing if that is switched off."""
        if self._background and layer in self._stage_of_layer:
            self._ask_ahead(self._stages[self._stage_of_layer[layer]])

    def tick(self) -> None:
        """Once per forward pass: the tracker learns what was used."""
        self._watched = self._in_order or _log.isEnabledFor(logging.DEBUG)
        now = self._clock()
        if not self._counters.is_time(now):
            return
        with self._lock:
            self._tell_tracker(now)

    # What is kept

    def preload(
        self, names: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Preloaded:
        """Materialise and pin now; it counts as `preloaded`, not as misses. Progress: (bytes done, bytes in all).

        What does not fit into the budget is left out, and said; nothing that is pinned is evicted for it.
        """
        wanted = list(self._sizes) if names is None else [self._known(name) for name in names]
        chosen = self._fitting(wanted)
        left_out = tuple(name for name in wanted if name not in chosen)
        total = sum(self._sizes[name] for name in wanted if name in chosen)
        done = loaded = 0
        for name in wanted:
            if name not in chosen:
                continue
            loaded += self._preload_one(name)
            done += self._sizes[name]
            if progress:
                progress(done, total)
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
        if layer not in self._stage_of_layer:
            raise RequestError(f"layer {layer}: this model has {len(self._stage_of_layer)}, from 0 on")
        places = {name: place_of(name) for name in self._sizes}
        return self.preload(
            name for name, place in places.items() if place.layer == layer and part in ("both", place.part)
        )

    def pin(self, names: Iterable[str]) -> None:
        """Exempt from eviction, and materialise what is not there. All of them or, if they do not fit, none."""
        asked = [self._known(name) for name in names]
        with self._lock:
            more = sum(self._sizes[name] for name in dict.fromkeys(asked) if name not in self._pinned)
            pinned = self._pinned_bytes()
            if pinned + more > self.budget:
                raise ConfigError(
                    f"pin: {more:,} bytes more than the {pinned:,} that are pinned exceed the budget of "
                    f"{self.budget:,}: pin less, or raise the budget to {pinned + more:,}"
                )
        for name in asked:
            self._preload_one(name)

    def unpin(self, names: Iterable[str]) -> None:
        """Make evictable again."""
        with self._lock:
            for name in names:
                self._pinned.pop(self._known(name), None)
                self._preloaded.pop(name, None)

    def evict(self, names: Iterable[str]) -> None:
        """Stop keeping these. What is in use stays in memory, and counted, until its last user is done."""
        with self._lock:
            asked = [self._known(name) for name in names]
            for name in asked:
                if name in self._pinned:
                    raise RequestError(f"evict: {name} is pinned; unpin it first")
            for name in asked:
                self._evict(name)
            self._changed.notify_all()

    def resize(self, budget: int | Share | None) -> None:
        """Another budget. Refused if what is pinned would not fit."""
        checked = self._checked(budget)
        with self._lock:
            if self._pinned_bytes() > checked:
                raise ConfigError(
                    f"resize: {self._pinned_bytes():,} bytes are pinned, more than {checked:,}: unpin some first"
                )
            mapped = self.total_bytes <= checked
            if self._mapped and not mapped:  # what was mapped has to move: the system reclaims mappings in scan order
                for name in list(self._ready):
                    pinned = name in self._pinned
                    self._evict(name, force=True)
                    if pinned:
                        self._pinned[name] = 0
            self.budget, self._mapped = checked, mapped
            self._in_order = self._watched = self._policy.needs_order and not mapped
            self._refused.clear()
            self._wanted = None
            self._drop_stale(set())
            for name in sorted(self._ready, key=self._density):
                if self._kept_bytes <= self.budget:
                    break
                if name not in self._pinned:
                    self._evict(name)
            moved = [name for name, address in self._pinned.items() if not address]
        for name in moved:
            self._preload_one(name)
        self._buffers.trim()
        _log.info("weight cache %s: resized, %s", self.instance, self.describe())

    def optimize(self) -> None:
        """Between requests: ask the policy again what to keep, now that more is known about uses and costs."""
        if self._mapped or not self._policy.replans:
            return
        with self._lock:
            self._tell_tracker(self._clock())
            pinned = set(self._pinned)
            items = [self._item(name) for name in self._sizes if name not in pinned]
            kept = [name for name in self._ready if name not in pinned]
            plan = self._policy.plan(items, self.budget - self._pinned_bytes(), kept)
            self._wanted = frozenset(plan | pinned)
            self._refused.clear()

    def rebuild_from(self, name: str, source: Source) -> None:
        """Take this tensor from another source from now on: it turned out to be damaged in its own."""
        with self._lock:
            self._sources[name] = source
            pinned = name in self._pinned
            self._evict(name, force=True)
        if pinned:
            self._preload_one(name)

    def close(self) -> None:
        """Forget every tensor. What is still in use elsewhere stays valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        with self._lock:
            for name in list(self._flights):
                self._waste(name)
            for store in (self._ready, self._data, self._pinned, self._preloaded):
                store.clear()
            self._kept_bytes = 0
        self._buffers.trim()
        counts = self.stats()
        _log.info(
            "weight cache %s: closed after %d hits, %d misses, %d evictions",
            self.instance, counts.hits, counts.misses, counts.evictions,
        )  # fmt: skip

    # What it tells

    def describe(self) -> str:
        """One line for people."""
        kept = "all mapped" if self._mapped else f"policy {self._policy.name}, {self._ahead} layers ahead"
        return f"{len(self._sizes)} tensors, {self.total_bytes:,} bytes, budget {self.budget:,} ({kept})"

    def verify(self, deep: bool = False) -> list[Problem]:
        """Whether every pinned tensor is there, where it was, in RAM, and all of it within the budget.

        With `deep`, also whether its bytes are those that were built or packed.
        """
        found = []
        with self._lock:
            pinned = dict(self._pinned)
            data = dict(self._data)
        room = self.budget
        for name, address in pinned.items():
            memory = data.get(name)
            room -= self._sizes[name]
            if memory is None or self._ready.get(name) is None:
                found.append(Problem(name, "is pinned, but not there"))
            elif memory.ctypes.data != address:
                found.append(Problem(name, "is not in the memory that it was loaded into"))
            elif resident_share(memory) < 1.0:
                found.append(Problem(name, f"has {resident_share(memory):.0%} of its pages in RAM"))
            elif room < 0:
                found.append(Problem(name, f"is pinned beyond the budget of {self.budget:,} bytes"))
            elif deep:
                expected = self._preloaded.get(name) or self._source_of(name).checksum(name)
                if expected is not None and checksum(memory) != expected:
                    found.append(Problem(name, "holds other bytes than were loaded"))
        return found

    def stats(self) -> WeightStats:
        """Counters since the cache was made, and what it holds now."""
        with self._lock:
            self._settle()
            by_tensor = {name: self._counters.of(name) for name in self._sizes}
            total = Counts()
            layers: dict[int, Counts] = {}
            for name, counts in by_tensor.items():
                total = total + counts
                layer = place_of(name).layer
                if layer is not None:
                    layers[layer] = layers.get(layer, Counts()) + counts
            counted: dict[str, Any] = {field: getattr(total, field) for field in Counts.__dataclass_fields__}
            return WeightStats(
                **counted,
                instance=self.instance,
                created=self.created,
                policy=self._policy.name,
                budget=self.budget,
                mapped=self._mapped,
                tensors=len(self._sizes),
                total_bytes=self.total_bytes,
                resident=len(self._ready),
                resident_bytes=self._live_bytes,
                pinned_bytes=self._pinned_bytes(),
                peak_bytes=self._peak_bytes,
                ring_bytes=self._ring_bytes(),
                unexpected_misses=self._unexpected,
                window=total - self._counters.at_window_start(self._clock()),
                window_s=self._window_s,
                layers=layers,
                by_tensor=by_tensor,
            )

    def totals(self) -> Counts:
        """Just the counters, cheaply enough to ask before and after each generation."""
        return self._counters.totals()

    # Inside

    def _checked(self, budget: int | Share | None) -> int:
        """The budget in bytes; a ConfigError if no layer fits into it."""
        if budget is None:
            available = available_bytes()
            budget = self.total_bytes if self.total_bytes <= available else int(0.8 * available)
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
                self._settle()
                if self._in_order:
                    self._policy.touch(name)
                tensor = self._ready.get(name)
                if tensor is not None:
                    self._hits[name] += 1
                    return tensor
                flight = self._flights.get(name)
                if flight is None:
                    flight = self._flights[name] = _Flight(by_prefetch=False)
                    self._unqueue(name)
                    break
                if flight.by_prefetch and flight.done.is_set():
                    del self._flights[name]
                    self._counters.prefetch_hits[name] += 1
                    if flight.built is not None:
                        self._keep(name, flight.built, pinned=False)
                    self._changed.notify_all()
                    _log.debug("prefetch hit %s", name)
                    return flight.tensor
            started = time.perf_counter()
            flight.done.wait()
            with self._lock:
                self._counters.stall_s[name] += time.perf_counter() - started
                if flight.error is not None:
                    raise flight.error
                if not flight.by_prefetch:
                    self._hits[name] += 1
                    return flight.tensor
        return self._materialise(name, flight, self._counters.misses)

    def _preload_one(self, name: str) -> bool:
        """Keep and pin one tensor. Whether this call materialised it."""
        while True:
            with self._lock:
                if name in self._ready:
                    self._pin(name)
                    return False
                flight = self._flights.get(name)
                if flight is not None and flight.by_prefetch and flight.done.is_set():
                    self._waste(name)
                    flight = None
                if flight is None:
                    flight = self._flights[name] = _Flight(by_prefetch=False)
                    break
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
        self._materialise(name, flight, self._counters.preloads)
        return True

    def _materialise(self, name: str, flight: _Flight, counter: dict[str, int] | None) -> Weight:
        """Build or read one tensor, without the lock; then keep it if there is room, else just hand it over."""
        preload, prefetch = counter is self._counters.preloads, counter is None
        started = time.perf_counter()
        try:
            built = self._source_of(name).build(name, None if self._mapped else self._buffers)
            if preload:
                self._settle_in(name, built)
        except BaseException as error:
            with self._lock:
                flight.error = error
                del self._flights[name]
                flight.done.set()
            raise
        elapsed = time.perf_counter() - started
        with self._lock:
            self._settle()
            size = self._sizes[name]
            self._live_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            when_unused(built.root, self._dead.append, size)
            self._counters.builds[name] += 1
            self._counters.materialise_s[name] += elapsed
            self.tracker.materialised(name, elapsed if built.cost_s is None else built.cost_s)
            if counter is not None:
                counter[name] += 1
            if not preload and not prefetch:
                self._counters.stall_s[name] += elapsed
                self._note_miss(name)
            flight.tensor = built.tensor
            if prefetch and not self._mapped:
                flight.built = built  # it was read for its next use, so that use is no hit, even if it is kept then
            else:
                self._keep(name, built, pinned=preload)
                del self._flights[name]
            flight.done.set()
            self._changed.notify_all()
        return built.tensor

    def _note_hit(self, name: str) -> None:
        _log.debug("hit %s", name)
        if self._in_order:
            self._policy.touch(name)

    def _note_miss(self, name: str) -> None:
        _log.debug("miss %s", name)
        if name in self._preloaded:
            self._unexpected += 1
            cause = "its entry is gone" if name in self._pinned else "it was unpinned and evicted"
            _log.warning("weight cache %s: unexpected miss of %s: %s", self.instance, name, cause)

    def _settle_in(self, name: str, built: Built) -> None:
        """What preloading does beyond materialising: pages into RAM, locked there if allowed; a checksum to compare."""
        touch(built.data)
        if not lock_in_ram(built.data) and not self._warned:
            self._warned = True
            _log.warning(
                "weight cache %s: the system does not let this process lock its weights in RAM (`ulimit -l`); "
                "they are in RAM now, but may be paged out when memory gets short",
                self.instance,
            )
        known = self._source_of(name).checksum(name)
        self._preloaded[name] = checksum(built.data) if known is None else None

    def _keep(self, name: str, built: Built, pinned: bool) -> None:
        """Put a tensor into the place that the policy gives it."""
        if not self._mapped and not pinned:
            if name in self._refused or (self._wanted is not None and name not in self._wanted):
                return
            victims = self._room_for(name)
            if victims is None:
                self._refused.add(name)
                return
            for victim in victims:
                self._evict(victim)
        elif pinned:
            for victim in sorted(self._ready, key=self._density):
                if self._kept_bytes + self._sizes[name] <= self.budget:
                    break
                if victim not in self._pinned:
                    self._evict(victim)
        self._ready[name], self._data[name] = built.tensor, built.data
        self._kept_bytes += self._sizes[name]
        if pinned:
            self._pin(name)

    def _room_for(self, name: str) -> list[str] | None:
        """Whom to evict for it; None if it should not be kept."""
        free = self.budget - self._kept_bytes
        if self._wanted is None:
            item = self._item if self._policy.replans else self._item_of_size
            kept = {other: item(other) for other in self._ready}
            return self._policy.admit(item(name), kept, free, lambda other: other not in self._pinned)
        victims: list[str] = []
        for other in sorted((o for o in self._ready if o not in self._wanted), key=self._density):
            if free >= self._sizes[name]:
                break
            if other not in self._pinned:
                victims.append(other)
                free += self._sizes[other]
        return victims if free >= self._sizes[name] else None

    def _pin(self, name: str) -> None:
        self._pinned[name] = self._data[name].ctypes.data
        self._preloaded.setdefault(name, None)

    def _evict(self, name: str, force: bool = False) -> None:
        if name not in self._ready or (name in self._pinned and not force):
            return
        _log.debug("evict %s", name)
        del self._ready[name], self._data[name]
        self._kept_bytes -= self._sizes[name]
        self._counters.evictions[name] += 1
        self._refused.clear()

    def _item(self, name: str) -> Item:
        cost = self.tracker.seconds(name)
        return Item(name, self._sizes[name], self._guess_s(name) if cost is None else cost, self.tracker.rate(name))

    def _item_of_size(self, name: str) -> Item:
        """For a policy that does not ask what a tensor is worth: rates of all tensors at each miss cost 0.3 ms."""
        return Item(name, self._sizes[name], 0.0, 0.0)

    def _guess_s(self, name: str) -> float:
        """Seconds to materialise what never was: as a disk of 1 GB/s would take."""
        return self._sizes[name] / 1e9

    def _density(self, name: str) -> float:
        return self._item(name).density

    def _pinned_bytes(self) -> int:
        return sum(self._sizes[name] for name in self._pinned)

    def _fitting(self, wanted: Sequence[str]) -> frozenset[str]:
        """Of what should be preloaded, what fits beside what is pinned already."""
        with self._lock:
            room = self.budget - sum(self._sizes[name] for name in self._pinned if name not in wanted)
            if sum(self._sizes[name] for name in wanted) <= room:
                return frozenset(wanted)
            pinned = [name for name in wanted if name in self._pinned]
            rest = [self._item(name) for name in wanted if name not in self._pinned]
            rest = [Item(item.name, item.size, item.cost_s, item.rate or 1.0) for item in rest]
            room -= sum(self._sizes[name] for name in pinned)
            return frozenset(pinned) | POLICIES["value"]().plan(rest, room, ())

    def _settle(self) -> None:
        """Count memory off that nobody uses any more."""
        while self._dead:
            self._live_bytes -= self._dead.popleft()

    def _tell_tracker(self, now: float) -> None:
        for name, uses in self._counters.new_uses():
            self.tracker.record(name, uses)
        self.tracker.tick()
        self._counters.remember(now)

    # The ring

    def _ring_bytes(self) -> int:
        """Most that may be on its way beside what is kept: what is streamed of `ahead` layers and the one in use."""
        if self._mapped:
            return 0
        streamed = [sum(self._sizes[n] for n in stage if n not in self._ready) for stage in self._stages]
        return ring_bytes(streamed, self._ahead)

    def _ask_ahead(self, names: Iterable[str]) -> None:
        missing = [n for n in names if n not in self._ready and n not in self._flights and n not in self._queued]
        if not missing:
            return
        with self._lock:
            if self._closed:
                return
            self._queue.extend(missing)
            self._queued.update(missing)
            if self._worker is None:
                self._worker = threading.Thread(target=self._read_ahead, name="everwarm-prefetch", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not (self._queue and self._ring_has_room(self._queue[0])):
                    self._changed.wait(_PATIENCE_S if self._queue else None)
                    self._settle()
                if self._closed:
                    return
                name = self._queue.popleft()
                self._queued.discard(name)
            self._read_one(name)

    def _read_one(self, name: str) -> None:
        with self._lock:
            if self._closed or name in self._ready or name in self._flights:
                return
            flight = self._flights[name] = _Flight(by_prefetch=True)
        try:
            self._materialise(name, flight, None)
        except Exception as error:  # whoever needs it will try again, and get the error
            _log.warning("weight cache %s: prefetch of %s failed: %s", self.instance, name, error)

    def _ring_has_room(self, name: str) -> bool:
        on_the_way = self._live_bytes - self._kept_bytes
        self._buffers.spare_bytes = self._ring_bytes()
        return on_the_way <= 0 or on_the_way + self._sizes[name] <= self._buffers.spare_bytes

    def _drop_stale(self, needed: set[str]) -> None:
        """Forget what was read ahead for layers that the computation has left without using it."""
        with self._lock:
            for name, flight in list(self._flights.items()):
                if name not in needed and flight.by_prefetch and flight.done.is_set():
                    self._waste(name)
            for name in self._queued - needed:
                self._unqueue(name)

    def _unqueue(self, name: str) -> None:
        """Nobody needs to read it ahead any more."""
        if name in self._queued:
            self._queued.discard(name)
            self._queue.remove(name)

    def _waste(self, name: str) -> None:
        flight = self._flights.get(name)
        if flight is not None and flight.by_prefetch:
            del self._flights[name]
            self._counters.prefetch_wasted[name] += 1
