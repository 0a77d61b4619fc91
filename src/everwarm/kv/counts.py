"""What a store has done since it was opened: counters for metrics. Each layer adds its own."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counts:
    """Events and seconds, by name."""

    events: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
