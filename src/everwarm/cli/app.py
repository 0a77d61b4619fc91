"""All commands in one place, and what becomes of an error."""

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import typer

from everwarm.cli import agents, bench, chat, doctor, launch, models, serve, talk, weights
from everwarm.cli.console import printable
from everwarm.errors import EverwarmError

app = typer.Typer(
    name="everwarm",
    help="Run GGUF language models on ordinary machines; never compute the same thing twice. Each setting is a flag "
    "(--kv-type), a variable (EVERWARM_KV_TYPE) and a key of config.toml (kv_type); `everwarm doctor` lists them all.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("pull")(models.pull)
app.command("inspect")(models.inspect)
app.command("generate")(talk.generate)
app.command("chat")(chat.chat)
app.command("score")(talk.score)
app.command("serve")(serve.serve)
app.command("launch")(launch.launch)
app.add_typer(agents.app, name="agents")
app.add_typer(weights.app, name="weights")
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)

# UsageError of click. Newer versions of typer carry a click of their own, so it can't be imported by name.
_UsageError: Any = typer.BadParameter.__base__


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"everwarm {installed('everwarm')}")
        raise typer.Exit


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        result = app(args=list(arguments), standalone_mode=False)
        return result if isinstance(result, int) else 0
    except EverwarmError as error:
        return _complain(str(error))
    except _UsageError as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # nothing was asked: help, not a complaint
            print(message, file=sys.stderr)
            return 2
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        return _complain(message + hint) if message else 2  # the message is empty when help was shown instead
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return 130


def _terminate(number: int, frame: object) -> None:
    """End as if the command had ended by itself: what is in memory is written, locks are released."""
    sys.exit(128 + number)


def _complain(message: str) -> int:
    print(f"everwarm: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2
