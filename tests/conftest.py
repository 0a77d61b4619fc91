"""Fixtures that several tests share, and what makes tests independent of each other and of whoever runs them.

`make test` runs files of tests in several processes at once. Each process has an EVERWARM_HOME of its own, which is
deleted when it ends; only the demo model is read from the home of the person who runs the tests.
"""

import os

# Threads of BLAS spin while they wait for each other: beside other processes that takes many times as long. Set before
# anything imports NumPy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import functools
import inspect
import ssl
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

from everwarm import config
from everwarm.pull import pull
from waiting_until import PATIENCE_S

# `make test` draws the same examples each time: one commit, one verdict. `make fuzz` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("repeatable")

# httpx gives up after 5 seconds unless it is told otherwise; a busy machine may need longer.
_patience = inspect.signature(httpx.get).parameters["timeout"].default
_patience.connect = _patience.read = _patience.write = _patience.pool = PATIENCE_S

# Every client of httpx reads all root certificates of the system, which takes longer than most requests here.
ssl.create_default_context = functools.cache(ssl.create_default_context)

os.environ[config.PREFIX + "WARM"] = "off"  # tests that keep agents on disk say so

# `make test` has a process for each core, and threads of kernels wait for each other by spinning. Tests of what several
# threads compute say how many they want.
ONE_THREAD = {config.PREFIX + "THREADS": "1"}
os.environ |= ONE_THREAD

USERS_HOME = config.home()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the processes then end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _own_home() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="everwarm-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(config.PREFIX + "HOME", folder)
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model, pulled into the user's home if it is not there (`make test` has done so)."""
    return pull("smollm2", USERS_HOME)


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder-0.5B Q4_K_M, only where EVERWARM_TEST_QWEN says where it is: half a gigabyte is a lot to ask."""
    path = os.environ.get("EVERWARM_TEST_QWEN")
    if not path:
        pytest.skip("EVERWARM_TEST_QWEN is not set: `make test-models` fetches the model and runs this")
    return Path(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EVERWARM_HOME, and no EVERWARM_* variable but for the number of threads."""
    for name in list(os.environ):
        if name.startswith(config.PREFIX) and not name.startswith(config.PREFIX + "TEST") and name not in ONE_THREAD:
            monkeypatch.delenv(name)
    monkeypatch.setenv(config.PREFIX + "HOME", str(tmp_path / "home"))
    return tmp_path / "home"
