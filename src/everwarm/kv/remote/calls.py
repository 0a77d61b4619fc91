"""Calls to a storage that may be slow, fail, or be away: tried again with pauses, until a deadline; not tried at all
while a circuit breaker is open.

The breaker opens after a few failures in a row. Then every call fails at once, so that whoever asks computes instead of
waiting. After a rest one call is let through; if it succeeds, all are.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from everwarm.kv.remote.objects import RefusedError
from everwarm.kv.warm.blockstore import AwayError

Result = TypeVar("Result")

FAILURES = 5
"""So many in a row open the breaker."""
REST_S = 1.0
MOST_REST_S = 30.0
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 2.0


class Breaker:
    """Knows whether the storage answers. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._rest_s = 0.0
        self._until = 0.0
        self._trying = False  # one call was let through
        self.why = ""
        self.opened = 0  # how often

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._rest_s > 0

    def enter(self) -> None:
        """Raises AwayError if no call is to be made now."""
        with self._lock:
            if not self._rest_s:
                return
            if self._clock() < self._until or self._trying:
                raise AwayError(f"the storage does not answer ({self.why}); it is asked again soon")
            self._trying = True

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._rest_s, self._trying = 0, 0.0, False

    def failed(self, why: str) -> None:
        with self._lock:
            self.why = why
            self._failures += 1
            self._trying = False
            if self._failures >= FAILURES:
                self.opened += not self._rest_s
                self._rest_s = min(MOST_REST_S, 2 * self._rest_s or REST_S)
                self._until = self._clock() + self._rest_s

    def left(self) -> None:
        """A call that was let through has told nothing."""
        with self._lock:
            self._trying = False


class Calls:
    """Makes calls."""

    def __init__(
        self,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.breaker = breaker or Breaker(clock)
        self._clock, self._sleep = clock, sleep
        self.retried = 0

    def run(self, call: Callable[[], Result], within_s: float) -> Result:
        """The result of a call, which may be made several times. Raises AwayError when the time is over, at once while
        the breaker is open; everything else that the call raises is an answer.
        """
        started, pause = self._clock(), FIRST_PAUSE_S
        while True:
            self.breaker.enter()
            try:
                result = call()
            except RefusedError:  # it does answer
                self.breaker.succeeded()
                raise
            except AwayError as error:
                self.breaker.failed(error.strerror or str(error))
                if self._clock() - started + pause >= within_s:
                    raise
            except OSError:  # not there, exists already, changed: an answer
                self.breaker.succeeded()
                raise
            except BaseException:
                self.breaker.left()
                raise
            else:
                took = self._clock() - started
                if took > within_s:  # too late to be of use, as a rule
                    self.breaker.failed(f"an answer took {took:.0f} s")
                else:
                    self.breaker.succeeded()
                return result
            self.retried += 1
            self._sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that replicas don't ask in step
            pause = min(MOST_PAUSE_S, 2 * pause)
