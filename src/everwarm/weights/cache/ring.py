"""The ring: tensors on their way from the source to their use.

In: which layer the computation has entered. Out: flights: tensors that are being materialised, and those that were read
ahead and wait for their use. The one owner of them, of the queue of what to read ahead and of the thread that does so.
Invariant: with one computation, what is on its way beside what is kept is at most `size` bytes: the reader waits for
room, the computation never does, because what it needs itself is part of that size. Methods are called under the
cache's lock, which the reader lets go of while it reads.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

from everwarm.kernels.backend import Weight
from everwarm.weights.cache.kept import Kept
from everwarm.weights.cache.place import coming, stages
from everwarm.weights.memory import InUse
from everwarm.weights.pack.source import Built

_PATIENCE_S = 0.005  # how long the reader sleeps before it looks again whether there is room


class Flight:
    """A tensor on its way: from the moment someone starts to materialise it until it is kept or handed over."""

    __slots__ = ("ahead", "built", "done", "error", "kept", "tensor")

    def __init__(self, ahead: bool, kept: bool) -> None:
        self.ahead = ahead  # nobody waits for it yet
        self.kept = kept  # room was made for it among what is kept
        self.done = threading.Event()
        self.tensor: Weight | None = None
        self.built: Built | None = None  # it waits in the ring: whether it is kept is decided when it is used
        self.error: BaseException | None = None


class Ring:
    """Flights, and the thread that reads ahead."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        ahead: int,
        background: bool,
        lock: threading.RLock,
        kept: Kept,
        in_use: InUse,
        begin: Callable[[str], Flight],
        read: Callable[[str, Flight], None],
        wasted: dict[str, int],
    ) -> None:
        """Ahead of a use, `begin` is called under the lock, then `read` without it; it raises nothing."""
        self.ahead = ahead
        self.layers: Mapping[int, int]  # to stages
        self.stages, self.layers = stages(sizes)
        self._expected: frozenset[str] = frozenset()  # experts that a layer ahead may use
        self.flights: dict[str, Flight] = {}
        self._background, self._sizes, self._kept, self._in_use = background, sizes, kept, in_use
        self._begin, self._read, self._wasted = begin, read, wasted
        self._changed = threading.Condition(lock)
        self._queue: dict[str, None] = {}  # in order
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def size(self) -> int:
        """Most that may be on its way: what is streamed of the layer in use and of those that are read ahead, and the
        experts of one layer.
        """
        return self._kept.streamed.ring_bytes(self.ahead)

    def enter(self, layer: int) -> None:
        """The computation begins with this layer: forget what is behind it, read what lies ahead."""
        at = self.layers.get(layer)
        if at is None or not self._background or not self.ahead:
            return
        needed = coming(at, len(self.stages), self.ahead)
        self.drop_all_but({name for stage in needed for name in self.stages[stage]} | self._expected)
        self._expected = frozenset()
        for stage in needed[1:]:
            self._ask(self.stages[stage])

    def expect(self, names: Iterable[str]) -> None:
        """Experts that a layer ahead will probably use: read them now."""
        if self._background and self.ahead:
            self._expected = frozenset(names)
            self._ask(self._expected)

    def prefetch(self, layer: int) -> None:
        """Materialise what is missing of a layer, in the background. Does nothing if that is switched off."""
        if self._background and layer in self.layers:
            self._ask(self.stages[self.layers[layer]])

    def begin(self, name: str, ahead: bool, kept: bool) -> Flight:
        """Someone materialises it from now on; until `end`, everyone else who wants it waits."""
        self._queue.pop(name, None)
        flight = self.flights[name] = Flight(ahead, kept)
        return flight

    def arrive(self, name: str, flight: Flight, built: Built, waits: bool) -> None:
        """It is there. If it `waits`, it does so in the ring, for its use."""
        flight.tensor = built.tensor
        if waits:
            flight.built = built
        else:
            del self.flights[name]
        flight.done.set()
        self._changed.notify_all()

    def fail(self, name: str, flight: Flight, error: BaseException) -> None:
        """Whoever waits for it gets the error; the next one may try again."""
        flight.error = error
        del self.flights[name]
        flight.done.set()

    def take(self, name: str) -> Built | None:
        """What was read ahead and waits for its use; it is no longer the ring's."""
        flight = self.flights.get(name)
        if flight is None or flight.built is None:
            return None
        del self.flights[name]
        self._changed.notify_all()
        return flight.built

    def drop_all_but(self, needed: set[str]) -> None:
        """Forget what was, or should be, read ahead for layers that the computation has left without using it."""
        for name in [name for name, flight in self.flights.items() if flight.built and name not in needed]:
            self.take(name)
            self._wasted[name] += 1
        for name in self._queue.keys() - needed:
            del self._queue[name]

    def close(self) -> None:
        """Read no more. Called without the lock, because the reader may need it to finish."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        with self._changed:
            self.drop_all_but(set())

    def notify(self) -> None:
        """There may be room now."""
        self._changed.notify_all()

    # Inside

    def _ask(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._kept.ready and name not in self.flights]
        if self._closed or not missing:
            return
        self._queue.update(dict.fromkeys(missing))
        if self._worker is None:
            self._worker = threading.Thread(target=self._read_ahead, name="everwarm-prefetch", daemon=True)
            self._worker.start()
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        """Wait for something to read and for room, and read it. A call of its own: it refers to nothing afterwards."""
        with self._changed:
            while not self._closed and not (self._queue and self._has_room(next(iter(self._queue)))):
                self._changed.wait(_PATIENCE_S if self._queue else None)
            if self._closed:
                return False
            name = next(iter(self._queue))
            del self._queue[name]
            if name in self._kept.ready or name in self.flights:
                return True
            flight = self._begin(name)
        self._read(name, flight)
        return True

    def _has_room(self, name: str) -> bool:
        on_the_way = self._in_use.bytes - self._kept.bytes
        return on_the_way <= 0 or on_the_way + self._sizes[name] <= self.size
