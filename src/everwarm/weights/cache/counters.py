"""What happened to each tensor, counted; and how it was some time ago, for the sliding window.

`+= 1` on an entry of a dictionary is whole in CPython: threads are switched at calls and loops only.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from everwarm.weights.cache.stats import Counts

_SNAPSHOTS = 16  # per window


class Counters:
    """By name. The cache counts, `Counts` are what is told."""

    def __init__(self, sizes: Mapping[str, int], window_s: float, now: float) -> None:
        zero = dict.fromkeys(sizes, 0)
        self._sizes = sizes
        self.hits, self.prefetch_hits, self.misses = zero.copy(), zero.copy(), zero.copy()
        self.preloads, self.evictions, self.prefetch_wasted = zero.copy(), zero.copy(), zero.copy()
        self.builds = zero.copy()
        self.materialise_s, self.stall_s = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0.0)
        self._told = zero.copy()
        self._window_s = window_s
        self._history: deque[tuple[float, dict[str, Counts]]] = deque([(now, dict.fromkeys(sizes, Counts()))])

    def new_uses(self) -> Iterator[tuple[str, int]]:
        """Names that were used since this was asked last, and how often."""
        for name, hits in self.hits.items():
            used = hits + self.prefetch_hits[name] + self.misses[name]
            if used > self._told[name]:
                yield name, used - self._told[name]
                self._told[name] = used

    def is_time(self, now: float) -> bool:
        """Whether the last snapshot is old enough for the next."""
        return now - self._history[-1][0] >= self._window_s / _SNAPSHOTS

    def remember(self, now: float) -> None:
        """Take a snapshot, if it is time, and forget those that are older than the window."""
        if self.is_time(now):
            self._history.append((now, {name: self.of(name) for name in self._sizes}))
            while self._history[0][0] < now - self._window_s:
                self._history.popleft()

    def at_window_start(self, now: float) -> Mapping[str, Counts]:
        start = now - self._window_s
        return next((counts for at, counts in self._history if at >= start), self._history[-1][1])

    def of(self, name: str) -> Counts:
        """All that is known of one tensor."""
        size, hits, builds = self._sizes[name], self.hits[name], self.builds[name]
        ahead, misses = self.prefetch_hits[name], self.misses[name]
        return Counts(
            hits=hits,
            prefetch_hits=ahead,
            misses=misses,
            preloaded=self.preloads[name],
            evictions=self.evictions[name],
            prefetch_wasted=self.prefetch_wasted[name],
            hit_bytes=hits * size,
            prefetch_hit_bytes=ahead * size,
            miss_bytes=misses * size,
            materialise_s=self.materialise_s[name],
            stall_s=self.stall_s[name],
            time_saved_s=hits * (self.materialise_s[name] / builds if builds else 0.0),
        )

    def totals(self) -> Counts:
        """Sums of the plain counters, without those that need sizes."""
        return Counts(
            hits=sum(self.hits.values()),
            prefetch_hits=sum(self.prefetch_hits.values()),
            misses=sum(self.misses.values()),
            preloaded=sum(self.preloads.values()),
            evictions=sum(self.evictions.values()),
            materialise_s=sum(self.materialise_s.values()),
            stall_s=sum(self.stall_s.values()),
        )
