"""Agents that were not used for too long are removed: when the store is opened, and once an hour.

Time in which nobody could have been used does not count: a wrong clock, a machine that slept or a long absence must not
empty the store.
"""

import logging
import threading
import time
from collections.abc import Callable

from everwarm.errors import StoreError
from everwarm.kv.agent import Agent
from everwarm.kv.histories import Histories

_log = logging.getLogger(__name__)

EVERY_S = 3600.0


class Expiry:
    """Looks for agents that are too old."""

    def __init__(self, histories: Histories, most_age_s: float | None, clock: Callable[[], float]) -> None:
        self._histories = histories
        self._most_age_s = most_age_s
        self._clock = clock
        self._steady = time.monotonic if clock is time.time else clock
        self._looked = clock(), self._steady()
        self._unused_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def look_at_start(self) -> None:
        """The time since anybody was used does not count."""
        if self._most_age_s is None:
            return
        now = self._clock()
        latest = max((agent.used for agent in self._histories.agents.all()), default=now)
        self._unused_s = max(0.0, now - latest)
        self.remove_unused_since(now - self._most_age_s - self._unused_s)

    def look(self) -> None:
        """Once an hour, on a thread of its own. Costs nothing otherwise."""
        now, steady = self._clock(), self._steady()
        with self._lock:
            last, last_steady = self._looked
            if self._most_age_s is None or now < last + EVERY_S:
                return
            self._looked = now, steady
            # The clock was set forward, or the machine slept: agents have not become older by that.
            self._unused_s += max(0.0, (now - last) - (steady - last_steady))
        before = now - self._most_age_s - self._unused_s
        thread = threading.Thread(target=self.remove_unused_since, args=(before,), name="everwarm-expire", daemon=True)
        self._thread = thread
        thread.start()

    def remove_unused_since(self, before: float) -> int:
        """Remove agents that were not used since then; how many. One that is pinned, or talks just now, stays."""
        if self._histories.read_only:
            return 0

        def expired(agent: Agent) -> bool:
            return bool(agent.generation) and agent.used < before and not agent.pinned

        removed = 0
        for agent in self._histories.agents.all():
            if expired(agent):
                try:
                    removed += self._histories.remove_if(agent, expired)
                except StoreError as error:
                    _log.warning("%s", error)
        if removed:
            _log.info("%d agents were not used for too long and are removed", removed)
        return removed

    def wait(self) -> None:
        """Until nobody is being removed."""
        if self._thread is not None:
            self._thread.join()
