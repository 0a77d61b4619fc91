"""`everwarm chat`: a conversation with a model of our own, or with one that a server runs."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from everwarm.cli.console import err, print_answer
from everwarm.cli.loading import loaded
from everwarm.cli.options import (
    Agent,
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Stats,
    Temperature,
    TopK,
    TopP,
    takes_settings,
)
from everwarm.cli.remote import Remote
from everwarm.cli.talk import speed, statistics
from everwarm.cli.wrap import Wrapper
from everwarm.errors import RequestError
from everwarm.setting_kinds import PREFIX
from everwarm.settings import Settings

if TYPE_CHECKING:
    from everwarm.llm import LLM

Messages = list[Any]

HELP = """\
/reset   forget the conversation and begin a new one
/exit    end (Ctrl-D does, too)
/help    this list
Ctrl-C   stop an answer; that turn is forgotten"""


class Talker(Protocol):
    """Who answers."""

    name: str

    def conversation(self, agent: str) -> Messages: ...

    def forget(self, agent: str) -> None: ...

    def answer(self, messages: Messages, on_text: Callable[[str], None]) -> tuple[str, list[str]]:
        """The answer, and remarks about it."""


class Here:
    """A model in this process."""

    def __init__(self, llm: "LLM", name: str, agent: str | None, options: dict[str, Any], stats: bool) -> None:
        llm.check_options(**options)
        self.name = name
        self._llm, self._agent, self._options, self._stats = llm, agent, options, stats

    def conversation(self, agent: str) -> Messages:
        return list(self._llm.conversation(agent))

    def forget(self, agent: str) -> None:
        self._llm.agents.delete(agent)

    def answer(self, messages: Messages, on_text: Callable[[str], None]) -> tuple[str, list[str]]:
        done = self._llm.generate(
            messages=messages, agent=self._agent, on_event=lambda event: print_answer(event, on_text), **self._options
        )
        return done.text, [speed(done), *(statistics(done) if self._stats else ())]


class There:
    """A model that a server runs."""

    def __init__(self, remote: Remote, agent: str | None, options: dict[str, Any]) -> None:
        self.name = remote.model()
        self._remote, self._agent, self._options = remote, agent, options

    def conversation(self, agent: str) -> Messages:
        return self._remote.conversation(agent)

    def forget(self, agent: str) -> None:
        self._remote.forget(agent)

    def answer(self, messages: Messages, on_text: Callable[[str], None]) -> tuple[str, list[str]]:
        done = self._remote.answer(messages, self._agent, self._options, on_text)
        receipt = done.receipt
        cached = f", {receipt['cached_tokens']} of them {receipt['tier']}" if receipt.get("cached_tokens") else ""
        unsaved = f"; not saved: {receipt['error']}" if receipt.get("error") else ""
        return done.text, [
            f"({receipt.get('prompt_tokens', '?')} prompt tokens{cached}, first token after {done.ttft_s:.2f} s; "
            f"{done.tokens} tokens; {done.finish_reason}{unsaved})"
        ]


@takes_settings(Settings)
def chat(
    model: Annotated[str | None, typer.Argument(help="Path or pulled name; not needed with --url.")] = None,
    agent: Agent = None,
    url: Annotated[str | None, typer.Option(help="Talk to a running server, such as http://127.0.0.1:8080.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of a new conversation.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stats: Stats = False,
    *,
    settings: Settings,
) -> None:
    """Talk with a model. /help lists what else can be typed; Ctrl-C stops an answer. With --agent the conversation goes
    on where it was left. With --url the key comes from EVERWARM_API_KEY.
    """
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    opening = [{"role": "system", "content": system}] if system else []
    if (model is None) == (url is None):
        raise RequestError("give either a model or --url")
    with loaded(model, settings) if model is not None else nullcontext() as llm:
        if llm is not None:
            _talk(Here(llm, _plain_name(model or ""), agent, options, stats), agent, opening)
        else:
            key = os.environ.get(PREFIX + "API_KEY")
            _talk(There(Remote(url or "", key), agent, options), agent, opening)


def _talk(talker: Talker, agent: str | None, opening: Messages) -> None:
    history = (talker.conversation(agent) if agent else []) or list(opening)
    goes_on = f"; {agent} goes on after {len(history)} messages" if agent and len(history) > len(opening) else ""
    err.print(f"{talker.name}: type a message, or /help{goes_on}", style="dim", markup=False)
    while (line := _ask()) is not None:
        if line == "/exit":
            return
        if line == "/help":
            err.print(HELP, style="dim", markup=False)
            continue
        if line == "/reset":
            if agent and len(history) > len(opening):
                talker.forget(agent)
            history = list(opening)
            err.print("forgotten", style="dim")
            continue
        if not line:
            continue
        if line.startswith("/"):
            err.print(f"unknown command {line.split()[0]}; /help lists those there are", markup=False)
            continue
        said = [*history, {"role": "user", "content": line}]
        wrapper = Wrapper(_print_text, err.width if sys.stdout.isatty() else 0)
        try:
            text, remarks = talker.answer(said, wrapper.push)
            wrapper.flush()
        except KeyboardInterrupt:
            err.print("\nstopped; that turn is forgotten", style="dim")
            continue
        except RequestError as error:  # too long for the context: the conversation is not lost
            err.print(f"{error} (/reset forgets the conversation)", markup=False)
            continue
        print(flush=True)
        for remark in remarks:
            err.print(remark, style="dim", markup=False)
        history = [*said, {"role": "assistant", "content": text}]


def _plain_name(model: str) -> str:
    """What people call it: the name that was pulled, or the file's without its directory and ending."""
    return Path(model).stem if model.endswith(".gguf") else model


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _ask() -> str | None:
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline()
        if line.strip():
            err.print(f"> {line.strip()}", markup=False)  # a script's reader sees what was asked, too
        return line.strip() if line else None
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input: not UTF-8: {error}") from None
