"""Object storage that is slow, fails, loses responses after it has done the work, and lists late: as it was told to."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from everwarm.kv.remote.objects import Found, Objects, Version
from everwarm.kv.warm.blockstore import AwayError

Result = TypeVar("Result")


class FaultyObjects:
    """A layer of faults over real objects. Everything is drawn from one seed."""

    def __init__(self, real: Objects, seed: int = 0) -> None:
        self._real = real
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.failing = 0.0  # share of calls that fail before anything was done
        self.losing = 0.0  # share of calls whose response gets lost
        self.delay_s = 0.0
        self.away = ""  # why nothing answers at all
        self.late = 0  # so many of the latest objects are not listed
        self.calls = 0
        self.lost = 0
        self._created: list[str] = []

    def get(self, name: str, start: int = 0, end: int | None = None) -> tuple[memoryview, Found]:
        return self._call(lambda: self._real.get(name, start, end))

    def put(self, name: str, data: bytes, replacing: Version | None) -> Version:
        return self._call(lambda: self._noted(name, self._real.put(name, data, replacing)))

    def overwrite(self, name: str, data: bytes) -> Version:
        return self._call(lambda: self._noted(name, self._real.overwrite(name, data)))

    def head(self, name: str) -> Found:
        return self._call(lambda: self._real.head(name))

    def list(self, prefix: str) -> Iterator[Found]:
        hidden = set(self._created[-self.late :]) if self.late else set()
        yield from (one for one in self._call(lambda: tuple(self._real.list(prefix))) if one.name not in hidden)

    def folders(self) -> Sequence[str]:
        return self._call(self._real.folders)

    def delete(self, name: str) -> None:
        self._call(lambda: self._real.delete(name))

    def _noted(self, name: str, version: Version) -> Version:
        with self._lock:
            if name not in self._created:
                self._created.append(name)
        return version

    def _call(self, call: Callable[[], Result]) -> Result:
        with self._lock:
            self.calls += 1
            fails = self._random.random() < self.failing
            loses = self._random.random() < self.losing
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.away or fails:
            raise AwayError(self.away or "connection reset")
        result = call()
        if loses:
            with self._lock:
                self.lost += 1
            raise AwayError("the response was lost")
        return result
