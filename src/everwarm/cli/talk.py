"""`everwarm generate` and `everwarm score`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everwarm.cli.console import err, out, print_answer, print_json
from everwarm.cli.loading import loaded
from everwarm.cli.options import (
    Agent,
    Json,
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
    takes_settings,
)
from everwarm.errors import RequestError
from everwarm.settings import Settings

if TYPE_CHECKING:
    from everwarm.llm import Completion, Event


@takes_settings(Settings)
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
    json_schema: Annotated[
        Path | None, typer.Option(help="JSON file with a schema: the answer is JSON that is valid under it.")
    ] = None,
    stats: Stats = False,
    as_json: Json = False,
    *,
    settings: Settings,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, the speed to stderr."""
    source = _source(prompt, messages, raw)
    if raw and special:
        source["special"] = True
    if json_schema is not None:
        source["schema"] = _read_json(json_schema)
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
    err.print(speed(completion), style="dim", markup=False)
    if stats:
        err.print("\n".join(statistics(completion)), style="dim")


@takes_settings(Settings)
def score(
    model: Model,
    text_file: Annotated[Path, typer.Option(help="UTF-8 text to score.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens per window (default: 2048, or the context if less).")
    ] = None,
    as_json: Json = False,
    *,
    settings: Settings,
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
    messages = _read_json(path)
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError(f'{path}: expected a list of messages such as [{{"role": "user", "content": "Hello"}}]')
    return messages


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from None


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


def _print_text(event: "Event") -> None:
    print_answer(event, lambda text: print(text, end="", flush=True))


def speed(completion: "Completion") -> str:
    """One line about an answer."""
    decode = f", {completion.decode_tok_s:.1f} tok/s" if completion.decode_tok_s else ""
    tier = "cached" if completion.tier == "cold" else completion.tier  # of few cached tokens
    cached = f", {completion.cached_tokens} of them {tier}" if completion.cached_tokens else ""
    unsaved = f"; not saved: {completion.receipt.error}" if completion.receipt.error else ""
    return (
        f"({completion.prompt_tokens} prompt tokens{cached}, first token after {completion.ttft_s:.2f} s; "
        f"{len(completion.tokens)} tokens{decode}; {completion.finish_reason}{unsaved})"
    )


def statistics(completion: "Completion") -> list[str]:
    """What the weight cache did, what drafts did, and where the time went."""
    used, receipt, total = completion.weights, completion.receipt, sum(completion.time_s.values())
    shares = ", ".join(
        f"{kind} {spent * 1e3:.0f} ms ({spent / total:.0%})" for kind, spent in completion.time_s.items()
    )
    return [
        f"(weights: {used.hits:,} hits, {used.prefetch_hits:,} read ahead, {used.misses:,} misses, "
        f"hit rate {used.hit_rate:.1%})",
        f"(drafts: {receipt.accepted_tokens} of {receipt.drafted_tokens} tokens right, {receipt.passes} passes)",
        f"(time: {shares})",
    ]
