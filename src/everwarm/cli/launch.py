"""`everwarm launch`: what an agent program needs to talk to a running server; printed, or used to start it."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from everwarm.cli.console import err
from everwarm.cli.remote import Remote
from everwarm.errors import ConfigError

NO_KEY = "everwarm"
"""What is sent to a server without keys: the programs insist on one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one program is started."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def claude(url: str, model: str, key: str) -> Launch:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
              "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL")  # fmt: skip
    return Launch(
        ["claude"],
        {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, **dict.fromkeys(models, model)}
        # It would ask its maker for updates and send statistics, and give up on a slow first token.
        | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "API_TIMEOUT_MS": "3600000"},
    )


def codex(url: str, model: str, key: str) -> Launch:
    provider = {
        "name": "everwarm", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "EVERWARM_KEY",
        "stream_idle_timeout_ms": 3600000,
    }  # fmt: skip
    settings: dict[str, object] = {"model": model, "model_provider": "everwarm"}
    settings |= {f"model_providers.everwarm.{name}": value for name, value in provider.items()}
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(["codex", *flags], {"EVERWARM_KEY": key})


def opencode(url: str, model: str, key: str) -> Launch:
    options = {"baseURL": f"{url}/v1", "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "everwarm", "options": options, "models": {model: {}}}
    config = {"provider": {"everwarm": provider}, "model": f"everwarm/{model}", "small_model": f"everwarm/{model}"}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def qwen(url: str, model: str, key: str) -> Launch:
    return Launch(["qwen"], {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model})


def aider(url: str, model: str, key: str) -> Launch:
    return Launch(["aider", "--model", f"openai/{model}"], {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key})


PROGRAMS: dict[str, Callable[[str, str, str], Launch]] = {
    "claude": claude, "codex": codex, "opencode": opencode, "qwen": qwen, "aider": aider,
}  # fmt: skip


def launch(
    program: Annotated[str, typer.Argument(help=f"One of {', '.join(PROGRAMS)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program gets besides, after `--`.")] = None,
    url: Annotated[str, typer.Option(help="The running server.")] = "http://127.0.0.1:8080",
    key: Annotated[
        str | None, typer.Option(help="The server's API key, if it has any.", envvar="EVERWARM_API_KEY")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Start the program, instead of printing the command.")] = False,
) -> None:
    """Print the command that starts an agent program with this server, or run it."""
    if program not in PROGRAMS:
        raise ConfigError(f"{program}: known are {', '.join(PROGRAMS)}; for others see docs/clients.md")
    base = url.rstrip("/").removesuffix("/v1")
    found = PROGRAMS[program](base, Remote(base, key).model(), key or NO_KEY)
    command = [*found.command, *(arguments or ())]
    if not run:
        variables = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
        print(" \\\n  ".join([*variables, shlex.join(command)]))
        return
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(f"{command[0]}: not found; install it first, or leave out --run to see the command")
    err.print(f"starting {path} with {base}", markup=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(path, command, os.environ | found.environment)  # noqa: S606
