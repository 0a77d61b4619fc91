"""`everwarm launch` against a real server."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, running

from everwarm.cli.app import run
from everwarm.cli.launch import PROGRAMS
from tiny import Tiny


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("launch")
    Tiny().write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


def everwarm(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    command = [sys.executable, "-m", "everwarm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_printed_command_names_the_server_and_the_model(
    server: Running, program: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(["launch", program, "--url", server.url, "--", "--flag", "two words"])
    printed, said = capfd.readouterr()
    assert code == 0, said
    words = shlex.split(printed.replace("\\\n", " "))
    assert server.url in printed
    assert "tiny" in printed
    assert words[-2:] == ["--flag", "two words"]
    assert program in words


def test_the_program_is_run_with_all_of_it(server: Running, tmp_path: Path) -> None:
    fake = tmp_path / "codex"
    fake.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    fake.chmod(0o755)
    done = everwarm("launch", "codex", "--url", server.url + "/v1", "--key", "k", "--run", "--", "exec", path=tmp_path)
    arguments, environment = json.loads(done.stdout)
    assert environment["EVERWARM_KEY"] == "k"
    assert arguments[-1] == "exec"
    settings = dict(one.split("=", 1) for one in arguments[1:-1:2])
    assert json.loads(settings["model_providers.everwarm.base_url"]) == server.url + "/v1"
    assert json.loads(settings["model"]) == "tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vim",), "vim: known are claude"),
        (("claude", "--url", "http://127.0.0.1:9"), "can't be reached"),
        (("claude", "--url", "nowhere"), "expected something like http"),
    ],
)
def test_what_can_not_be_is_said_in_a_line(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *arguments]) == 2
    printed, said = capfd.readouterr()
    assert printed == ""
    assert message in said


def test_a_program_that_is_not_there_is_named(server: Running, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "everwarm", "launch", "qwen", "--url", server.url, "--run"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": str(tmp_path)}
    )
    assert (done.returncode, "qwen: not found" in done.stderr) == (2, True)
