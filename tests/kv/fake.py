"""A store without a model: "computing" a token writes bytes that depend on all tokens before it: any mix-up shows."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everwarm.kv.chain import Key
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.disk.files import Files
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import HeapBlocks
from everwarm.kv.layout import Group, Layout
from everwarm.kv.receipt import Receipt
from everwarm.kv.store import AgentStore
from everwarm.kv.tools import export
from everwarm.kv.tools.exported import Moved
from everwarm.kv.turn import Turn
from everwarm.kv.warm.blockstore import BlockStore, ObjectId
from everwarm.kv.warm.tier import WarmTier
from everwarm.types import Run

BLOCK_TOKENS = 8
TOKEN_BYTES = 64
CAPACITY = 4096


def model_ids(weights: str = "w" * 64, numerics: str = "n" * 64, kv_type: str = "f16") -> ModelIds:
    group = Group("full", 1, 16, 16, kv_type, BLOCK_TOKENS * TOKEN_BYTES)
    return ModelIds(weights, numerics, Layout(BLOCK_TOKENS, (group,)), "fake", kv_type)


def open_store(
    root: Path | BlockStore | None,
    budget_blocks: int | None = None,
    ids: ModelIds | None = None,
    files: Files | None = None,
    **options: Any,
) -> AgentStore:
    """A store in a directory, or in any other `BlockStore`; None keeps it in memory."""
    memory = HeapBlocks(BLOCK_TOKENS, BLOCK_TOKENS * TOKEN_BYTES)
    budget = None if budget_blocks is None else budget_blocks * memory.block_bytes
    settings: dict[str, Any] = {"quota": 1 << 30, "restore": "always"}
    index = Index(memory, budget, node_bytes=0)  # these blocks are smaller than what is needed to find them
    place = DirectoryStore(root, files) if isinstance(root, Path) else root
    return AgentStore(index, ids or model_ids(), place, **(settings | options))


def warm(store: AgentStore) -> WarmTier:
    """The warm tier of a store that has one."""
    assert store.warm is not None
    return store.warm


def disk(store: AgentStore) -> DirectoryStore:
    """Where a store that is in a directory keeps its files."""
    place = warm(store).blocks.store
    assert isinstance(place, DirectoryStore)
    return place


def directory(store: AgentStore) -> Path:
    """The directory of the store's model."""
    return disk(store).root / store.ids.directory


def block_path(store: AgentStore, key: Key) -> Path:
    return disk(store).path(warm(store).blocks.blob(ObjectId(key)))


def manifest_path(store: AgentStore, tenant: str, name: str) -> Path:
    return disk(store).path(warm(store).blocks.manifest_blob(tenant, name))


def saved_keys(store: AgentStore) -> set[Key]:
    """The blocks that are on disk."""
    return {found.key for found, _ in warm(store).blocks.list()}


def export_agent(store: AgentStore, name: str, path: Path, tenant: str = "") -> Moved:
    """An export whose system calls fail as those of the store do."""
    files = disk(store).files if store.warm is not None else None
    return export.export_agent(store, name, path, tenant, files=files)


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
            block = turn._index.pool.read(turn.kv.blocks[at // BLOCK_TOKENS]).reshape(BLOCK_TOKENS, TOKEN_BYTES)
            block[at % BLOCK_TOKENS] = expected[at]
        turn.kv.length = end
        turn.seal_full()


def check(turn: Turn, tokens: Sequence[int]) -> None:
    """What the turn holds is what computing would have given."""
    expected = kv_bytes(tokens[: turn.kv.length])
    for at in range(turn.kv.length):
        block = turn._index.pool.read(turn.kv.blocks[at // BLOCK_TOKENS]).reshape(BLOCK_TOKENS, TOKEN_BYTES)
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
