"""A cache without tensors: what a policy and the tracker do with a trace of accesses, one thread, simulated time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from everwarm.weights.cache.policy import Item, Policy
from everwarm.weights.cache.tracker import AccessTracker


@dataclass
class Clock:
    """Time that goes on when it is told to."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Simulated:
    """In: accesses, pass by pass. Out: bytes hit and accessed, evictions, and what is kept."""

    policy: Policy
    sizes: Mapping[str, int]
    budget: int
    cost_s: Callable[[str], float]
    window_s: float = 60.0
    pass_s: float = 1.0
    clock: Clock = field(default_factory=Clock)
    kept: dict[str, Item] = field(default_factory=dict)
    hit_bytes: int = 0
    accessed_bytes: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        self.tracker = AccessTracker(self.window_s, self.clock)

    @property
    def hit_rate(self) -> float:
        return self.hit_bytes / self.accessed_bytes

    @property
    def kept_bytes(self) -> int:
        return sum(item.size for item in self.kept.values())

    def run(self, trace: Sequence[str], pass_length: int) -> None:
        for start in range(0, len(trace), pass_length):
            for name in trace[start : start + pass_length]:
                self.access(name)
            self.clock.now += self.pass_s
            self.tracker.tick()
            self.kept = {name: self._item(name) for name in self.kept}

    def access(self, name: str) -> None:
        self.tracker.record(name)
        self.policy.touch(name)
        self.accessed_bytes += self.sizes[name]
        if name in self.kept:
            self.hit_bytes += self.sizes[name]
            return
        self.tracker.materialised(name, self.cost_s(name))
        free = self.budget - self.kept_bytes
        victims = self.policy.admit(self._item(name), self.kept, free, lambda _: True)
        if victims is not None:
            for victim in victims:
                del self.kept[victim]
            self.evictions += len(victims)
            self.kept[name] = self._item(name)
        assert self.kept_bytes <= self.budget

    def optimize(self) -> None:
        items = [self._item(name) for name in self.sizes if self.tracker.seconds(name) is not None]
        planned = self.policy.plan(items, self.budget, self.kept.keys())
        self.evictions += len(self.kept.keys() - planned)
        for name in planned - self.kept.keys():
            self.tracker.materialised(name, self.cost_s(name))
        self.kept = {name: self._item(name) for name in self.sizes if name in planned}
        assert self.kept_bytes <= self.budget

    def forget_counters(self) -> None:
        self.hit_bytes = self.accessed_bytes = self.evictions = 0

    def _item(self, name: str) -> Item:
        return Item(name, self.sizes[name], self.tracker.seconds(name) or 0.0, self.tracker.rate(name))
