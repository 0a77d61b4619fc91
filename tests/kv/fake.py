"""A store without a model: "computing" a token writes bytes that depend on all tokens before it: any mix-up shows."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everwarm.kv.disk import ModelIds
from everwarm.kv.layout import Group, Layout
from everwarm.kv.pool import BlockPool, HeapBlocks
from everwarm.kv.receipt import Receipt
from everwarm.kv.store import AgentStore
from everwarm.kv.turn import Turn
from everwarm.types import Run

BLOCK_TOKENS = 8
TOKEN_BYTES = 64
CAPACITY = 4096


def model_ids(weights: str = "w" * 64, numerics: str = "n" * 64, kv_type: str = "f16") -> ModelIds:
    group = Group("full", 1, 16, 16, kv_type, BLOCK_TOKENS * TOKEN_BYTES)
    return ModelIds(weights, numerics, Layout(BLOCK_TOKENS, (group,)), "fake", kv_type)


def open_store(
    root: Path | None, budget_blocks: int | None = None, ids: ModelIds | None = None, **options: Any
) -> AgentStore:
    """A store in `root`; None keeps it in memory."""
    memory = HeapBlocks(BLOCK_TOKENS, BLOCK_TOKENS * TOKEN_BYTES)
    budget = None if budget_blocks is None else budget_blocks * memory.block_bytes
    settings: dict[str, Any] = {"quota": 1 << 30, "restore": "always"}
    store = AgentStore(BlockPool(memory, budget), ids or model_ids(), root, **(settings | options))
    store.pool.index_bytes = lambda: 0  # these blocks are smaller than what is needed to find them
    return store


def kv_bytes(tokens: Sequence[int]) -> np.ndarray:
    """What must be in the KV of these tokens: (tokens, TOKEN_BYTES)."""
    state, rows = hashlib.blake2b(), []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        rows.append(np.frombuffer(state.digest(), np.uint8))
    return np.array(rows, np.uint8).reshape(-1, TOKEN_BYTES)


def compute(turn: Turn, tokens: Sequence[int], chunk: int = 20) -> None:
    """Compute the tokens of the history that `turn.kv` does not have yet. `tokens` is all of the history."""
    expected = kv_bytes(tokens)
    while turn.kv.length < len(tokens):
        end = min(turn.kv.length + chunk, len(tokens))
        turn.kv.reserve(end)
        for at in range(turn.kv.length, end):
            block = turn.store.pool.read(turn.kv.blocks[at // BLOCK_TOKENS]).reshape(BLOCK_TOKENS, TOKEN_BYTES)
            block[at % BLOCK_TOKENS] = expected[at]
        turn.kv.length = end
        turn.seal_full()


def check(turn: Turn, tokens: Sequence[int]) -> None:
    """What the turn holds is what computing would have given."""
    expected = kv_bytes(tokens[: turn.kv.length])
    for at in range(turn.kv.length):
        block = turn.store.pool.read(turn.kv.blocks[at // BLOCK_TOKENS]).reshape(BLOCK_TOKENS, TOKEN_BYTES)
        assert (block[at % BLOCK_TOKENS] == expected[at]).all(), f"token {at}: KV of another history"


def talk(
    store: AgentStore, agent: str | None, prompt: Sequence[int], answer: Sequence[int] = (), tenant: str = ""
) -> Receipt:
    """One turn: acquire, compute prompt and answer (as an engine does: all but the last token of it), commit."""
    with store.open_turn(agent, CAPACITY, tenant) as turn:
        turn.acquire(prompt)
        check(turn, prompt)
        turn.append(answer)
        history = [*prompt, *answer]
        compute(turn, history[: len(history) - bool(answer)])
        check(turn, history)
        return turn.commit((Run(" ".join(map(str, history)), False, len(history)),))
