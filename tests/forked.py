"""Programs that are started without a new interpreter: forks of a process that has imported everwarm's modules.

To import them takes one or two seconds of processor time, and is the same each time. The process that is forked has
opened nothing: no file, no lock, no thread. Tests of how a program starts take an interpreter of its own.
"""

import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["everwarm.cli.app", "everwarm.llm", "everwarm.server.app", "everwarm.server.loading", "everwarm.server.log"]
)
"""A context of multiprocessing. Its processes have the environment of the first of them."""


class Forked:
    """`python -m` with these arguments. It can do what `subprocess.Popen` does, as far as tests need it."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stderr: Path,
        stdout: Path = Path(os.devnull),
        descriptors: int | None = None,
    ) -> None:
        """`descriptors` is the system's limit of them."""
        given = (list(arguments), dict(environment), str(stdout), str(stderr), descriptors)
        self._process = FORKS.Process(target=_run, args=given)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str],
    *,
    capture_output: bool,
    text: bool,
    check: bool,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of this interpreter with `-m`."""
    python, option, *rest = arguments
    assert (python, option, capture_output, text, check) == (sys.executable, "-m", True, True, False)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        code = Forked(rest, os.environ if env is None else env, stdout=out, stderr=err).wait()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def _run(arguments: list[str], environment: dict[str, str], stdout: str, stderr: str, descriptors: int | None) -> None:
    """In the fork."""
    os.environ.clear()
    os.environ.update(environment)
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    for number, path in enumerate((os.devnull, stdout, stderr)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
