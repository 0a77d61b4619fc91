"""Real servers on real sockets: on a thread of the test, or as a process of their own."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import everwarm
from everwarm import config
from everwarm.llm import LLM
from everwarm.server.app import create_app
from everwarm.server.connections import ConnectionLimits
from everwarm.server.http import HttpServer
from everwarm.server.keys import Keys
from everwarm.server.origin import Origins
from everwarm.server.page.routes import PageOptions
from everwarm.server.serving import Limits
from forked import Forked
from waiting_until import wait_until

LETTERS = {str(byte): 50 for byte in b"abcdefghijklmnopqrstuvwxyz"}
"""A logit bias that has a tiny model write letters only: each is a token of its own, its id is its byte."""

FILE = {"Content-Type": "application/octet-stream"}
"""What an agent that is imported must be called."""

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t['function']['name'] }}: "
    "{{ t['function']['description'] }} {{ t['function']['parameters'] | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}[{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}]"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML of a model that knows tools."""


@dataclass(frozen=True)
class Running:
    """Where it listens, and the model behind it."""

    url: str
    llm: LLM


@contextmanager
def running(
    model: Path,
    home: Path,
    *,
    name: str = "tiny",
    limits: Limits | None = None,
    keys: Mapping[str, str] | None = None,
    operators: Collection[str] = (),
    origins: Origins | None = None,
    connections: ConnectionLimits | None = None,
    port: int = 0,
    sampling: Mapping[str, Any] | None = None,
    readers: Mapping[str, str] | None = None,
    page: PageOptions | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serve a model on a thread; agents are kept in `home`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(config.PREFIX + "HOME", str(home))
        with everwarm.load(model, **{"warm": "on", **settings}) as llm:
            app = create_app(
                llm, name, limits, Keys(keys or {}, operators, readers), origins, sampling=sampling, page=page
            )
            with socket.create_server(("127.0.0.1", port)) as listener:
                server = HttpServer(app, connections)
                thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
                thread.start()
                try:
                    wait_until(lambda: server.started)
                    yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", llm)
                finally:
                    server.should_exit = True
                    thread.join()
                    app.state.serving.close()


@contextmanager
def process(*arguments: str | Path, home: Path, grace_s: float = 20.0, descriptors: int | None = None) -> Iterator[str]:
    """`everwarm serve` with these arguments; its address once it is ready. It is ended by SIGTERM. `descriptors` is the
    system's limit of them.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(config.PREFIX)}
    environment |= {config.PREFIX + "HOME": str(home), config.PREFIX + "THREADS": "1"}
    command = ["everwarm", "serve", *map(str, arguments), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:  # a pipe that nobody reads would fill up
        log = Path(folder) / "log"
        server = Forked(command, environment, stderr=log, descriptors=descriptors)
        try:
            wait_until(lambda: server.poll() is not None or _healthy(url), pause_s=0.05)
            if server.poll() is not None:
                pytest.fail(f"the server has ended: {log.read_text()}")
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(grace_s)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False
