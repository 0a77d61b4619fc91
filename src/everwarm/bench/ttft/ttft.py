"""Proves what a known prefix is worth: time to first token of the same question, cold, warm, hot and after a restart.

    cold      nothing is known: context and suffix are computed, and saved
    warm      the agent was evicted: its blocks are read from disk, the suffix is computed
    hot       its blocks are in memory
    restart   as warm, in a process that was started for it. Its time to first token begins when the model is loaded and
              the store is open; the time since the process was started is told beside it

Prime -> evict or restart -> measure. Receipts are checked for the tier and the number of cached tokens that were meant,
and answers must be those of the cold run, token for token. States take turns in every round; figures are medians. The
store is a temporary one on the disk of the real one; models and packs are the real ones.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from everwarm import config
from everwarm.bench.ttft.child import Measured, Setup
from everwarm.bench.ttft.peer import Peer, PeerError
from everwarm.errors import ConfigError, StoreError
from everwarm.model.facts import read_model
from everwarm.setting_kinds import PREFIX
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.pack.identity import REMEMBERED

STATES = ("cold", "warm", "hot", "restart")
PAGE_CACHE = ("warm", "dropped")
PEER = "llama.cpp"


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """What is to be measured."""

    model: Path
    contexts: list[int]
    batch_sizes: list[int]
    runs: int
    states: list[str]
    suffix: int = 32
    answer: int = 16
    page_cache: str = "warm"
    kv_type: str | None = None
    threads: int | None = None
    peer: bool = False
    overhead: bool = True  # measure each cold turn a second time, with saving switched off


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One restore by the peer."""

    context: int
    flash: bool
    restore_s: float  # of the state, from a file
    copy_s: float  # the same from memory
    suffix_s: float
    bytes: int


def check(asked: TtftOptions) -> None:
    """Raise ConfigError if the model can't do this."""
    with GGUFFile(asked.model) as file:
        model = read_model(file)
    room = model.context - asked.suffix - asked.answer
    if max(asked.contexts) > room:
        raise ConfigError(
            f"--contexts {max(asked.contexts)}: beside a suffix of {asked.suffix} tokens and an answer of "
            f"{asked.answer}, the model's context leaves room for {room:,}"
        )


def run(asked: TtftOptions, tell: Callable[[str], None]) -> tuple[list[Measured], list[PeerRun]]:
    """Everything that was measured, in the order in which it was."""
    found: list[Measured] = []
    peers: list[PeerRun] = []
    for context in asked.contexts:
        with temporary_home() as home, _peer(asked, context, home) as peer:
            for number in range(asked.runs):
                tell(f"context {context}: round {number + 1} of {asked.runs}")
                setup = Setup(
                    "round", str(asked.model), context, asked.batch_sizes, asked.states, asked.suffix, asked.answer,
                    number, asked.page_cache, asked.kv_type, asked.threads, asked.overhead,
                )  # fmt: skip
                found += _child(setup, home)
                for batch in asked.batch_sizes if "restart" in asked.states else ():
                    found += _child(replace(setup, role="restart", batch_sizes=[batch]), home)
                if peer is not None:
                    peers += [PeerRun(context, **one) for one in peer.measure()]
    _check_answers(found)
    return found, peers


def _child(setup: Setup, home: Path) -> list[Measured]:
    environment = os.environ | {PREFIX + "HOME": str(home)}
    arguments = [
        sys.executable,
        "-m",
        "everwarm.bench.ttft.child",
        json.dumps(asdict(replace(setup, started=time.time()))),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)  # noqa: S603
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"context {setup.context}: the {setup.role} ended with code {done.returncode}: {last}")
    return [Measured(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def _check_answers(found: list[Measured]) -> None:
    """The answer depends on the question alone."""
    first: dict[tuple[int, int], tuple[str, Any]] = {}
    for one in found:
        for agent, (answer, receipt) in enumerate(zip(one.answers, one.receipts, strict=True)):
            said = (answer, receipt["tokens_digest"])
            state, wanted = first.setdefault((one.context, agent), (one.state, said))
            if said != wanted:
                raise StoreError(f"context {one.context}, agent {agent}: {one.state} answers otherwise than {state}")


@contextmanager
def temporary_home() -> Iterator[Path]:
    """A home whose agents are its own: on the disk of the real one, with the packs and settings of the real one."""
    real = config.home()
    (real / "packs").mkdir(parents=True, exist_ok=True, mode=0o700)
    home = Path(tempfile.mkdtemp(prefix="bench-ttft-", dir=real))
    try:
        (home / "packs").symlink_to((real / "packs").absolute())
        for name in (REMEMBERED, "config.toml"):
            if (real / name).exists():
                shutil.copy(real / name, home / name)
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _peer(asked: TtftOptions, context: int, home: Path) -> Iterator[Peer | None]:
    if not asked.peer:
        yield None
        return
    threads = asked.threads or config.cores()
    try:
        with Peer(asked.model, context, asked.suffix, threads, home, asked.page_cache == "dropped") as peer:
            yield peer
    except PeerError as error:
        raise ConfigError(f"--peer {PEER}: {error}") from None
