"""What a store runs on when everything about it is to be decided by a test: files that fail and are recorded, a writer
that works when it is told to, a clock, salts and speeds that are the same each time.
"""

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everwarm.kv.disk.files import read_into
from everwarm.kv.warm.writer import Writer
from kv.simulated_disk import FaultyFiles, Operation, RecordedFiles


class HostileFiles(FaultyFiles, RecordedFiles):
    """Calls fail as they were armed to, and what was done is recorded; a sync that failed, too.

    `lock` is the store's: no file may be changed by a thread that holds it.
    """

    def __init__(self, base: Path, first_inode: int = 0) -> None:
        RecordedFiles.__init__(self, base)
        FaultyFiles.__init__(self)
        self._count = first_inode
        self.fired = 0
        self.lock: Any = None

    @property
    def lasting(self) -> bool:
        return self._lasting

    @property
    def last_inode(self) -> int:
        return self._count

    def sync(self, descriptor: int) -> None:
        with self._noted(Operation("failed_sync", inode=self._inodes[descriptor])):
            super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        with self._noted(Operation("failed_sync_directory", path.relative_to(self.base))):
            super().sync_directory(path)

    @contextmanager
    def _noted(self, failure: Operation) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.mark(failure)
            raise

    def _call(self, kind: str) -> None:
        assert self.lock is None or not self.lock._is_owned(), f"{kind} of a file under the store's lock"
        try:
            super()._call(kind)
        except OSError:
            self.fired += 1
            raise


class SteppedWriter(Writer):
    """A writer without a thread: it does its next job when somebody waits for one, or when `step` is called. So the
    order of everything is decided by the test, and the same each time.
    """

    def try_submit(self, job: Callable[[], Any], size: int, *, wait: bool) -> "Future[Any] | None":
        if not wait and not self._fits(size):
            return None
        self.wait_for_room(size)
        return self.enqueue(job, size)

    def wait_for_room(self, size: int) -> None:
        while not self._fits(size):
            self.step()

    def enqueue(self, job: Callable[[], Any], size: int) -> "Future[Any]":
        if self._closed:
            raise RuntimeError("the agent store is closed")
        future = _Awaited(self)
        self._jobs.append((job, future, size))
        self._bytes += size
        self._pending += 1
        return future

    def step(self) -> bool:
        """Do one job; False if there is none."""
        if not self._jobs:
            return False
        job, future, size = self._jobs.popleft()
        try:
            result = job()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._bytes -= size
        self._pending -= 1
        self._done += 1
        return True

    def wait_for_progress(self) -> bool:
        return self.step()

    def flush(self) -> None:
        while self.step():
            pass

    def close(self) -> None:
        self._closed = True
        self.flush()


class _Awaited(Future[Any]):
    def __init__(self, writer: SteppedWriter) -> None:
        super().__init__()
        self._writer = writer

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            assert self._writer.step(), "someone waits for a job that nobody will do"
        return super().result(timeout)


class FailingReads:
    """Blocks are read with this. The next `left` reads fail."""

    left = 0
    error = errno.EIO

    def read_into(self, path: Path, parts: Sequence[memoryview]) -> int:
        if self.left > 0:
            self.left -= 1
            raise OSError(self.error, os.strerror(self.error))
        return read_into(path, parts)


@contextmanager
def repeatable(seed: int) -> Iterator[FailingReads]:
    """Stores that are opened meanwhile do the same each time: no threads, no true time, no true randomness."""
    reads = FailingReads()
    salts = random.Random(seed)
    secrets = SimpleNamespace(token_bytes=salts.randbytes, token_hex=lambda count: salts.randbytes(count).hex())
    ticks = itertools.count()
    time = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)  # a read takes a few milliseconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everwarm.kv.store.Writer", SteppedWriter)
        patch.setattr("everwarm.kv.warm.tenants.secrets", secrets)
        patch.setattr("everwarm.kv.tools.export.secrets", secrets)
        patch.setattr("everwarm.kv.tools.import_.secrets", secrets)
        patch.setattr("everwarm.kv.warm.restore.READERS", 1)
        patch.setattr("everwarm.kv.warm.restore.time", time)
        patch.setattr("everwarm.kv.disk.directory.read_into", reads.read_into)
        yield reads
