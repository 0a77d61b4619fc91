"""What is kept, and who has to go for it.

In: sizes, a budget, a policy, what the tracker knows. Out: tensors by name. The one owner of what is kept, of what is
pinned and of the policy's plan. Experts take what other tensors leave of the budget (`experts`). Invariant: what is
kept, and what room was made for, is within the budget; what is pinned stays. The cache calls it under its own lock;
`ready` alone is read without.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from everwarm.kernels.backend import Weight
from everwarm.weights.cache.experts import HotExperts
from everwarm.weights.cache.place import is_expert, outside_of_passes
from everwarm.weights.cache.policy import POLICIES, Item
from everwarm.weights.cache.streamed import Streamed
from everwarm.weights.cache.tracker import AccessTracker
from everwarm.weights.memory import U8, resident_share
from everwarm.weights.pack.file import checksum
from everwarm.weights.pack.source import Built

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that `verify` found."""

    tensor: str
    what: str


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a pinned tensor was put, and what its bytes add up to if only we know that."""

    address: int
    checksum: str | None


class Kept:
    """Tensors that are kept, under a budget."""

    def __init__(
        self, sizes: Mapping[str, int], budget: int, policy: str, tracker: AccessTracker, evictions: dict[str, int]
    ) -> None:
        self.policy = POLICIES[policy]()
        self.budget = budget
        self.ready: dict[str, Weight] = {}  # all that a hit looks at
        self.data: dict[str, U8] = {}  # its bytes
        self.pinned: dict[str, Pin | None] = {}  # None: promised, not there yet
        self.bytes = 0  # of what is kept, and of what is coming
        self.streamed = Streamed(sizes)  # what is not kept
        self._coming: set[str] = set()  # room was made for these
        self._wanted: frozenset[str] | None = None  # the policy's plan; None before there is one
        self._refused: set[str] = set()  # what the policy would not keep, until it is asked for a plan again
        self._sizes, self._tracker, self._evictions = sizes, tracker, evictions
        self._total = sum(sizes.values())
        apart = () if self.policy.sees_experts else filter(is_expert, sizes)
        self._experts = HotExperts(tuple(apart), sizes, self.ready.keys(), self._evictable)

    @property
    def holds_all(self) -> bool:
        """Whether everything fits, so that nobody has to go."""
        return self._total <= self.budget

    @property
    def needs_order(self) -> bool:
        """Whether `touch` has to be called for each use, and `end_pass` after each pass."""
        return not self.holds_all and (self.policy.needs_order or bool(self._experts.names))

    def touch(self, name: str) -> None:
        """A use, hit or miss. A hit calls it without the lock."""
        if name in self._experts.names:
            self._experts.use(name)
        else:
            self.policy.touch(name)

    def end_pass(self) -> None:
        self._experts.end_pass()

    @property
    def pinned_bytes(self) -> int:
        return sum(self._sizes[name] for name in self.pinned)

    def owes(self, name: str) -> bool:
        """Whether it was promised to be pinned, and is not yet."""
        return name in self.pinned and self.pinned[name] is None

    # Coming and going

    def make_room(self, name: str) -> bool:
        """Evict who has to go for it; False if it should not be kept. `put` or `give_up` must follow."""
        assert name not in self.ready
        victims = self._victims(name)
        if victims is None:
            if name not in self._experts.names:
                self._refused.add(name)
            return False
        for victim in victims:
            self.evict(victim)
        self._coming.add(name)
        self.bytes += self._sizes[name]
        return True

    def put(self, name: str, built: Built, pin: Pin | None = None) -> None:
        """Keep what room was made for; unless pinned ones, or a smaller budget, have taken that room meanwhile."""
        if name not in self.pinned and self.bytes > self.budget:
            self.give_up(name)
            return
        self._coming.discard(name)
        if name not in self.ready:
            self.streamed.keep(name)
        self.ready[name], self.data[name] = built.tensor, built.data
        if name in self.pinned and pin is not None:
            self.pinned[name] = pin

    def give_up(self, name: str) -> None:
        """It does not come after all."""
        self._coming.discard(name)
        self.bytes -= self._sizes[name]

    def evict(self, name: str) -> None:
        """Of a pinned one the promise stays: the caller puts it back."""
        if name not in self.ready:
            return
        _log.debug("evict %s", name)
        del self.ready[name], self.data[name]
        self.bytes -= self._sizes[name]
        self.streamed.drop(name)
        self._evictions[name] += 1
        self._refused.clear()
        if name in self.pinned:
            self.pinned[name] = None

    def resize(self, budget: int) -> None:
        """Another budget: who is worth least goes, if it is smaller."""
        self.budget = budget
        self._wanted = None
        self._refused.clear()
        for victim in self._cheapest(self.bytes - budget):
            self.evict(victim)

    def clear(self) -> None:
        for store in (self.ready, self.data, self.pinned):
            store.clear()
        self.bytes = sum(self._sizes[name] for name in self._coming)
        self.streamed = Streamed(self._sizes)

    # Plans

    def plan(self) -> None:
        """Ask the policy what to keep, now that more is known about uses and costs."""
        apart = self.pinned.keys() | self._experts.names
        items = [self._item(name) for name in self._sizes if name not in apart]
        kept = [name for name in self.ready if name not in apart]
        plan = self.policy.plan(items, self.budget - self.pinned_bytes, kept)
        self._wanted = frozenset(plan)
        self._refused.clear()

    def fitting(self, wanted: Sequence[str]) -> frozenset[str]:
        """Of what should be pinned, what fits beside what is pinned already."""
        room = self.budget - sum(self._sizes[name] for name in self.pinned if name not in wanted)
        if sum(self._sizes[name] for name in wanted) <= room:
            return frozenset(wanted)
        pinned = [name for name in wanted if name in self.pinned]
        unused = outside_of_passes(self._sizes)
        rest = [self._item(name) for name in wanted if name not in self.pinned and name not in unused]
        rest = [Item(item.name, item.size, item.cost_s, item.rate or 1.0) for item in rest]
        room -= sum(self._sizes[name] for name in pinned)
        return frozenset(pinned) | POLICIES["value"]().plan(rest, room, ())

    # What it tells

    def problems(
        self, pinned: Mapping[str, Pin | None], deep: bool, known: Callable[[str], str | None]
    ) -> list[Problem]:
        """What is wrong with pinned tensors. Takes long if `deep`, so it works on a copy of who is pinned."""
        found = []
        room = self.budget
        for name, pin in pinned.items():
            memory = self.data.get(name)
            room -= self._sizes[name]
            if memory is None or pin is None or self.ready.get(name) is None:
                found.append(Problem(name, "is pinned, but not there"))
            elif memory.ctypes.data != pin.address:
                found.append(Problem(name, "is not in the memory that it was loaded into"))
            elif resident_share(memory) < 1.0:
                found.append(Problem(name, f"has {resident_share(memory):.0%} of its pages in RAM"))
            elif room < 0:
                found.append(Problem(name, f"is pinned beyond the budget of {self.budget:,} bytes"))
            elif deep:
                expected = pin.checksum or known(name)
                if expected is not None and checksum(memory) != expected:
                    found.append(Problem(name, "holds other bytes than were loaded"))
        return found

    # Inside

    def _victims(self, name: str) -> Iterable[str] | None:
        """Whom to evict for it; None if it should not be kept."""
        needed = self.bytes + self._sizes[name] - self.budget
        if name in self.pinned:
            return self._cheapest(needed)
        if self.holds_all:
            return []
        if name in self._refused:
            return None
        if name in self._experts.names:
            return self._experts.make_way(needed, newcomer=name)
        wanted = self._wanted
        if wanted is not None and name not in wanted:
            return None
        leaving = self._experts.make_way_for_others(needed)
        if leaving is not None:
            return leaving
        if wanted is None:
            item = self._item if self.policy.replans else self._item_of_size
            kept = {other: item(other) for other in self.ready if other not in self._experts.names}
            return self.policy.admit(item(name), kept, self.budget - self.bytes, self._evictable)
        victims = self._cheapest(needed, among=lambda other: other not in wanted)
        return victims if sum(self._sizes[victim] for victim in victims) >= needed else None

    def _cheapest(self, needed: int, among: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The least valuable of what may go, as few as give the bytes that are needed, or all."""
        victims: list[str] = []
        if needed > 0:
            for other in sorted(filter(among, filter(self._evictable, self.ready)), key=self._density):
                victims.append(other)
                needed -= self._sizes[other]
                if needed <= 0:
                    break
        return victims

    def _evictable(self, name: str) -> bool:
        return name not in self.pinned

    def _item(self, name: str) -> Item:
        cost = self._tracker.seconds(name)
        # What was never built may take as long as a disk of 1 GB/s would.
        return Item(
            name, self._sizes[name], self._sizes[name] / 1e9 if cost is None else cost, self._tracker.rate(name)
        )

    def _item_of_size(self, name: str) -> Item:
        """For a policy that does not ask what a tensor is worth: rates of all tensors at each miss cost 0.3 ms."""
        return Item(name, self._sizes[name], 0.0, 0.0)

    def _density(self, name: str) -> float:
        return self._item(name).density
