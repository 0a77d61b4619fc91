"""Processes in which time to first token is measured: one that lives as long as a round, and one that is new.

In: a `Setup` as JSON in the argument, EVERWARM_HOME with a store of its own. Out: a list of `Measured` as JSON, the
last line on stdout.

    round     for each batch: cold (and the same with saving off), prime, then evict -> warm -> hot several times
    restart   the agents that a round has left behind, in a process that knows nothing of them but what is on disk

Every state computes the same: the suffix behind a history that is the context. An agent is forked for each question, so
that its history is the context again; `evict` comes before the fork, while the blocks have one owner.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everwarm.bench import ttft_disk
from everwarm.bench.ttft_text import tokens
from everwarm.engine.prefill import PREFILL_CHUNK
from everwarm.errors import EverwarmError, StoreError
from everwarm.kv.index.pool import BlockPool
from everwarm.kv.warm.tenants import DEFAULT_TENANT
from everwarm.llm import LLM, End, Event, load
from everwarm.model.transformer import Span
from everwarm.types import Run

PAIRS = 5
"""How often warm and hot take turns in a round: each is short, and what counts is their difference."""

_OTHER_TENANT = "cold"
_WARM_UP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """What to measure in one process."""

    role: str  # round or restart
    model: str
    context: int
    batch_sizes: list[int]
    states: list[str]
    suffix: int
    answer: int
    number: int  # of the round
    page_cache: str = "warm"  # or dropped
    kv_type: str | None = None
    threads: int | None = None
    overhead: bool = True
    started: float = 0.0  # when the process was started, by the clock of the one who did


@dataclass(slots=True)
class Measured:
    """One batch in one state: a value per agent, unless it is of the whole batch."""

    state: str  # cold, off (cold with saving switched off), warm, hot, restart; bandwidth
    context: int
    batch: int
    ttft_s: list[float] = field(default_factory=list)  # from the moment when all were asked
    last_s: float = 0.0  # until the last token of all
    answers: list[list[int]] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)
    writer_cpu_s: float = 0.0  # what the writer's thread computed meanwhile, until all was saved
    process: dict[str, float] | None = None  # restart: imports_s, load_s, open_s, and first_token_s from its start
    bandwidth: dict[str, float] | None = None
    dropped: dict[str, Any] | None = None


def run(setup: Setup) -> list[Measured]:
    """All measurements of one process."""
    imported = time.time()
    options: dict[str, Any] = {"threads": setup.threads, "kv_type": setup.kv_type, "restore": "always"}
    options |= {"durability": "turn", "pack": "on"}
    if setup.role == "restart":
        with load(setup.model, warm="on", **options) as llm:
            loaded = time.time()
            _ = llm.agents  # the store is looked through at its first use
            opened = time.time()
            found = list(_after_restart(llm, setup))
        for one in found:
            assert one.process is not None
            one.process |= {
                "imports_s": imported - setup.started, "load_s": loaded - imported, "open_s": opened - loaded
            }  # fmt: skip
        return found
    with load(setup.model, warm="on", verify="eager", **options) as llm:
        llm.weights.preload()
        _warm_up(llm)
        if "cold" not in setup.states or not setup.overhead:
            return list(_round(llm, None, setup))
        with load(setup.model, warm="off", verify="eager", **options) as unsaving:
            unsaving.weights.preload()
            _warm_up(unsaving)
            return list(_round(llm, unsaving, setup))


def _round(llm: LLM, unsaving: LLM | None, setup: Setup) -> Iterator[Measured]:
    for batch in setup.batch_sizes:
        bases = [_base(setup, number) for number in range(batch)]
        prompts = [_prompt(llm, setup, number) for number in range(batch)]
        cold = [f"cold-{number}" for number in range(batch)]
        # The first cold turn is the one that primes; for later ones nothing is known only of another tenant's.
        tenants = [_OTHER_TENANT if _is_known(llm, base) else DEFAULT_TENANT for base in bases]
        turns = [("cold", llm)] if "cold" in setup.states else []
        if unsaving is not None:
            turns.insert(setup.number % 2, ("off", unsaving))
        for state, model in turns:
            yield _ask(model, setup, state, cold, prompts, tenants)
            if model is unsaving:
                _delete(model, cold, tenants)
        for base, prompt in zip(bases, prompts, strict=True):
            _prime(llm, base, prompt[: setup.context])
        if turns:
            _delete(llm, cold, tenants)
        for number in range(PAIRS):
            for state in ("warm", "hot"):
                if state in setup.states:
                    yield _known(llm, setup, state, bases, prompts)
                elif number == 0:
                    _known(llm, setup, "", bases, prompts)
        if "warm" in setup.states or "restart" in setup.states:
            files = _files(llm, bases[:1])[:-1]
            found = ttft_disk.measure(files, BlockPool(llm.agents.memory), dropped=setup.page_cache == "dropped")
            yield Measured("bandwidth", setup.context, batch, bandwidth=asdict(found))
    for batch in setup.batch_sizes if "restart" in setup.states else ():  # last: what has two owners is not evicted
        for number in range(batch):
            llm.agents.fork(_base(setup, number), f"{_base(setup, number)}-restart-{batch}")


def _after_restart(llm: LLM, setup: Setup) -> Iterator[Measured]:
    (batch,) = setup.batch_sizes
    names = [f"{_base(setup, number)}-restart-{batch}" for number in range(batch)]
    began = time.time()
    prompts = [_prompt(llm, setup, number) for number in range(batch)]
    dropped = ttft_disk.drop(_files(llm, names)) if setup.page_cache == "dropped" else None
    done = _ask(llm, setup, "restart", names, prompts)
    done.process = {"first_token_s": began - setup.started + min(done.ttft_s)}  # making up prompts does not count
    done.dropped = None if dropped is None else asdict(dropped)
    yield done
    _delete(llm, names)


def _known(llm: LLM, setup: Setup, state: str, bases: list[str], prompts: list[list[int]]) -> Measured:
    """Ask forks of the agents, whose blocks are evicted first if the state is warm."""
    dropped = None
    if state == "warm":
        for base in bases:
            llm.agents.evict(base)
        if setup.page_cache == "dropped":
            dropped = ttft_disk.drop(_files(llm, bases))
    names = [f"{base}-{state}" for base in bases]
    for base, name in zip(bases, names, strict=True):
        llm.agents.fork(base, name)
    done = _ask(llm, setup, state, names, prompts)
    done.dropped = None if dropped is None else asdict(dropped)
    _delete(llm, names)
    return done


def _ask(
    llm: LLM, setup: Setup, state: str, names: list[str], prompts: list[list[int]], tenants: list[str] | None = None
) -> Measured:
    """Ask all at once, each in a thread of its own; what comes first is the engine's business."""
    done = Measured(state, setup.context, len(names))
    cpu, started = _writer_cpu(), time.perf_counter()
    asked = [
        llm.stream(tokens=prompt, agent=name, tenant=tenant, max_tokens=setup.answer, ignore_eos=True, temperature=0.0)
        for name, prompt, tenant in zip(names, prompts, tenants or [DEFAULT_TENANT] * len(names), strict=True)
    ]
    if len(asked) == 1:
        heard = [_listen(asked[0], started)]
    else:
        with ThreadPoolExecutor(len(asked)) as listeners:
            heard = list(listeners.map(lambda stream: _listen(stream, started), asked))
    for first, last, answer, receipt in heard:
        done.ttft_s.append(first)
        done.last_s = max(done.last_s, last)
        done.answers.append(answer)
        done.receipts.append(receipt)
    done.writer_cpu_s = _writer_cpu() - cpu
    for receipt in done.receipts:
        _check(setup, state, receipt)
    return done


def _listen(stream: Iterator[Event | End], started: float) -> tuple[float, float, list[int], dict[str, Any]]:
    """Seconds until the first and the last token, all of them, and the receipt."""
    heard: list[tuple[int, float]] = []
    receipt: dict[str, Any] = {}
    for event in stream:
        if isinstance(event, End):
            receipt = asdict(event.receipt)
        else:
            heard.append((event.token, time.perf_counter() - started))
    return heard[0][1], heard[-1][1], [token for token, _ in heard], receipt


def _check(setup: Setup, state: str, receipt: dict[str, Any]) -> None:
    """That the receipt says what was meant to be measured."""
    tier = {"restart": "warm", "off": "cold"}.get(state, state)
    cached = 0 if tier == "cold" else setup.context
    if state and (receipt["tier"], receipt["cached_tokens"]) != (tier, cached):
        raise StoreError(
            f"context {setup.context}, {state}: {cached} cached tokens from {tier} were meant, the receipt says "
            f"{receipt['cached_tokens']} from {receipt['tier']} ({receipt['reason']})"
        )
    if receipt["committed"] is not (state != "off"):
        raise StoreError(f"context {setup.context}, {state}: the turn was not saved: {receipt['error']}")


def _prime(llm: LLM, name: str, context: list[int]) -> None:
    """An agent whose history is the context, saved. What is known of it already is not computed again."""
    if _is_known(llm, name):
        return
    with llm.agents.open_turn(name, len(context)) as turn:
        turn.acquire(context)
        while turn.kv.length < len(context):
            chunk = context[turn.kv.length : turn.kv.length + PREFILL_CHUNK]
            llm.model.forward([Span(chunk, turn.kv, len(chunk))])
            turn.seal_full()
        receipt = turn.commit((Run(llm.detokenize(context, special=True), False, len(context)),), wait=True)
    if not receipt.committed:
        raise StoreError(f"{name}: {receipt.error}")


def _delete(llm: LLM, names: list[str], tenants: list[str] | None = None) -> None:
    for name, tenant in zip(names, tenants or [DEFAULT_TENANT] * len(names), strict=True):
        llm.agents.delete(name, tenant)


def _is_known(llm: LLM, name: str) -> bool:
    return any(agent.name == name for agent in llm.agents.listed(DEFAULT_TENANT))


def _warm_up(llm: LLM) -> None:
    count = min(_WARM_UP_TOKENS, llm.config.context // 2)
    llm.generate(tokens=tokens(llm, count, 0), max_tokens=2, ignore_eos=True, cache=False)


def _base(setup: Setup, number: int) -> str:
    return f"context-{setup.context}-{number}"


def _prompt(llm: LLM, setup: Setup, number: int) -> list[int]:
    return tokens(llm, setup.context + setup.suffix, number + 1)


def _files(llm: LLM, names: list[str]) -> list[Path]:
    """Files of these agents: their blocks, then the manifest of each."""
    files = [llm.agents.locations(llm.agents.find(name)) for name in names]
    return [Path(path) for blocks in files for path in blocks[:-1]] + [Path(blocks[-1]) for blocks in files]


def _writer_cpu() -> float:
    """Seconds that the writer's thread has computed."""
    for thread in threading.enumerate():
        if thread.name == "everwarm-writer":
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            return int(path.read_text().split()[0]) / 1e9 if path.exists() else 0.0
    return 0.0


def main() -> None:
    try:
        print(json.dumps([asdict(one) for one in run(Setup(**json.loads(sys.argv[1])))]))
    except EverwarmError as error:
        print(error, file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)


if __name__ == "__main__":
    main()
