"""What the tests of benchmarks share."""

from collections.abc import Callable

import pytest

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
