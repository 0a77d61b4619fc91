"""What the tests of benchmarks share."""

import subprocess
from collections.abc import Callable

import pytest

import forked
from everwarm.cli.app import run


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], str]]:
    """`everwarm bench ...`: exit code, lines of stdout, stderr."""

    def call(*arguments: object) -> tuple[int, list[str], str]:
        capfd.readouterr()
        code = run(["bench", *map(str, arguments)])
        captured = capfd.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes in which a benchmark measures are forks, instead of interpreters of their own."""
    monkeypatch.setattr(subprocess, "run", forked.run)
