"""The weight cache: the one owner of a model's tensors in the form that the kernels compute with.

In: a source. Out: tensors, each built once: `get` returns the same memory every time. Safe to use from several
threads: a hit takes no lock, and two threads that miss the same tensor build it once.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from everwarm.kernels.backend import Weight
from everwarm.weights.source import Source


@dataclass(frozen=True, slots=True)
class WeightStats:
    """Counters since the cache was made."""

    tensors: int
    hits: int
    misses: int
    preloaded: int
    resident: int
    resident_bytes: int
    materialise_s: float

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


class WeightCache:
    """Tensors by name."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._built: dict[str, Weight] = {}
        self._building: dict[str, threading.Lock] = {name: threading.Lock() for name in source.tensors}
        self._counting = threading.Lock()
        self._hits = self._misses = self._preloaded = 0
        self._materialise_s = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._building

    def get(self, name: str) -> Weight:
        """The tensor, built if this is its first use."""
        tensor = self._built.get(name)
        if tensor is not None:
            self._hits += (
                1  # may miscount by a few under threads; a lock on every hit would cost more than the figure is worth
            )
            return tensor
        tensor, built = self._materialise(name)
        with self._counting:
            self._misses += built
            self._hits += not built
        return tensor

    def preload(self, names: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None) -> None:
        """Build now what is not there yet; it counts as `preloaded`, not as a miss. Progress: (bytes done, in all)."""
        wanted = list(self._building if names is None else names)
        total = sum(self._file_bytes(name) for name in wanted)
        done = 0
        for name in wanted:
            _, built = self._materialise(name)
            with self._counting:
                self._preloaded += built
            done += self._file_bytes(name)
            if progress:
                progress(done, total)

    def stats(self) -> WeightStats:
        built = list(self._built.values())
        return WeightStats(
            tensors=len(self._building),
            hits=self._hits,
            misses=self._misses,
            preloaded=self._preloaded,
            resident=len(built),
            resident_bytes=sum(_size(tensor) for tensor in built),
            materialise_s=self._materialise_s,
        )

    def close(self) -> None:
        """Forget every tensor. Arrays that are still in use elsewhere stay valid."""
        self._built.clear()

    def _materialise(self, name: str) -> tuple[Weight, bool]:
        """The tensor, and whether this call built it. An unknown name is the file's error, which suggests near ones."""
        lock = self._building.get(name)
        if lock is None:
            return self._source.build(name), True
        with lock:
            tensor = self._built.get(name)
            if tensor is not None:
                return tensor, False
            started = time.perf_counter()
            tensor = self._source.build(name)
            elapsed = time.perf_counter() - started
            with self._counting:
                self._materialise_s += elapsed
            self._built[name] = tensor
            return tensor, True

    def replace(self, name: str, tensor: Weight) -> None:
        """Put a tensor in the place of one that turned out to be damaged."""
        with self._building[name]:
            self._built[name] = tensor

    def _file_bytes(self, name: str) -> int:
        return self._source.tensors[name].size_bytes if name in self._building else 0


def _size(tensor: Weight) -> int:
    return int(tensor.nbytes if hasattr(tensor, "nbytes") else tensor.size_bytes)
