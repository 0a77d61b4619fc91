"""Fixtures that several tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from everwarm import config
from everwarm.pull import pull

# `make test` draws the same examples each time: one commit, one verdict. `make fuzz` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("repeatable")

os.environ[config.PREFIX + "WARM"] = "off"  # what tests say is not kept in the home of the person who runs them


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model, pulled into the user's home if it is not there (`make test` has done so)."""
    return pull("smollm2", config.home())


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder-0.5B Q4_K_M, only where EVERWARM_TEST_QWEN says where it is: half a gigabyte is a lot to ask."""
    path = os.environ.get("EVERWARM_TEST_QWEN")
    if not path:
        pytest.skip("EVERWARM_TEST_QWEN is not set: `make test-models` fetches the model and runs this")
    return Path(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EVERWARM_HOME, and no EVERWARM_* variable of the person who runs the tests."""
    for name in list(os.environ):
        if name.startswith(config.PREFIX) and not name.startswith(config.PREFIX + "TEST"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(config.PREFIX + "HOME", str(tmp_path / "home"))
    return tmp_path / "home"
