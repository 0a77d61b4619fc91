"""Several agent stores on one prefix of object storage, as several processes would have."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everwarm.kv.remote.objects import Bucket, Objects
from everwarm.kv.remote.opening import open_warm
from everwarm.kv.store import AgentStore
from everwarm.kv.warm.leases import Leases
from kv.fake import open_store, warm

URL = "memory://"


def objects_in_memory() -> Objects:
    """Object storage without a server."""
    store: Any = pytest.importorskip("obstore.store", reason="needs obstore, which `make test` installs")
    return Bucket(store.MemoryStore())


@contextmanager
def replica(
    objects: Objects, home: Path, *, read_s: float = 10.0, write_s: float = 20.0, quota: int = 1 << 30, **options: Any
) -> Iterator[AgentStore]:
    """One more replica, with its own memory and its own cache on disk."""
    place = open_warm(URL, home, quota, objects=objects)
    place._read_s, place._write_s = read_s, write_s
    store = open_store(place, quota=place.free_bytes(), **options)
    try:
        yield store
    finally:
        store.close()
        place.close()


def leases(store: AgentStore) -> Leases:
    found = warm(store).leases
    assert found is not None
    return found


def secret_of(home: Path) -> str:
    return (home / "cluster-secret").read_text()


def without_secret(patch: pytest.MonkeyPatch) -> None:
    if "EVERWARM_WARM_SECRET" in os.environ:
        patch.delenv("EVERWARM_WARM_SECRET")
