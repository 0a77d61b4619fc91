"""Memory that weights live in, and what the system says about memory.

`Buffers` hands out page-aligned arrays and takes them back by itself: when the last reference to an array, or to any
view of it, is gone, its memory is free for the next one. So nobody has to say when a tensor is no longer in use, and
memory that is in use can't be given away.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from everwarm.opening import open_regular

U8 = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE
_HUGE = 2 << 20


class Buffers:
    """Page-aligned arrays. What comes back is kept for reuse as long as all that was taken from the system, in use or
    not, stays within `limit` bytes; the rest goes back to the system, before more is taken.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()  # by finalizers, which may run anywhere, so they take no lock
        self._spare: dict[int, list[mmap.mmap]] = {}  # by size
        self._taken = 0  # from the system, bytes

    @property
    def taken_bytes(self) -> int:
        """What the system has given and not got back: in use, or spare."""
        with self._lock:
            self._settle(0)
            return self._taken

    def take(self, size: int) -> U8:
        """An array of at least `size` bytes: whole pages."""
        capacity = max(1, -(-size // PAGE)) * PAGE
        with self._lock:
            self._settle(0)
            same = self._spare.get(capacity)
            memory = same.pop() if same else None
            if memory is None:
                self._settle(capacity)
                self._taken += capacity
        if memory is None:
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if capacity >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        when_unused(array, self._returned.append, memory)
        return array

    def trim(self) -> None:
        """Give the spare memory back to the system."""
        with self._lock:
            self._settle(self.limit)

    def _settle(self, more: int) -> None:
        """Note what has come back, and let spare memory go until `more` bytes fit into the limit."""
        while self._returned:
            memory = self._returned.popleft()
            self._spare.setdefault(len(memory), []).append(memory)
        for size in sorted(self._spare, reverse=True) if self._taken + more > self.limit else ():
            while self._spare[size] and self._taken + more > self.limit:
                self._spare[size].pop()  # nobody refers to it any more, so it is unmapped here
                self._taken -= size


class InUse:
    """Bytes of memory that someone refers to, or is about to fill; and the most there ever were."""

    def __init__(self) -> None:
        self.peak = 0
        self._bytes = 0
        self._dead: deque[int] = deque()  # sizes that nobody uses any more; appended to by finalizers

    @property
    def bytes(self) -> int:
        while self._dead:
            self._bytes -= self._dead.popleft()
        return self._bytes

    def expect(self, size: int) -> None:
        """So many bytes are about to be filled: `hold` or `give_up` must follow."""
        self._bytes = self.bytes + size
        self.peak = max(self.peak, self._bytes)

    def give_up(self, size: int) -> None:
        self._bytes -= size

    def hold(self, root: npt.NDArray[Any], size: int) -> None:
        """They are in use as long as this array, or a view of it, is."""
        when_unused(root, self._dead.append, size)


def root_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array that keeps the memory: every view of it, and every view of a view, refers to it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def when_unused(array: npt.NDArray[Any], call: Callable[..., object], *arguments: object) -> None:
    """Call when neither this root nor a view of it is referenced any more: in any thread, so it must take no lock."""
    weakref.finalize(array, call, *arguments).atexit = False


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take without swapping: the machine's, or what its control groups leave."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for group in _control_groups(root):
        for limit, used, cached in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            try:
                free = int((group / limit).read_text()) - int((group / used).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # of the other version, or `max`: no limit
                continue
            found.append(max(0, free + sum(int(stat.get(name, 0)) for name in cached)))  # files' pages make room
    return min(found, default=8 << 30)


def _control_groups(root: Path) -> Iterator[Path]:
    """Directories of the groups that this process is in, from its own to the outermost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        while own != top and top in own.parents:
            yield own
            own = own.parent
        yield top


def _pages(array: U8) -> tuple[int, int]:
    """Address and length of the whole pages that an array touches."""
    start = array.ctypes.data
    first = start // PAGE * PAGE
    return first, -(-(start + array.nbytes - first) // PAGE) * PAGE


def resident_share(array: U8) -> float:
    """How much of an array's memory is in RAM now, from 0 to 1."""
    if not array.nbytes:
        return 1.0
    first, length = _pages(array)
    marks = np.zeros(length // PAGE, np.uint8)
    if _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_void_p(marks.ctypes.data)):
        return 0.0
    return float(np.count_nonzero(marks & 1)) / len(marks)


def touch(array: U8) -> None:
    """Read one byte of every page, so that they are in RAM."""
    int(array[::PAGE].sum(dtype=np.int64))
    int(array[-1:].sum(dtype=np.int64))


def lock_in_ram(array: U8) -> bool:
    """Ask the system never to page this out. False where it does not allow it."""
    first, length = _pages(array)
    return array.nbytes == 0 or _libc.mlock(ctypes.c_void_p(first), ctypes.c_size_t(length)) == 0


def open_for_streaming(path: Path, opened: int) -> tuple[int, bool]:
    """A descriptor to read an open file with, past the page cache where the file system can do that; and whether it
    can. If `path` has become another file meanwhile, the one that is open is read.
    """
    if hasattr(os, "O_DIRECT"):
        try:
            descriptor = open_regular(path, flags=os.O_DIRECT)
        except OSError:
            return os.dup(opened), False
        if os.path.sameopenfile(descriptor, opened):
            return descriptor, True
        os.close(descriptor)
    return os.dup(opened), False


_libc = ctypes.CDLL(None, use_errno=True)
