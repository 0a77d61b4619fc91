"""What the disk and the memory of this machine give for the files of a store: the ceiling of a restore.

The same files are read in reads of the same size, by as many threads and into the same kind of memory as a restore
does, with and without hashing. Recycled memory was filled before; fresh memory has to be got from the system first.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from everwarm.kv.container import ALIGNMENT
from everwarm.kv.disk.files import read_into
from everwarm.kv.index.pool import BlockPool
from everwarm.kv.warm.restore import READERS

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes of blocks per second."""

    read_recycled: float
    read_fresh: float
    hash_recycled: float  # read and hashed
    hash_fresh: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was done to the page cache, and whether it helped."""

    how: str
    file_bytes: int
    resident_bytes: int  # still in memory afterwards


def measure(paths: Sequence[Path], pool: BlockPool, *, dropped: bool = False) -> Bandwidth:
    """Bandwidth of these block files. With `dropped`, each pass begins with nothing of them in memory."""
    _one_pass(paths, pool, fresh=False, hashed=False)  # what is read again was filled before
    found = []
    for hashed in (False, True):
        for fresh in (False, True):
            if dropped:
                drop(paths)
            found.append(len(paths) * pool.block_bytes / _one_pass(paths, pool, fresh=fresh, hashed=hashed))
    return Bandwidth(*found)


def _one_pass(paths: Sequence[Path], pool: BlockPool, *, fresh: bool, hashed: bool) -> float:
    """Seconds."""
    if fresh:
        pool.memory.trim(0)
    started = time.perf_counter()
    blocks = pool.allocate_many(len(paths), clear=False)
    try:

        def read(path: Path, block: int) -> None:
            header, data = bytearray(ALIGNMENT), pool.read(block)
            count = read_into(path, [memoryview(header), data.data])
            assert count == ALIGNMENT + len(data), f"{path} is not a whole block"
            if hashed:
                digest = xxhash.xxh3_128(bytes(header))
                digest.update(data.data)
                digest.hexdigest()

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(read, paths, blocks))
        return time.perf_counter() - started
    finally:
        pool.drop(blocks)


def drop(paths: Sequence[Path]) -> Dropped:
    """Have these files forgotten by the page cache. Only them, if the system does as it is asked; else all files, if we
    are permitted to.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # what is not written yet can't be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    how, size = "posix_fadvise(DONTNEED) on the store's files", sum(path.stat().st_size for path in paths)
    if resident(paths) and os.access(DROP_CACHES, os.W_OK):
        os.sync()
        DROP_CACHES.write_text("1")
        how = f"{DROP_CACHES}: all files of the machine, the model's too"
    return Dropped(how, size, resident(paths))


def resident(paths: Sequence[Path]) -> int:
    """Bytes of the files that are in the page cache, as mincore says."""
    return sum(_resident(path) for path in paths)


def _resident(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    with path.open("rb") as file, closing(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        failed = mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        del view  # or the mapping can't be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((pages & 1).sum()) * mmap.PAGESIZE
