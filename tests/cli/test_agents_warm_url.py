"""`everwarm agents ... --warm-url`: the same commands on object storage; and what `everwarm serve` refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everwarm.cli.app import run
from everwarm.kv.remote.opening import open_warm
from everwarm.kv.store import AgentStore
from kv.fake import open_store, talk
from kv.s3 import Server, server

Cli = Callable[..., tuple[int, str, str]]
HISTORY = list(range(100, 150))


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with server() as running:
        yield running


@pytest.fixture
def url(s3: Server) -> str:
    return s3.new_bucket()


@contextmanager
def replica(url: str, home: Path) -> Iterator[AgentStore]:
    place = open_warm(url, home, 1 << 20)
    store = open_store(place, quota=place.free_bytes())
    try:
        yield store
    finally:
        store.close()
        place.close()


@pytest.fixture
def cli(home: Path, url: str, capfd: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["agents", *(str(argument) for argument in arguments), "--warm-url", url])
        sys.stdout.flush()
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def names(cli: Cli) -> list[str]:
    return sorted(row["agent"] for row in json.loads(cli("ls", "--json")[1])["agents"])


def test_every_command_works_beside_a_server(cli: Cli, url: str, home: Path, tmp_path: Path) -> None:
    with replica(url, home) as store:
        talk(store, "alice", HISTORY)
        assert names(cli) == ["alice"]
        code, out, _ = cli("show", "alice", "--json")
        assert (code, json.loads(out)["tokens"], json.loads(out)["lost"]) == (0, 50, [])
        assert cli("why", "alice")[0] == 0
        assert cli("fork", "alice", "bob")[0] == 0
        assert cli("pin", "bob")[0] == 0
        assert cli("export", "alice", tmp_path / "file")[0] == 0
        assert cli("import", tmp_path / "file", "--as", "carol")[0] == 0
        assert names(cli) == ["alice", "bob", "carol"]
        assert talk(store, "carol", [*HISTORY, 1]).cached_tokens == 50
        assert talk(store, "bob", [*HISTORY, 1]).cached_tokens == 50
        assert cli("rm", "carol")[0] == 0
        assert names(cli) == ["alice", "bob"]
        code, out, _ = cli("verify")
        assert (code, "all as it was written" in out) == (0, True)
        code, out, _ = cli("gc", "--json")
        assert (code, json.loads(out)["removals"]) == (0, [])
        code, _, told = cli("gc", "--dry-run", "--warm-age", "1")
        assert code == 0
        assert "when gc is run again" in told
        assert talk(store, "alice", [*HISTORY, 1]).cached_tokens == 50


def test_agents_move_between_a_directory_and_a_bucket(
    cli: Cli, url: str, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    local = open_store(home / "agents")
    talk(local, "alice", HISTORY)
    local.close()
    with replica(url, home) as store:
        talk(store, "bob", HISTORY)
    assert run(["agents", "export", "alice", str(tmp_path / "file")]) == 0
    assert cli("import", tmp_path / "file")[0] == 0
    assert names(cli) == ["alice", "bob"]


def test_a_bucket_without_agents_is_one_line(cli: Cli, home: Path) -> None:
    code, out, told = cli("ls")
    assert (code, out) == (2, "")
    assert "there is no warm tier" in told


def test_a_server_with_a_wrong_bucket_says_so_in_one_line_and_ends(s3: Server, home: Path, tmp_path: Path) -> None:
    from tiny import Tiny

    Tiny().write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "everwarm", "serve", str(tmp_path / "tiny.gguf"), "--port", "0"]
    environment = {**os.environ, **s3.environment, "EVERWARM_WARM": "on"}
    done = subprocess.run(
        [*command, "--warm-url", "s3://no-such-bucket/x"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 2
    assert "there is no such bucket" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
