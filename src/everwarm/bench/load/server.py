"""Servers as processes of our own: `everwarm serve`, and llama.cpp's `llama-server` as its peer.

Each listens on a free port, is waited for until /health says 200, and is ended with the context.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from everwarm.errors import ConfigError
from everwarm.setting_kinds import PREFIX, Given, settings_of
from everwarm.settings import ServeSettings

READY_S = 120.0
END_S = 30.0
_LISTENING = re.compile(rb"listening at (http://\S+);")


class ServerProcess:
    """A server that was started for a measurement."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], url: str | None) -> None:
        """Without a `url`, its log names it."""
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self.started = time.perf_counter()
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=dict(environment)
        )
        self.url = url or ""

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.end(signal.SIGKILL)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, within_s: float = READY_S) -> None:
        """Until it takes requests. Raises ConfigError with the end of its log."""
        end = time.perf_counter() + within_s
        while time.perf_counter() < end:
            if self._process.poll() is not None:
                raise ConfigError(f"{self.name} ended with code {self._process.returncode}: {self._last_words()}")
            if not self.url and (found := _LISTENING.search(self.log())):
                self.url = found[1].decode()
            if self.url and _is_healthy(self.url):
                return
            time.sleep(0.01)
        raise ConfigError(f"{self.name} was not ready after {within_s:g} s: {self._last_words()}")

    def end(self, number: int = signal.SIGTERM) -> None:
        """Tell it to end; if it does not, end it."""
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory now and at most; empty where the system does not tell."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return {}
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
        return {"now": 1024 * int(found.get("VmRSS", 0)), "peak": 1024 * int(found.get("VmHWM", 0))}

    def log(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0)

    def _last_words(self) -> str:
        lines = self.log().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def everwarm(model: Path, home: Path, settings: Mapping[str, Given], *flags: str) -> ServerProcess:
    """`everwarm serve` with a store of its own."""
    known = settings_of(ServeSettings)
    environment = os.environ | {PREFIX + "HOME": str(home)}
    environment |= {known[name].variable: str(value) for name, value in settings.items() if value is not None}
    command = [sys.executable, "-m", "everwarm", "serve", str(model), "--port", "0", *flags]
    return ServerProcess("everwarm", command, environment, None)


def llama_cpp(model: Path, slots: int, context: int, threads: int, *flags: str) -> ServerProcess:
    """llama.cpp's own server with as many slots as there are agents, and room in each for a whole conversation."""
    port = _free_port()
    command = [
        _llama_server(), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots),
        "--ctx-size", str(slots * context), "--threads", str(threads), "--threads-batch", str(threads),
        "--flash-attn", "on", "--cont-batching", "--cache-prompt", "--no-webui", *flags,
    ]  # fmt: skip
    return ServerProcess("llama.cpp", command, os.environ, f"http://127.0.0.1:{port}")


def _llama_server() -> str:
    """Where `make peers` has put it, or wherever it is on the path."""
    here = Path.cwd() / ".venv-peers" / "bin" / "llama-server"
    found = str(here) if here.exists() else shutil.which("llama-server")
    if found is None:
        raise ConfigError("--peer llama.cpp: there is no llama-server; `make peers` builds it in the source tree")
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:  # noqa: S310
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
