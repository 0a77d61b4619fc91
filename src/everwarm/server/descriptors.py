"""File descriptors: as many as the system gives, and some of them kept from connections.

A turn is saved through files. If connections could take every descriptor, saving would fail; so the number of
connections is bounded by what the system allows, less what everything else may need at once.
"""

import os
import resource

WANTED = 65_536
_FILES = 192
"""Open at any time or for a moment: model, pack, log, the store's writer and readers, exports and uploads."""


def raise_limit(wanted: int = WANTED) -> int:
    """Raise this process's limit of descriptors as far as it may; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


def for_connections(limit: int, requests: int) -> int:
    """How many of `limit` descriptors connections may take, if so many requests may read or write a file at once. A
    small limit is shared evenly.
    """
    kept = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    return max(1, limit - min(kept + _FILES + requests, limit // 2))
