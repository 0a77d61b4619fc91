"""A store without a model: "computing" a token writes bytes that depend on all tokens before it: any mix-up shows."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

apart: frozenset[str] = frozenset()
"""What models have besides layers that see everything: `window`, `state`. Everything has to hold then as well. `having`
changes it.
"""

BLOCK_TOKENS = 8
TOKEN_BYTES = 64
WINDOW_BYTES = 32  # of a token, in layers with a window
REACH = 21
STATE_BYTES = 256
MESSAGE_END = 2
CAPACITY = 4096


KINDS = ((), ("window",), ("state",), ("window", "state"))


@contextmanager
def having(*kinds: str) -> Iterator[None]:
    """Models that are made meanwhile have layers of these kinds, too."""
    global apart
    before, apart = apart, frozenset(kinds)
    try:
        yield
    finally:
        apart = before


def model_ids(weights: str = "w" * 64, numerics: str = "n" * 64, kv_type: str = "f16") -> ModelIds:
    groups = [Group("full", 1, 16, 16, kv_type, BLOCK_TOKENS * TOKEN_BYTES)]
    if "state" in apart:
        groups.append(Group("state", 1, 0, STATE_BYTES // 4, "f32", STATE_BYTES))
    if "window" in apart:
        groups.append(Group("window", 1, 8, 8, kv_type, BLOCK_TOKENS * WINDOW_BYTES, REACH))
    return ModelIds(weights, numerics, Layout(BLOCK_TOKENS, tuple(groups)), "fake", kv_type)


def open_store(
    root: Path | BlockStore | None,
    budget_blocks: int | None = None,
    ids: ModelIds | None = None,
    files: Files | None = None,
    **options: Any,
) -> AgentStore:
    """A store in a directory, or in any other `BlockStore`; None keeps it in memory."""
    ids = ids or model_ids()
    layout = ids.layout
    memories = {kind: HeapBlocks(BLOCK_TOKENS, layout.block_bytes(kind)) for kind in layout.kinds}
    budget = None if budget_blocks is None else budget_blocks * sum(map(layout.block_bytes, layout.kinds))
    settings: dict[str, Any] = {"quota": 1 << 30, "restore": "always", "message_ends": frozenset({MESSAGE_END})}
    # These blocks are smaller than what is needed to find them.
    index = Index(memories, budget, reach=layout.reach, node_bytes=0)
    place = DirectoryStore(root, files) if isinstance(root, Path) else root
    return AgentStore(index, ids, place, **(settings | options))


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
        end = min(turn.kv.length + chunk, len(tokens), len(tokens) if turn.stop is None else turn.stop)
        turn.kv.reserve(end)
        for at in range(turn.kv.length, end):
            _row(turn, at)[:] = expected[at]
            if turn._index.windows is not None:
                _window_row(turn, at)[:] = expected[at][:WINDOW_BYTES]
        turn.kv.length = end
        if turn._index.states is not None:
            turn._index.states.read(turn.kv.state)[:] = state_bytes(tokens[:end])
        turn.seal_full()


def state_bytes(tokens: Sequence[int]) -> np.ndarray:
    """What must be the state behind these tokens."""
    digest = hashlib.blake2b(np.asarray(tokens, "<u4").tobytes()).digest()
    return np.frombuffer(digest * (STATE_BYTES // len(digest)), np.uint8)


def _row(turn: Turn, at: int) -> np.ndarray:
    block = turn._index.pool.read(turn.kv.blocks[at // BLOCK_TOKENS])
    row: np.ndarray = block.reshape(BLOCK_TOKENS, TOKEN_BYTES)[at % BLOCK_TOKENS]
    return row


def _window_row(turn: Turn, at: int) -> np.ndarray:
    windows = turn._index.windows
    assert windows is not None
    block = windows.pool.read(turn.kv.windows[at // BLOCK_TOKENS])
    row: np.ndarray = block.reshape(BLOCK_TOKENS, WINDOW_BYTES)[at % BLOCK_TOKENS]
    return row


def check(turn: Turn, tokens: Sequence[int]) -> None:
    """What the turn holds is what computing would have given."""
    expected = kv_bytes(tokens[: turn.kv.length])
    if turn._index.states is not None and turn.kv.length:
        state = turn._index.states.read(turn.kv.state)
        assert (state == state_bytes(tokens[: turn.kv.length])).all(), "a state of another history"
    seen = 0 if turn._index.windows is None else max(0, turn.kv.length + 1 - REACH)
    for at in range(turn.kv.length):
        assert (_row(turn, at) == expected[at]).all(), f"token {at}: KV of another history"
        if turn._index.windows is not None and at >= seen:
            assert (_window_row(turn, at) == expected[at][:WINDOW_BYTES]).all(), (
                f"token {at}: window of another history"
            )


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
