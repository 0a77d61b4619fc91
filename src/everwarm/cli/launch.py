"""`everwarm launch`: what an agent program needs to talk to a running server; printed, or used to start it."""

import os
import shutil
import sys
from typing import Annotated

import typer

from everwarm.cli.console import err
from everwarm.cli.remote import Remote
from everwarm.errors import ConfigError
from everwarm.server.programs import NO_KEY, PROGRAMS, command_line


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
        print(command_line(found, arguments))
        return
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(f"{command[0]}: not found; install it first, or leave out --run to see the command")
    err.print(f"starting {path} with {base}", markup=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(path, command, os.environ | found.environment)  # noqa: S606
