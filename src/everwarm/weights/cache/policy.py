"""Which tensors to keep when the budget does not hold them all.

In: items (size, what building one costs, how often it is used). Out: names. A policy holds no tensors and needs no
locks: the cache asks it under its own, except for `touch`, which a hit calls without one. Whatever a policy answers,
what is kept afterwards fits the budget, and nothing is evicted that `evictable` forbids. Pinned tensors take no part in
`plan`: the cache leaves them out of the items and takes their bytes off the budget.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

# How much denser an item must be than what it replaces. Costs are measured, with noise: of 960 dequantisations most
# took 0.93 to 1.1 x the median of their kind, one in twenty more than 1.7 x. In simulated scans with such costs 1.25
# replaces an entry in every eighth pass, 1.5 none; on a skewed trace (Zipf) 1.5 costs 0.3 % of the hits.
HYSTERESIS = 1.5

_GAIN = 1.02  # what filling a gap must bring, in value of the whole
_ATTEMPTS = 8  # how many ways of filling it are tried


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor as a policy sees it."""

    name: str
    size: int  # bytes
    cost_s: float  # to build it again
    rate: float  # accesses per second

    @property
    def value(self) -> float:
        """Seconds saved per second by keeping it."""
        return self.cost_s * self.rate

    @property
    def density(self) -> float:
        """Value per byte."""
        return self.cost_s * self.rate / (self.size or 1)


class Policy(Protocol):
    """Decides what to keep."""

    name: str
    needs_order: bool  # whether `touch` matters to it
    sees_experts: bool  # whether experts are to it like any other tensor; else `experts` decides about them
    replans: bool  # whether a plan may be anything else than what is kept and fits

    def touch(self, name: str) -> None:
        """An access, hit or miss."""

    def admit(
        self, item: Item, kept: Mapping[str, Item], free: int, evictable: Callable[[str], bool]
    ) -> list[str] | None:
        """Victims whose eviction makes room for `item` (none if it fits in `free`), or None: do not keep it."""

    def plan(self, items: Iterable[Item], budget: int, kept: Collection[str]) -> set[str]:
        """The items to keep, given those that are kept now. Kept names that are not among the items are dropped."""


class ValuePolicy:
    """Keeps what saves most time per byte, and what it has rather than what is hardly better.

    In a cyclic scan all densities are about equal, so what came first stays. Every replacement saves more time than
    what it evicts did, so with steady costs and rates replacements come to an end.
    """

    name = "value"
    needs_order = False
    sees_experts = False
    replans = True

    def touch(self, name: str) -> None:
        pass

    def admit(
        self, item: Item, kept: Mapping[str, Item], free: int, evictable: Callable[[str], bool]
    ) -> list[str] | None:
        if item.size <= free:
            return []
        density, value, needed = item.density / HYSTERESIS, item.value / HYSTERESIS, item.size - free
        worse = [other for other in kept.values() if other.density < density and other.value < value]
        candidates = sorted((other for other in worse if evictable(other.name)), key=lambda other: other.density)
        victims = _spare(_until(candidates, needed), needed)
        if _size(victims) < needed or sum(victim.value for victim in victims) >= value:
            return None
        return [victim.name for victim in victims]

    def plan(self, items: Iterable[Item], budget: int, kept: Collection[str]) -> set[str]:
        """Greedy by density, kept ones counting for more; never of less value in all than what is kept now.

        Greedy leaves a gap where the next item is big: 72 MB hold SmolLM2's layers (66 MB), but not its embeddings
        (30 MB) as well. If there is such a gap, plans are tried that begin with an item left out.
        """
        kept = frozenset(kept)
        # What nobody uses stays while there is room, but is not fetched.
        ranked = [item for item in items if item.size <= budget and (item.value > 0 or item.name in kept)]
        ranked.sort(key=lambda item: (item.name not in kept, -item.density))
        staying = _fill(ranked, budget)
        ranked.sort(key=lambda item: item.density * (HYSTERESIS if item.name in kept else 1), reverse=True)
        greedy = _fill(ranked, budget)
        best = greedy if greedy.value > staying.value else staying

        if _GAIN * best.value < _value_of_parts(ranked, budget):
            left_out = [item for item in ranked if item.name not in best.names]
            firsts = {item.size: item for item in reversed(left_out)}.values()  # the densest of each size
            for first in heapq.nlargest(_ATTEMPTS, firsts, key=lambda item: item.value):
                fill = _fill([first, *ranked], budget)
                if fill.value > _GAIN * best.value:
                    best = fill
        return best.names


class LRUPolicy:
    """Keeps what was used last. On a cyclic scan of more than the budget it never hits: here to be compared with."""

    name = "lru"
    needs_order = True
    sees_experts = True
    replans = False

    def __init__(self) -> None:
        self._uses = itertools.count()
        self._last: dict[str, int] = {}

    def touch(self, name: str) -> None:
        self._last[name] = next(self._uses)

    def admit(
        self, item: Item, kept: Mapping[str, Item], free: int, evictable: Callable[[str], bool]
    ) -> list[str] | None:
        if item.size <= free:
            return []
        oldest_first = sorted((other for other in kept.values() if evictable(other.name)), key=self._last_use)
        victims = _until(oldest_first, item.size - free)
        return (
            [victim.name for victim in victims] if sum(victim.size for victim in victims) >= item.size - free else None
        )

    def plan(self, items: Iterable[Item], budget: int, kept: Collection[str]) -> set[str]:
        """What is kept, less the oldest if the budget has shrunk."""
        oldest_first = sorted((item for item in items if item.name in kept), key=self._last_use)
        dropped = _until(oldest_first, _size(oldest_first) - budget)
        return {item.name for item in oldest_first[len(dropped) :]}

    def _last_use(self, item: Item) -> int:
        return self._last.get(item.name, -1)  # preloaded and never used: the oldest


class PinnedPrefixPolicy:
    """Keeps what came first while there was room: the first layers, as a fixed split of the model would."""

    name = "pinned-prefix"
    needs_order = False
    sees_experts = True
    replans = False

    def touch(self, name: str) -> None:
        pass

    def admit(
        self, item: Item, kept: Mapping[str, Item], free: int, evictable: Callable[[str], bool]
    ) -> list[str] | None:
        return [] if item.size <= free else None

    def plan(self, items: Iterable[Item], budget: int, kept: Collection[str]) -> set[str]:
        """What is kept, less what comes last in the order of the items if the budget has shrunk."""
        return _fill((item for item in items if item.name in kept), budget).names


POLICIES: dict[str, Callable[[], Policy]] = {
    "value": ValuePolicy,
    "lru": LRUPolicy,
    "pinned-prefix": PinnedPrefixPolicy,
}


@dataclass(frozen=True, slots=True)
class _Fill:
    """Items that fit a budget together."""

    names: set[str]
    value: float


def _fill(items: Iterable[Item], budget: int) -> _Fill:
    """The items, in order, each taken if it still fits; an item may come twice."""
    names: set[str] = set()
    value = 0.0
    for item in items:
        if item.size <= budget and item.name not in names:
            names.add(item.name)
            budget -= item.size
            value += item.value
    return _Fill(names, value)


def _value_of_parts(items: Iterable[Item], budget: int) -> float:
    """What the items, in order, would be worth if the last one could be kept in part."""
    value = 0.0
    for item in items:
        if item.size > budget:
            return value + budget * item.density
        budget -= item.size
        value += item.value
    return value


def _size(items: Iterable[Item]) -> int:
    return sum(item.size for item in items)


def _until(items: Iterable[Item], needed: int) -> list[Item]:
    """The first items, no more of them than it takes to have the bytes needed."""
    taken: list[Item] = []
    for item in items:
        if needed <= 0:
            break
        taken.append(item)
        needed -= item.size
    return taken


def _spare(victims: list[Item], needed: int) -> list[Item]:
    """The victims without those that a bigger one made unnecessary; the last are spared first."""
    surplus = _size(victims) - needed
    chosen: list[Item] = []
    for victim in reversed(victims):
        if victim.size <= surplus:
            surplus -= victim.size
        else:
            chosen.append(victim)
    return chosen
