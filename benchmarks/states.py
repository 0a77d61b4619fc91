"""What the agent store takes for a model whose layers have a state: bytes on disk and in memory per agent, bytes that a
turn writes, and a thousand agents under a quota.

The store, its files and the model's layout are real; nothing is computed, because bytes do not depend on what is in
them. An agent begins with one long prompt, then has turns of 200 tokens: 100 asked, 100 answered, two messages. The
thousand agents are those of another, smaller model if one is given: with the states of a large one they would write
tens of gigabytes.

    python benchmarks/states.py MODEL.gguf [--tokens 4096,16384,65536] [--agents 1000] [--agents-model SMALL.gguf]
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everwarm import kernels
from everwarm.kernels.backend import STATE, reach
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.disk.files import Files
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.layout import kv_layout
from everwarm.kv.marks import Marks
from everwarm.kv.receipt import Receipt
from everwarm.kv.store import AgentStore
from everwarm.model.facts import read_model
from everwarm.types import Run
from everwarm.weights.gguf.file import GGUFFile

MESSAGE_END = 2
STEP, TURN, TURNS = 512, 200, 10
MB = 1e6


class CountedFiles(Files):
    """Counts the bytes that are written. Does not wait for the disk: no time is measured here."""

    written = 0

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        count = super().write(descriptor, parts)
        self.written += count
        return count

    def sync(self, descriptor: int) -> None:
        """Not here."""

    def sync_directory(self, path: Path) -> None:
        """Not here."""


@dataclass
class Opened:
    """A store for the agents of one model."""

    store: AgentStore
    files: CountedFiles
    marks: Marks
    token_bytes: float  # of layers that see all tokens
    state_bytes: int


@contextmanager
def new_store(model: Path, quota: int = 1 << 50) -> Iterator[Opened]:
    """An empty store, which is deleted in the end."""
    with tempfile.TemporaryDirectory(prefix="everwarm-states-") as folder, opened(model, Path(folder), quota) as one:
        yield one


@contextmanager
def opened(model: Path, folder: Path, quota: int) -> Iterator[Opened]:
    file = GGUFFile(model)
    try:
        shape = read_model(file)
    finally:
        file.close()
    backend = kernels.make(kernels.choose("auto", "auto"), 1, 1, "f16")
    index = Index(backend.block_memory(shape.kv_shape, shape.state_shape), reach=reach(shape.kv_shape))
    layout = kv_layout(shape.kv_shape, shape.state_shape, "f16", index.block_tokens, index.layer_bytes)
    ids = ModelIds("w" * 64, "n" * 64, layout, shape.name, "f16")
    ends, files = frozenset({MESSAGE_END}), CountedFiles()
    place = DirectoryStore(folder / "agents", files)
    store = AgentStore(index, ids, place, quota=quota, restore="always", message_ends=ends)
    try:
        token_bytes = layout.block_bytes() / layout.block_tokens
        yield Opened(store, files, Marks.of(layout, ends), token_bytes, layout.block_bytes(STATE))
    finally:
        store.close()


def talk(store: AgentStore, agent: str, prompt: Sequence[int], answer: Sequence[int]) -> Receipt:
    """A turn as the engine has it, but for the computing. The last token of an answer is not computed in its turn."""
    history = [*prompt, *answer]
    with store.open_turn(agent, len(history) + STEP) as turn:
        turn.acquire(prompt)
        turn.append(answer)
        for end in (len(prompt), len(history) - 1):
            while turn.kv.length < end:
                until = min(end, turn.kv.length + STEP, end if turn.stop is None else turn.stop)
                turn.kv.reserve(until)
                turn.kv.length = until
                turn.seal_full()
        return turn.commit((Run("x", False, len(history)),), wait=True)


def message(draw: random.Random, count: int) -> list[int]:
    return [*(draw.randrange(10, 1000) for _ in range(count - 1)), MESSAGE_END]


def one_agent(model: Path, tokens: int) -> dict[str, float]:
    """An agent with so many tokens."""
    draw = random.Random(tokens)
    with new_store(model) as one:
        store = one.store
        history = message(draw, tokens - TURNS * TURN)
        talk(store, "alice", history, ())
        began = one.files.written
        for _ in range(TURNS):
            asked, said = message(draw, TURN // 2), message(draw, TURN // 2)
            talk(store, "alice", [*history, *asked], said)
            history += [*asked, *said]
        store.flush()
        written, stats = (one.files.written - began) / TURNS, store.stats()
        state_files = len(list(store.warm.blocks.store.root.rglob("*.state.safetensors")))  # type: ignore[union-attr]
        return {
            "tokens": len(history),
            "states": state_files,
            "disk_mb": stats.warm_bytes / MB,
            "of_that_states_mb": state_files * one.state_bytes / MB,
            "hot_mb": stats.hot_bytes / MB,
            "computing_mb": store.index.bytes_for(len(history)) / MB,
            "turn_kv_mb": TURN * one.token_bytes / MB,
            "turn_writes_mb": written / MB,
            "amplification": written / (TURN * one.token_bytes),
        }


def many_agents(model: Path, count: int) -> dict[str, float]:
    """Agents with a common beginning, two turns each, under a quota of a third of what all of them would take. Then
    the store is opened anew, and the agents come back, the latest first.
    """
    draw = random.Random(0)
    common = message(draw, 700)
    own = {f"agent {number}": message(draw, 100) for number in range(count)}

    def turns(store: AgentStore, names: Sequence[str]) -> None:
        for name in names:
            history = [*common, *own[name]]
            said = message(draw, 50)
            talk(store, name, history, said)
            own[name] += [*said, *message(draw, 50)]
            talk(store, name, [*common, *own[name]], ())

    with new_store(model) as some:
        names = [f"agent {number}" for number in range(10)]
        saved = {name: list(own[name]) for name in names}
        turns(some.store, names)
        some.store.flush()
        ten = some.store.stats().warm_bytes
        turns(some.store, ["agent 10"])
        some.store.flush()
        each = some.store.stats().warm_bytes - ten
        own |= saved | {"agent 10": own["agent 10"][:100]}  # as they were
    quota = count * each // 3
    with tempfile.TemporaryDirectory(prefix="everwarm-states-") as folder:
        with opened(model, Path(folder), quota) as before:
            turns(before.store, list(own))
            before.store.flush()
            stats, every = before.store.stats(), before.marks.every
        with opened(model, Path(folder), quota) as after:
            histories = [(name, [*common, *own[name]]) for name in reversed(own)]
            receipts = [(len(history), come_back(after.store, name, history)) for name, history in histories]
        whole = sum(receipt.cached_tokens == tokens for tokens, receipt in receipts)
        some_of_it = sum(0 < receipt.cached_tokens < tokens for tokens, receipt in receipts)
        return {
            "agents": count,
            "each_mb": each / MB,
            "quota_mb": quota / MB,
            "disk_mb": stats.warm_bytes / MB,
            "evictions": stats.events["warm_evictions"],
            "histories_kept": stats.agents,
            "back_whole": whole,
            "back_from_a_state_before": some_of_it,
            "history": receipts[0][0],
            "median_computed_again": statistics.median(tokens - receipt.cached_tokens for tokens, receipt in receipts),
            "most_computed_again": max(tokens - receipt.cached_tokens for tokens, receipt in receipts),
            "distance": every,
        }


def come_back(store: AgentStore, agent: str, history: Sequence[int]) -> Receipt:
    """What is reused when an agent goes on from its history."""
    with store.open_turn(agent, len(history) + STEP) as turn:
        return turn.acquire([*history, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", default="4096,16384,65536")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--agents-model", type=Path)
    given = parser.parse_args()
    with new_store(given.model) as one:
        print(f"{given.model.name}: {one.token_bytes:,.0f} bytes per token, a state of {one.state_bytes / MB:.1f} MB")
        print(f"states every {one.marks.every:,} tokens, at ends of turns, and of the first and the last messages\n")
    print("tokens  states    disk (states)   memory, hot   while it computes   a turn writes   x its KV")
    rows = []
    for tokens in map(int, given.tokens.split(",")):
        row = one_agent(given.model, tokens)
        rows.append(row)
        print(
            f"{row['tokens']:6,.0f}  {row['states']:6}  {row['disk_mb']:5,.0f} MB ({row['of_that_states_mb']:5,.0f})  "
            f"{row['hot_mb']:8,.0f} MB  {row['computing_mb']:14,.0f} MB  {row['turn_writes_mb']:10,.1f} MB  "
            f"{row['amplification']:9.1f}",
            flush=True,
        )
    small = given.agents_model or given.model
    crowd = many_agents(small, given.agents)
    print(
        f"\n{crowd['agents']:,} agents of {small.name}, each {crowd['each_mb']:.2f} MB of its own: "
        f"{crowd['disk_mb']:,.1f} MB on disk under a quota of {crowd['quota_mb']:,.1f} MB, {crowd['evictions']:,} "
        f"evictions.\n{crowd['histories_kept']:,} histories are kept; {crowd['back_whole']:,} come back whole, "
        f"{crowd['back_from_a_state_before']:,} from an earlier state: of {crowd['history']:,} tokens "
        f"{crowd['median_computed_again']:,.0f} (median), {crowd['most_computed_again']:,} (most) are computed again "
        f"(states every {crowd['distance']:,})."
    )
    print(json.dumps({"agent": rows, "crowd": crowd}))


if __name__ == "__main__":
    main()
