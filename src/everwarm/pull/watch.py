"""Runs a download in a process of its own and watches the bytes arrive.

In: a command, with the full path of its program, that writes below a directory. Out: the lines it printed, if it
failed. A process, and not a thread, so that Ctrl-C ends the download itself and not only the wait for it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Arrived = Callable[[int], None]
"""Told the bytes that are there so far."""

POLL_S = 0.1

_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that dies with us, also of kill -9: an orphan would go on writing into what the next pull removes."""


class Failed(Exception):  # noqa: N818 - carries what the command said
    """The command ended with an error. The message is its last line that looks like a reason."""


def run(command: list[str], folder: Path, environment: Mapping[str, str], arrived: Arrived) -> None:
    """Run until it ends; `arrived` is called with the bytes below `folder`."""
    with (folder / "output.txt").open("w+b") as output:
        process = subprocess.Popen(  # noqa: S603 - the caller's own command, no shell
            [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
        )
        try:
            while True:
                try:
                    process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    arrived(_bytes_below(folder))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            output.seek(0)
            raise Failed(_reason(output.read().decode("utf-8", "replace")))


def _bytes_below(folder: Path) -> int:
    """Files come and go while we look."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total


def _reason(output: str) -> str:
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it ended without a word"])[-1].removeprefix("ERROR: ")[:300]
