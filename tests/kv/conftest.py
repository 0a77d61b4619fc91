"""Stores of these tests lie in memory, where the system has such: on a disk, they would mostly wait for syncs.

What a store syncs, and when, is tested on a simulated disk; `torture.py` and the tests of the server use a real one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kv.s3 import Server, server
from kv.simulated_disk import memory_directory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server in a process of its own."""
    with server() as running:
        yield running
