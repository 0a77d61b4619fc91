"""The access tracker: how often, how lately and at what cost tensors are used, in a sliding window.

In: `record` on every access, `tick` at the end of every forward pass, `materialised` after a tensor was built. Out:
rates, the hot set, accesses per layer, for the policy and the statistics. Everything that is read is as of the last
tick. So a pass counts as a whole or not at all: halfway through a scan, tensors that this pass has already used don't
look hotter than those whose turn is still to come, and a policy that compares rates doesn't swap one for the other.

Any thread may call anything. Accesses that other threads record while `tick` runs may be lost: exact counters are
the cache's business.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# How far one measurement moves the average of a tensor's build time: half of the way down, a tenth of the way up, and
# up by no more than to twice the average. Whatever else runs on the machine only adds time (the slowest of 960
# dequantisations took 25 x the median), so one slow build says little; a lasting change is followed by 10 % a time.
_DOWN, _UP, _LARGEST = 0.5, 0.1, 2.0


class BusyClock:
    """Seconds during which at least one thread was busy: a pause between requests does not empty the window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent = self._since = 0.0
        self._busy = 0  # threads

    def __call__(self) -> float:
        with self._lock:
            return self._now()

    def start(self) -> None:
        with self._lock:
            if not self._busy:
                self._since = self._clock()
            self._busy += 1

    def stop(self) -> float:
        """The time after it."""
        with self._lock:
            self._spent, self._since = self._now(), self._clock()
            self._busy -= 1
            return self._spent

    def _now(self) -> float:
        return self._spent + (self._clock() - self._since if self._busy else 0.0)


@dataclass(slots=True)
class _Bucket:
    """Accesses of the passes that ended between two times."""

    start: float
    end: float
    counts: dict[str, int] = field(default_factory=dict)


class AccessTracker:
    """Counts accesses by name. A name stays in the window at least `window_s`, at most one bucket longer."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic, buckets: int = 16) -> None:
        if window_s <= 0 or buckets < 1:
            raise ValueError(f"a window of {window_s} s in {buckets} buckets: both must be above 0")
        self.window_s = window_s
        self._bucket_s = window_s / buckets
        self._clock = clock
        self._start = self._now = clock()
        self._current: dict[str, int] = {}  # since the last tick
        self._buckets: tuple[_Bucket, ...] = ()  # oldest first; replaced, never changed, so that readers need no lock
        self._last: dict[str, float] = {}  # as many names as the model has, so nothing is ever dropped
        self._seconds: dict[str, float] = {}
        self._ticking = threading.Lock()

    def record(self, name: str, accesses: int = 1) -> None:
        """Some accesses. No clock, no lock."""
        counts = self._current
        counts[name] = counts.get(name, 0) + accesses

    def tick(self) -> None:
        """A pass is over: what it recorded happened now, and what is older than the window is forgotten."""
        with self._ticking:
            recorded, self._current = self._current, {}
            accesses = recorded.copy()  # a thread may still be adding to `recorded`
            now = self._now = max(self._clock(), self._now)
            if accesses:
                self._add(accesses, now)
                self._last.update(dict.fromkeys(accesses, now))
            if self._buckets and self._buckets[0].end <= now - self.window_s:
                self._buckets = tuple(bucket for bucket in self._buckets if bucket.end > now - self.window_s)

    def materialised(self, name: str, seconds: float) -> None:
        """Building the tensor took so long."""
        average = self._seconds.get(name)
        if not average:  # never built, or faster than the clock can tell
            self._seconds[name] = seconds
        else:
            step = min(seconds, _LARGEST * average) - average
            self._seconds[name] = average + step * (_UP if step > 0 else _DOWN)

    def count(self, name: str) -> int:
        """Accesses in the window."""
        return sum(bucket.counts.get(name, 0) for bucket in self._buckets)

    def rate(self, name: str) -> float:
        """Accesses per second in the window, or since the start if that is shorter."""
        return self.count(name) / max(min(self.window_s, self._now - self._start), self._bucket_s)

    def last_use(self, name: str) -> float | None:
        """When the last pass that used it ended; None if none did."""
        return self._last.get(name)

    def seconds(self, name: str) -> float | None:
        """What building it takes, on average; None if it was never built."""
        return self._seconds.get(name)

    def _add(self, accesses: dict[str, int], now: float) -> None:
        if not self._buckets or now - self._buckets[-1].start >= self._bucket_s:
            self._buckets = (*self._buckets, _Bucket(now, now, accesses))
            return
        newest = self._buckets[-1]
        newest.end = now
        _add(newest.counts, accesses)


def _add(total: dict[str, int], counts: dict[str, int]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count
