"""Trying a grammar in a process of its own, which is ended if it takes too long.

Compiling runs inside a library. No thread can be ended there, and a few dozen bytes can keep it busy for hours or
overflow its stack. So whatever is not known to be quick is compiled here first.
"""

import contextlib
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from everwarm.structured.matching import HEADER, TRIAL_CPU_S, TokenTable

TRIAL_WALL_S = 20.0
"""Seconds on the clock: a busy machine may need longer than `TRIAL_CPU_S`."""
START_S = 60.0

TOO_COMPLEX = f"takes more than {TRIAL_CPU_S} s, or too much memory, to compile: make it simpler"


class Trial:
    """One process, started when it is needed. One grammar at a time; whoever comes meanwhile waits."""

    def __init__(self, table: Callable[[], TokenTable]) -> None:
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def error_of(self, grammar: str) -> str:
        """What is wrong with a grammar; nothing if it can be compiled in bounded time."""
        with self._lock:
            for _ in range(2):  # a process that has been idle may have just ended
                process = self._running()
                try:
                    _send(process, grammar.encode())
                    return _answer(process)
                except (BrokenPipeError, EOFError, TimeoutError) as error:
                    ended_by = self._end()
                    if not isinstance(error, BrokenPipeError) and ended_by != signal.SIGALRM:
                        return TOO_COMPLEX
            raise RuntimeError("the process that tries grammars ends at once")

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            command = [
                sys.executable,
                "-P",
                "-m",
                "everwarm.structured.matching",
            ]  # -P: nothing of the current directory
            self._process = subprocess.Popen(  # noqa: S603 - this program itself
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            _send(self._process, pickle.dumps(self._table()))
            _send(self._process, b'start: "a"')  # it is ready once it has answered
            _answer(self._process, START_S)
        return self._process

    def _end(self) -> int:
        """Which signal has ended the process."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return -process.returncode


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(HEADER.pack(len(message)) + message)
    process.stdin.flush()


def _answer(process: subprocess.Popen[bytes], seconds: float = TRIAL_WALL_S) -> str:
    """Raises EOFError if the process has ended, TimeoutError if it takes too long."""
    assert process.stdout is not None
    end = time.monotonic() + seconds
    if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        raise TimeoutError
    header = process.stdout.read(HEADER.size)  # an answer is written at once
    if len(header) < HEADER.size:
        raise EOFError
    return process.stdout.read(HEADER.unpack(header)[0]).decode("utf-8", "replace")
