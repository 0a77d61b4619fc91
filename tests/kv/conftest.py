"""Stores of these tests lie in memory, where the system has such: on a disk, they would mostly wait for syncs.

What a store syncs, and when, is tested on a simulated disk; `torture.py` and the tests of the server use a real one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.kv.store import AgentStore
from kv.audit import audit
from kv.fake import open_store
from kv.s3 import Server, server
from kv.simulated_disk import UnsyncedFiles, memory_directory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a store is, or will be."""
    return tmp_path


@pytest.fixture
def store(root: Path) -> Iterator[AgentStore]:
    """A store that is audited in the end. Its model is that of `fake`, with the layers that the test has asked for."""
    store = open_store(root, files=UnsyncedFiles())
    yield store
    store.flush()
    audit(store)
    store.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server in a process of its own."""
    with server() as running:
        yield running
