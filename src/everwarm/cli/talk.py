"""`everwarm generate`, `everwarm chat` and `everwarm score`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everwarm.cli.console import err, out, print_json
from everwarm.cli.loading import loaded
from everwarm.cli.options import (
    Agent,
    Json,
    LoadSettings,
    MaxTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    Stats,
    Stop,
    Temperature,
    TopK,
    TopP,
    loads_model,
)
from everwarm.errors import RequestError

if TYPE_CHECKING:
    from everwarm.llm import Completion, Event


@loads_model
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="What to say to the model ('-' reads stdin).")] = None,
    messages: Annotated[Path | None, typer.Option(help="JSON file with a list of chat messages.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    special: Annotated[bool, typer.Option("--special", help="With --raw: control tokens may be named in it.")] = False,
    agent: Agent = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    stats: Stats = False,
    as_json: Json = False,
    *,
    settings: LoadSettings,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, the speed to stderr."""
    source = _source(prompt, messages, raw)
    if raw and special:
        source["special"] = True
    with loaded(model, settings) as llm:
        completion = llm.generate(
            **source,
            agent=agent,
            max_tokens=max_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            on_event=None if as_json else _print_text,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
    if as_json:
        print_json(asdict(completion))
        return
    print(flush=True)
    err.print(_speed(completion), style="dim")
    if stats:
        _print_stats(completion)


@loads_model
def chat(
    model: Model,
    agent: Agent = None,
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
    settings: LoadSettings,
) -> None:
    """Talk with a model. /reset forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer. With
    --agent the conversation goes on where it was left.
    """
    opening = [{"role": "system", "content": system}] if system else []
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    with loaded(model, settings) as llm:
        llm.check_options(**options)
        history: list[Any] = (llm.conversation(agent) if agent else []) or list(opening)
        goes_on = f"; {agent} goes on after {len(history)} messages" if agent and len(history) > len(opening) else ""
        err.print(f"{llm.config.name}: /reset forgets, /exit ends{goes_on}", style="dim", markup=False)
        while (line := _ask()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                if agent and len(history) > len(opening):
                    llm.agents.delete(agent)
                history = list(opening)
                err.print("forgotten", style="dim")
                continue
            if not line:
                continue
            if line.startswith("/"):
                err.print(f"unknown command {line.split()[0]}: /reset forgets, /exit ends", markup=False)
                continue
            said = [*history, {"role": "user", "content": line}]
            try:
                answer = llm.generate(messages=said, agent=agent, on_event=_print_text, **options)
            except KeyboardInterrupt:
                err.print("\nstopped; that turn is forgotten", style="dim")
                continue
            except RequestError as error:  # too long for the context: the conversation is not lost
                err.print(f"{error} (/reset forgets the conversation)", markup=False)
                continue
            print(flush=True)
            err.print(_speed(answer), style="dim")
            if stats:
                _print_stats(answer)
            history = [*said, {"role": "assistant", "content": answer.text}]


@loads_model
def score(
    model: Model,
    text_file: Annotated[Path, typer.Option(help="UTF-8 text to score.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens per window (default: 2048, or the context if less).")
    ] = None,
    as_json: Json = False,
    *,
    settings: LoadSettings,
) -> None:
    """Perplexity of a text under a model: the mean surprise per token, in windows that are scored on their own."""
    text = _read_text(text_file)
    with loaded(model, settings) as llm:
        result = llm.score(text, window)
    if as_json:
        print_json(asdict(result))
    else:
        out.print(f"perplexity {result.ppl:.4f}  ({result.nll:.5f} nats per token over {result.tokens:,} tokens)")


def _source(prompt: str | None, messages: Path | None, raw: bool) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise RequestError("give either --prompt or --messages")
    if messages is not None:
        if raw:
            raise RequestError("--raw goes with --prompt: messages need the chat template")
        return {"messages": _read_messages(messages)}
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    return {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}


def _read_messages(path: Path) -> list[dict[str, Any]]:
    try:
        messages = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from None
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError(f'{path}: expected a list of messages such as [{{"role": "user", "content": "Hello"}}]')
    return messages


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8: {error}") from None


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input: not UTF-8: {error}") from None


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


def _print_text(event: "Event") -> None:
    print(event.text, end="", flush=True)


def _speed(completion: "Completion") -> str:
    decode = f", {completion.decode_tok_s:.1f} tok/s" if completion.decode_tok_s else ""
    cached = f", {completion.cached_tokens} of them {completion.tier}" if completion.cached_tokens else ""
    unsaved = f"; not saved: {completion.receipt.error}" if completion.receipt.error else ""
    return (
        f"({completion.prompt_tokens} prompt tokens{cached}, first token after {completion.ttft_s:.2f} s; "
        f"{len(completion.tokens)} tokens{decode}; {completion.finish_reason}{unsaved})"
    )


def _print_stats(completion: "Completion") -> None:
    used, total = completion.weights, sum(completion.time_s.values())
    err.print(
        f"(weights: {used.hits:,} hits, {used.prefetch_hits:,} read ahead, {used.misses:,} misses, "
        f"hit rate {used.hit_rate:.1%})",
        style="dim",
    )
    shares = ", ".join(
        f"{kind} {spent * 1e3:.0f} ms ({spent / total:.0%})" for kind, spent in completion.time_s.items()
    )
    err.print(f"(time: {shares})", style="dim")
