"""Any `BlockStore`, one of whose calls fails: the same faults for every store."""

import errno
import threading
from typing import Any

from everwarm.kv.warm.blockstore import AwayError, BlockStore

FAILING = frozenset({"put", "sync", "commit", "read", "get", "size", "delete", "set_aside", "missing", "prepare"})


class FaultyStore:
    """The nth call after `arm` fails, and all that follow until `heal`, if that is meant to last."""

    def __init__(self, real: BlockStore) -> None:
        self._real = real
        self._lock = threading.Lock()
        self._left = 0
        self._lasting = False
        self.fired = False

    def arm(self, nth: int, *, lasting: bool) -> None:
        with self._lock:
            self._left, self._lasting, self.fired = nth, lasting, False

    def heal(self) -> None:
        with self._lock:
            self._left = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in FAILING:
            return value

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                fails = self._left == 1
                self._left -= self._left > 1 or (fails and not self._lasting)
                self.fired = self.fired or fails
            if fails:
                if name == "set_aside":  # never raises
                    return None, 0
                raise self._error()
            return value(*args, **options)

        return call

    def _error(self) -> OSError:
        """As this kind of store fails."""
        return AwayError("no answer") if self._real.many_writers else OSError(errno.EIO, "Input/output error")
