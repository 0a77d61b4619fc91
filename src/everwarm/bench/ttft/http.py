"""Time to first token as a streaming client sees it: the states of `bench ttft`, over HTTP.

    cold      nothing is looked up
    warm      the agent was dropped from memory (DELETE /v1/agents/{id}?evict_only=true)
    hot       its blocks are in memory
    restart   the server was killed and started again; only with a server that was started here

Prime -> evict or restart -> measure, on forks of one agent, so that its history is the context again. First token =
first delta that holds text, from the moment when the request is sent. Receipts are checked for the tier and the cached
tokens that were meant; the text must be that of the cold run.
"""

import asyncio
import signal
import statistics
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everwarm.bench.load import server as load_server
from everwarm.bench.load.client import Client, Heard
from everwarm.bench.load.server import ServerProcess
from everwarm.bench.ttft.text import text
from everwarm.bench.ttft.ttft import STATES, temporary_home
from everwarm.errors import ConfigError, RequestError, StoreError
from everwarm.setting_kinds import Given

_TIERS = {"cold": "cold", "warm": "warm", "hot": "hot", "restart": "warm"}


@dataclass(frozen=True, slots=True)
class HttpTtftOptions:
    """What is to be measured: on a server that runs at `url`, or on one that is started for `model`."""

    contexts: list[int]
    runs: int
    states: list[str]
    suffix: int = 32
    answer: int = 16
    url: str | None = None
    model: Path | None = None
    key: str | None = None
    settings: Mapping[str, Given] = field(default_factory=dict)  # how the model is loaded


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    state: str
    context: int
    question: str  # by which its answers are compared
    ttft_s: float
    text: str
    receipt: dict[str, Any]
    since_start_s: float | None = None  # restart: first token, from the start of the process


def check(asked: HttpTtftOptions) -> None:
    """Raise ConfigError if it can't be done."""
    if (asked.url is None) == (asked.model is None):
        raise ConfigError("give either the --url of a server, or a model for which one is started")
    if asked.url is not None and "restart" in asked.states:
        raise ConfigError("--states restart: a server at --url is not ours to kill; give a model and --http instead")


def run(asked: HttpTtftOptions, tell: Callable[[str], None]) -> list[Measured]:
    """Everything that was measured, in its order."""
    check(asked)
    found = []
    with ExitStack() as stack:
        home = stack.enter_context(temporary_home()) if asked.model else None

        def start() -> ServerProcess | None:
            if asked.model is None or home is None:
                return None
            settings = {"warm": "on", "durability": "turn", "restore": "always"} | dict(asked.settings)
            return stack.enter_context(load_server.everwarm(asked.model, home, settings))

        server = start()
        for context in asked.contexts:
            for number in range(asked.runs):
                tell(f"context {context}: round {number + 1} of {asked.runs}")
                client = Client(asked.url or (server.url if server else ""), asked.key)
                question = asyncio.run(_prompt(client, asked, context, number))
                base = f"bench-ttft-{time.time_ns()}"
                found += asyncio.run(_round(client, asked, context, question, base))
                if "restart" in asked.states and server is not None:
                    server.end(signal.SIGKILL)
                    server = start()
                    assert server is not None
                    client = Client(server.url, asked.key)
                    heard = asyncio.run(_ask(client, asked, question, f"{base}-restart"))
                    since = heard.deltas[0] - server.started
                    found.append(_checked("restart", context, base, heard, since))
                asyncio.run(_forget(client, [base, f"{base}-restart"]))
    _check_answers(found)
    return found


def summarise(found: Sequence[Measured]) -> dict[str, Any]:
    """A row per context and state, as `bench ttft` has them."""
    rows: list[dict[str, Any]] = []
    comparisons = []
    for context in dict.fromkeys(one.context for one in found):
        here: dict[str, float] = {}
        for state in STATES:
            runs = [one for one in found if (one.context, one.state) == (context, state)]
            if not runs:
                continue
            seconds = [one.ttft_s for one in runs]
            here[state] = statistics.median(seconds)
            rows.append(
                {
                    "context": context,
                    "state": state,
                    "tier": runs[0].receipt["tier"],
                    "cached_tokens": runs[0].receipt["cached_tokens"],
                    "ttft_s": here[state],
                    "spread": (max(seconds) - min(seconds)) / 2 / here[state],
                    "runs": seconds,
                    "since_start_s": _median(one.since_start_s for one in runs),
                    "receipts": [one.receipt for one in runs],
                }
            )
        ratios = {f"cold_over_{s}": here["cold"] / here[s] for s in here if s != "cold" and "cold" in here}
        comparisons.append({"context": context} | ratios)
    return {"rows": rows, "comparisons": comparisons}


async def _prompt(client: Client, asked: HttpTtftOptions, context: int, number: int) -> list[int]:
    """So many tokens, others in every round: nothing of one is known from another."""
    wanted = context + asked.suffix
    ids: list[int] = []
    while len(ids) < wanted:
        said = f"{time.time_ns()} {text(wanted // 4 + 8, number)} "
        ids += (await client.call("POST", "/v1/tokenize", {"text": said}))["tokens"]
    return ids[:wanted]


async def _round(
    client: Client, asked: HttpTtftOptions, context: int, question: list[int], base: str
) -> list[Measured]:
    found = []
    if "cold" in asked.states:
        heard = await _ask(client, asked, question, f"{base}-cold", everwarm={"cache": False})
        found.append(_checked("cold", context, base, heard))
    primed = await _ask(client, asked, question[:context], base, max_tokens=1)
    if primed.error and not primed.usage:  # a single token may hold no text
        raise RequestError(f"context {context}: the agent was not primed: {primed.error}")
    for state in ("warm", "hot"):
        if state not in asked.states:
            continue
        path = f"/v1/agents/{urllib.parse.quote(base, safe='')}"
        if state == "warm":
            await client.call("DELETE", f"{path}?evict_only=true")
        await client.call("POST", f"{path}/fork", {"name": f"{base}-{state}"})
        heard = await _ask(client, asked, question, f"{base}-{state}")
        found.append(_checked(state, context, base, heard))
        await _forget(client, [f"{base}-{state}"])
    if "restart" in asked.states:
        await client.call("POST", f"/v1/agents/{urllib.parse.quote(base, safe='')}/fork", {"name": f"{base}-restart"})
    return found


async def _ask(client: Client, asked: HttpTtftOptions, prompt: list[int], agent: str, **options: Any) -> Heard:
    body = {"prompt": prompt, "max_tokens": asked.answer, "temperature": 0.0} | options
    return await client.stream("/v1/completions", body, agent)


async def _forget(client: Client, agents: Sequence[str]) -> None:
    known = {one["id"] for one in (await client.call("GET", "/v1/agents"))["data"]}
    for agent in agents:
        if agent in known:
            await client.call("DELETE", f"/v1/agents/{urllib.parse.quote(agent, safe='')}")


def _checked(state: str, context: int, question: str, heard: Heard, since_s: float | None = None) -> Measured:
    """Raise StoreError if the state is not the one that was meant."""
    if heard.error:
        raise RequestError(f"context {context}, {state}: {heard.error}")
    receipt = heard.receipt
    wanted = (_TIERS[state], 0 if state == "cold" else context)
    if (receipt["tier"], receipt["cached_tokens"]) != wanted:
        raise StoreError(
            f"context {context}, {state}: {receipt['cached_tokens']} tokens came from tier {receipt['tier']}, "
            f"meant were {wanted[1]} from {wanted[0]} ({receipt['reason']})"
        )
    return Measured(state, context, question, heard.ttft_s, heard.text, receipt, since_s)


def _check_answers(found: Sequence[Measured]) -> None:
    """The answer depends on the question alone."""
    first: dict[str, Measured] = {}
    for one in found:
        wanted = first.setdefault(one.question, one)
        if one.text != wanted.text:
            raise StoreError(f"context {one.context}: {one.state} answers otherwise than {wanted.state}")


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
