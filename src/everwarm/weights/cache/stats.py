"""What a weight cache tells about itself.

Counters only ever grow while a cache lives; two snapshots subtracted give what happened between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened to some tensors: all, those of a layer, or one."""

    hits: int = 0  # served from memory that is kept
    prefetch_hits: int = 0  # served from the ring, read ahead of use
    misses: int = 0  # built or read while the computation waited
    preloaded: int = 0  # built by `preload`: no miss
    evictions: int = 0
    prefetch_wasted: int = 0  # read ahead and never used
    hit_bytes: int = 0
    prefetch_hit_bytes: int = 0
    miss_bytes: int = 0
    materialise_s: float = 0.0  # spent building or reading, in any thread
    stall_s: float = 0.0  # of it, what the computation waited for
    time_saved_s: float = 0.0  # hits times the mean time of building that tensor

    @property
    def uses(self) -> int:
        return self.hits + self.prefetch_hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Of uses, the share served from kept memory."""
        return self.hits / self.uses if self.uses else 0.0

    @property
    def byte_hit_rate(self) -> float:
        total = self.hit_bytes + self.prefetch_hit_bytes + self.miss_bytes
        return self.hit_bytes / total if total else 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) + getattr(other, name) for name in Counts.__dataclass_fields__))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) - getattr(other, name) for name in Counts.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class WeightStats(Counts):
    """The whole cache, since it was made."""

    instance: str = ""  # one per loaded model; it never changes behind the user's back
    created: float = 0.0  # seconds since 1970
    policy: str = ""
    budget: int = 0
    mapped: bool = False  # the whole pack is mapped: everything fits
    tensors: int = 0
    total_bytes: int = 0  # of all tensors, as built
    resident: int = 0  # tensors that are kept
    resident_bytes: int = 0  # kept, in the ring, and evicted but still in use
    pinned_bytes: int = 0
    peak_bytes: int = 0
    ring_bytes: int = 0  # most that tensors on their way through may take beside the budget
    unexpected_misses: int = 0  # on a tensor that was preloaded
    window: Counts = field(default_factory=Counts)  # of the last `window_s` seconds
    window_s: float = 0.0
    layers: Mapping[int, Counts] = field(default_factory=dict)
    by_tensor: Mapping[str, Counts] = field(default_factory=dict)
    window_layers: Mapping[int, Counts] = field(default_factory=dict)
    window_by_tensor: Mapping[str, Counts] = field(default_factory=dict)
