"""The server as a process: it listens before it is ready, ends when told to, and begins cleanly after being killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import LETTERS

from everwarm import config
from forked import Forked
from tiny import Tiny
from waiting_until import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=200_000).write(path)
    return path


LONG_GRACE = ("--grace", str(5 * PATIENCE_S))  # who waits for its end has not understood something


class Server:
    """`everwarm serve`, from its start to its end; in a fresh interpreter, where it matters how it starts."""

    def __init__(self, model: Path, home: Path, *arguments: str, fresh: bool = False, **variables: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(config.PREFIX)}
        environment |= {config.PREFIX + "HOME": str(home), config.PREFIX + "THREADS": "1"} | variables
        command = ["everwarm", "serve", str(model), "--port", str(self.port), "--log-format", "json", *arguments]
        self._log = home / f"log of {self.port}"
        self.process: Forked | subprocess.Popen[bytes]
        if fresh:
            with self._log.open("w") as log:
                self.process = subprocess.Popen([sys.executable, "-m", *command], env=environment, stderr=log)
        else:
            self.process = Forked(command, environment, stderr=self._log)
        self.health: list[dict[str, Any]] = []

    def status(self) -> str | None:
        """What /health says; None while nothing listens."""
        assert self.process.poll() is None
        try:
            self.health.append(httpx.get(self.url + "/health").json())
        except httpx.TransportError:
            return None
        return str(self.health[-1]["status"])

    def wait(self) -> "Server":
        wait_until(lambda: self.status() == "ok", pause_s=0.02)
        return self

    def wait_for_requests(self) -> None:
        """Until one is being answered."""
        wait_until(lambda: "everwarm_sequences_running 1.0" in httpx.get(self.url + "/metrics").text)

    def ask(self, agent: str, text: str = "Hello", tokens: int = 8, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
        body |= {"logit_bias": LETTERS, "everwarm": {"agent": agent}} | more
        return httpx.post(self.url + "/v1/chat/completions", json=body)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, what it wrote. It must not take as long as `LONG_GRACE` allows."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """The same, if it ends by itself."""
        return self.process.wait(PATIENCE_S), self._log.read_text()


@contextmanager
def serving(model: Path, home: Path, *arguments: str, fresh: bool = False, **variables: str) -> Iterator[Server]:
    server = Server(model, home, *arguments, fresh=fresh, **variables)
    try:
        yield server.wait()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


class Load:
    """Agents that talk until they are refused; which turns were acknowledged."""

    def __init__(self, server: Server, agents: int) -> None:
        self.acknowledged: dict[str, int] = {}  # agent: tokens of its history
        self.refusals: list[httpx.Response] = []
        self._threads = [threading.Thread(target=self._talk, args=(server, f"agent-{i}")) for i in range(agents)]
        for thread in self._threads:
            thread.start()

    def _talk(self, server: Server, agent: str) -> None:
        for turn in range(10_000):
            try:
                response = server.ask(agent, f"{agent} " * (turn + 1), 16)
            except httpx.TransportError:
                return
            if response.status_code != 200:
                self.refusals.append(response)
                return
            usage = response.json()["usage"]
            assert response.json()["everwarm"]["committed"] is True
            self.acknowledged[agent] = usage["prompt_tokens"] + usage["completion_tokens"]

    def wait(self) -> None:
        """Until each agent has had a turn."""
        wait_until(lambda: len(self.acknowledged) == len(self._threads))

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def test_health_answers_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, fresh=True) as server:
        assert server.health[0]["status"] == "loading"
        assert server.health[-1] == {"status": "ok", "model": "tiny"}


def test_a_model_that_can_not_be_loaded_ends_the_server_with_2(tmp_path: Path) -> None:
    code, written = Server(tmp_path / "missing.gguf", tmp_path, fresh=True).ended()
    assert code == 2
    assert "missing.gguf: no such file" in written
    assert "Traceback" not in written


def test_sigterm_while_loading_ends_with_0(model: Path, tmp_path: Path) -> None:
    server = Server(model, tmp_path, fresh=True)
    wait_until(server.status)
    code, written = server.end()
    assert (code, "Traceback" in written) == (0, False)


def test_sigterm_under_load_keeps_every_acknowledged_turn(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *LONG_GRACE) as server:
        load = Load(server, 6)
        load.wait()
        code, written = server.end()
        load.join()
    assert (code, "Traceback" in written) == (0, False)
    assert {response.status_code for response in load.refusals} <= {503}
    assert all("retry-after" in response.headers for response in load.refusals)
    with serving(model, tmp_path) as server:
        known = {one["id"]: one for one in httpx.get(server.url + "/v1/agents").json()["data"]}
        for agent, tokens in load.acknowledged.items():
            assert known[agent]["tokens"] >= tokens
            assert known[agent]["tier"] == "warm"
        assert server.end()[0] == 0


def test_a_turn_that_outlasts_the_grace_is_told_and_its_blocks_are_kept(model: Path, tmp_path: Path) -> None:
    long = "word " * 400
    with serving(model, tmp_path, "--grace", "0") as server:
        parts: list[str] = []

        def stream() -> None:
            body = {"messages": [{"role": "user", "content": long}], "max_tokens": 150_000, "logit_bias": LETTERS}
            with httpx.stream("POST", server.url + "/v1/chat/completions", json=body | {"stream": True}) as response:
                parts.extend(response.iter_lines())

        thread = threading.Thread(target=stream)
        thread.start()
        wait_until(lambda: len(parts) >= 20)
        code, _ = server.end()
        thread.join()
    assert code == 0
    assert any("the server is shutting down" in part for part in parts)
    with serving(model, tmp_path) as server:
        receipt = server.ask("another", long).json()["everwarm"]
        assert receipt["tier"] == "warm"
        assert receipt["cached_tokens"] > 1000


def test_while_it_ends_new_requests_are_asked_to_come_again(model: Path, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 150_000, "logit_bias": LETTERS}
    with serving(model, tmp_path, *LONG_GRACE) as server:
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body | {"stream": True}) as response:
            lines = response.iter_lines()  # the connection is closed when nobody refers to it
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.status() == "stopping")
            refused = server.ask("new")
            health = httpx.get(server.url + "/health")
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert health.status_code == 503
        assert server.ended()[0] == 0  # its last client has gone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path, number: int) -> None:
    with serving(model, tmp_path, *LONG_GRACE) as server:

        def ask() -> None:
            with pytest.raises(httpx.TransportError):
                server.ask("a", "b", 150_000)

        thread = threading.Thread(target=ask)
        thread.start()
        server.wait_for_requests()
        server.process.send_signal(number)
        wait_until(lambda: server.status() == "stopping")
        code, _ = server.end(number)
        thread.join()
    assert code == 128 + number


def test_sigkill_under_load_leaves_a_clean_start(model: Path, tmp_path: Path) -> None:
    acknowledged: dict[str, int] = {}
    for _ in range(2):
        with serving(model, tmp_path) as server:
            load = Load(server, 6)
            load.wait()
            server.end(signal.SIGKILL)
            load.join()
            acknowledged |= load.acknowledged
    with serving(model, tmp_path) as server:
        known = {one["id"]: one for one in httpx.get(server.url + "/v1/agents").json()["data"]}
        for agent, tokens in acknowledged.items():
            assert known[agent]["tokens"] >= tokens
        assert "everwarm_corrupt_blocks_total 0.0" in httpx.get(server.url + "/metrics").text
        code, written = server.end()
    assert code == 0
    levels = [json.loads(line)["level"] for line in written.splitlines() if line.startswith("{")]
    assert {"error", "warning"}.isdisjoint(levels), written


def test_keys_come_from_the_command_and_the_environment_and_stay_out_of_the_lock(model: Path, tmp_path: Path) -> None:
    keys = {"EVERWARM_API_KEYS": "bert:in-the-environment, another"}
    with serving(model, tmp_path, "--api-key", "anna:on-the-command-line", **keys) as server:
        assert server.ask("a").status_code == 401
        for key in ("on-the-command-line", "in-the-environment", "another"):
            assert httpx.get(server.url + "/v1/agents", headers={"X-Api-Key": key}).status_code == 200
        assert "on-the-command-line" not in (tmp_path / "agents" / "lock").read_text()
