"""Proves what a server does for many agents at once: conversations of several turns, all of them at the same time.

Each agent begins with a text of its own of about `context` tokens; each turn adds the answer and a new question, sent
as soon as the last answer has ended. First token = first delta that holds text. Everything is as a streaming client
sees it; what was cached is what the server says (receipts, or `usage`). With a peer, both servers get the same load one
after the other, and take turns in being first. The agent store is a temporary one; models and packs are the real ones.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everwarm import config
from everwarm.bench.load import server as load_server
from everwarm.bench.load.client import Client, Heard
from everwarm.bench.load.server import ServerProcess
from everwarm.bench.ttft.text import text
from everwarm.bench.ttft.ttft import temporary_home
from everwarm.errors import ConfigError, RequestError
from everwarm.setting_kinds import Given
from everwarm.settings import Settings
from everwarm.text.tokenizer import Tokenizer
from everwarm.weights.gguf.file import GGUFFile

OWN, PEER = "everwarm", "llama.cpp"
QUESTION_SENTENCES = 2
_TEMPLATE_TOKENS = 64  # that a chat template may add to a conversation, and a little room
_TEMPLATE_TURN_TOKENS = 16

Tell = Callable[[str, int, int], None]
"""Told (which server, turns done, turns in all)."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is to be measured."""

    agents: int
    turns: int
    context: int
    answer: int
    runs: int = 1
    peer: bool = False
    settings: Mapping[str, Given] = field(default_factory=dict)  # how the model is loaded


@dataclass(slots=True)
class Run:
    """One load on one server."""

    server: str
    number: int
    began: float
    ended: float = 0.0
    turns: list[Heard] = field(default_factory=list)
    rss: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """What agents say: the same in every run of the same model."""

    openings: list[str]  # by agent
    questions: list[list[str]]  # by agent and turn
    options: Mapping[str, Any]


def run(model: Path, asked: LoadOptions, tell: Tell) -> list[Run]:
    """Start the servers, one after the other, and measure."""
    with GGUFFile(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    script = write_script(asked, lambda said: len(tokenizer.encode(said)), list(tokenizer.special_tokens.values()))
    context = whole_context(asked, script, lambda said: len(tokenizer.encode(said)))
    threads = config.resolve(Settings, asked.settings).settings.threads or config.cores()
    found = []
    for number in range(asked.runs):
        servers = [OWN, PEER] if asked.peer else [OWN]
        for name in servers if number % 2 == 0 else reversed(servers):
            if name == PEER:
                with load_server.llama_cpp(model, asked.agents, context, threads) as server:
                    found.append(_measure(server.url, name, number, asked, script, tell, server))
            else:
                with temporary_home() as home, load_server.everwarm(model, home, asked.settings) as server:
                    found.append(_measure(server.url, name, number, asked, script, tell, server))
    return found


def run_url(url: str, asked: LoadOptions, tell: Tell, key: str | None = None) -> list[Run]:
    """Measure a server that runs already. Openings are new in each run: the first turn of an agent is cold."""
    client = Client(url, key)

    def count(said: str) -> int:
        return int(asyncio.run(client.call("POST", "/v1/tokenize", {"text": said}))["count"])

    script = write_script(asked, count, ())
    found = []
    for number in range(asked.runs):
        now = time.time_ns()
        new = replace(script, openings=[f"{now + agent} {said}" for agent, said in enumerate(script.openings)])
        found.append(_measure(url, url, number, asked, new, tell, None, key))
    return found


def write_script(asked: LoadOptions, count: Callable[[str], int], forbidden: Sequence[int]) -> Script:
    """Openings of about `context` tokens. `forbidden` tokens would end an answer or not be seen in it."""
    sample = text(64, 0)
    per_sentence = count(sample) / 64
    questions = [
        [text(QUESTION_SENTENCES, 1000 * (agent + 1) + turn) for turn in range(asked.turns)]
        for agent in range(asked.agents)
    ]
    sentences = max(1, round(asked.context / per_sentence) - QUESTION_SENTENCES)
    options: dict[str, Any] = {"max_tokens": asked.answer, "temperature": 0.0}
    if forbidden:
        options["logit_bias"] = {str(token): -100 for token in forbidden}
    return Script([text(sentences, agent + 1) for agent in range(asked.agents)], questions, options)


def whole_context(asked: LoadOptions, script: Script, count: Callable[[str], int]) -> int:
    """Tokens of the longest conversation: what a slot of the peer must hold."""
    longest = max(
        count(opening) + sum(count(question) for question in questions)
        for opening, questions in zip(script.openings, script.questions, strict=True)
    )
    # An answer that is tokenised again may become a little longer than it was.
    return longest + _TEMPLATE_TOKENS + asked.turns * (asked.answer * 5 // 4 + _TEMPLATE_TURN_TOKENS)


def _measure(
    url: str, name: str, number: int, asked: LoadOptions, script: Script, tell: Tell, server: ServerProcess | None,
    key: str | None = None,
) -> Run:  # fmt: skip
    client = Client(url, key)
    done = asyncio.run(_load(client, f"{name}, run {number + 1}", name, number, asked, script, tell))
    if server is not None:
        done.rss = server.rss_bytes()
    errors = [one.error for one in done.turns if one.error]
    if len(errors) == len(done.turns):
        raise RequestError(f"{name}: every turn failed: {errors[0]}")
    return done


async def _load(
    client: Client, title: str, name: str, number: int, asked: LoadOptions, script: Script, tell: Tell
) -> Run:  # fmt: skip
    warm_up = await client.chat([{"role": "user", "content": "Hello."}], "bench-load-warm-up", {"max_tokens": 4})
    if warm_up.error and not warm_up.usage:
        raise ConfigError(f"{name}: {warm_up.error}")
    unique = f"bench-load-{time.time_ns()}"
    done = Run(name, number, time.perf_counter())

    async def converse(agent: int) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(asked.turns):
            said = script.questions[agent][turn]
            messages.append({"role": "user", "content": said if turn else f"{script.openings[agent]} {said}"})
            heard = await client.chat(messages, f"{unique}-{agent}", script.options)
            heard.agent, heard.turn = agent, turn
            done.turns.append(heard)
            tell(title, len(done.turns), asked.agents * asked.turns)
            if heard.error:
                return
            messages.append({"role": "assistant", "content": heard.text})

    tell(title, 0, asked.agents * asked.turns)
    await asyncio.gather(*(converse(agent) for agent in range(asked.agents)))
    done.ended = time.perf_counter()
    return done
