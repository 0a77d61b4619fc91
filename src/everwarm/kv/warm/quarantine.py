"""Files that are not what they should be: set aside, or left alone where they are of another version of everwarm."""

import logging
import threading
from collections import Counter

from everwarm.kv.warm.blockstore import Blob
from everwarm.kv.warm.shared import SharedStore

_log = logging.getLogger(__name__)


class Quarantine:
    """What one model has set aside or left alone since its store was opened."""

    def __init__(self, shared: SharedStore, events: Counter[str]) -> None:
        self._shared = shared
        self._events = events
        self._lock = threading.Lock()
        self.count = 0
        self.left_alone: dict[str, str] = {}  # names of files, and why

    def set_aside(self, blob: Blob, why: str) -> bool:
        """Count a file and, where we may write, move it out of the way; whether it was moved."""
        store = self._shared.store
        assert store is not None
        _log.error("%s: %s; moved to quarantine", store.where(blob), why)
        moved, size = (None, 0) if self._shared.read_only else store.set_aside(blob)
        if moved is not None:
            self._shared.quarantined(moved, size)
        with self._lock:
            self.count += 1
            self._events["corrupt"] += 1
        return moved is not None

    def leave_alone(self, blob: Blob, why: str) -> None:
        """A file is not ours to read: it stays where it is."""
        assert self._shared.store is not None
        _log.warning("%s %s; it is left alone", self._shared.store.where(blob), why)
        self.left_alone[blob.name] = why
