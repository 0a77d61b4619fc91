"""An S3 server for tests: moto's, in a process of its own. Skips with a reason where it is not installed."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

_numbers = count()
MISSING = "needs obstore and moto[server], which `make test` installs"


@dataclass(frozen=True)
class Server:
    """A running one."""

    address: str
    process: Any = field(compare=False)

    def new_bucket(self) -> str:
        """The URL of a prefix in a bucket of its own."""
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.address}/{name}", method="PUT"), timeout=60).read()
        return f"s3://{name}/some/prefix"

    @property
    def environment(self) -> dict[str, str]:
        """What clients have to know."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def server() -> Iterator[Server]:
    """A server, whose environment is that of this process meanwhile."""
    if find_spec("moto") is None or find_spec("obstore") is None or find_spec("flask") is None:
        pytest.skip(MISSING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait(running)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in running.environment.items():
                patch.setenv(name, value)
            yield running
    finally:
        process.kill()
        process.wait()


def _wait(running: Server) -> None:
    while running.process.poll() is None:
        try:
            urllib.request.urlopen(f"{running.address}/moto-api/data.json", timeout=60).read()
            return
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    pytest.fail("moto_server ended by itself")
