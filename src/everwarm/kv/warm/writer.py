"""One thread that writes, in the order in which it was asked to, and never more behind than a bound.

Whoever brings more than fits waits: nothing is dropped. A job that fails fails alone.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Writer:
    """A queue of jobs bounded by their bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._jobs: deque[tuple[Callable[[], Any], Future[Any], int]] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._pending = self._done = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether something waits to be written, or is being written."""
        return self._pending > 0

    def submit(self, job: Callable[[], Result], size: int = 0) -> "Future[Result]":
        """Waits while the queue is full. Don't call it with a lock that a job needs."""
        future = self.try_submit(job, size, wait=True)
        assert future is not None
        return future

    def try_submit(self, job: Callable[[], Result], size: int, *, wait: bool) -> "Future[Result] | None":
        """The same; without `wait` None if the queue is full."""
        with self._changed:
            if not wait and not self._fits(size):
                return None
            self._changed.wait_for(lambda: self._fits(size))
            return self.enqueue(job, size)

    def wait_for_room(self, size: int) -> None:
        """Wait while the queue is too full for so many bytes."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(size))

    def enqueue(self, job: Callable[[], Result], size: int) -> "Future[Result]":
        """The same as `submit`, without waiting: whoever has waited before and holds a lock now."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the agent store is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="everwarm-writer", daemon=True)
                self._thread.start()
            self._jobs.append((job, future, size))
            self._bytes += size
            self._pending += 1
            self._changed.notify_all()
        return future

    def _fits(self, size: int) -> bool:
        return self._closed or self._bytes == 0 or self._bytes + size <= self._most_bytes

    def wait_for_progress(self) -> bool:
        """Wait until one more job is done; False if there is none to wait for."""
        with self._changed:
            done = self._done
            if self._pending == 0:
                return False
            self._changed.wait_for(lambda: self._done > done)
            return True

    def flush(self) -> None:
        """Wait until everything that was submitted so far has been done."""
        with self._changed:
            if self._thread is None:
                return
        self.submit(lambda: None).result()

    def close(self) -> None:
        """Do what is left, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job, future, size = self._jobs.popleft()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del job, future
            with self._changed:
                self._bytes -= size
                self._pending -= 1
                self._done += 1
                self._changed.notify_all()
