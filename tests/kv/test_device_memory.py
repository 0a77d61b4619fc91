"""The seam to a device: a pool whose blocks are not in the memory of the host works as any other."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everwarm.kernels.backend import U8
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import HeapBlocks
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.import_ import import_agent
from everwarm.types import Run
from kv.fake import BLOCK_TOKENS, CAPACITY, TOKEN_BYTES, kv_bytes, model_ids
from kv.simulated_disk import UnsyncedFiles, memory_directory

HISTORY = list(range(37))


class DeviceBlocks(HeapBlocks):
    """Memory that the host can't see: only whole blocks are copied in and out. Counts the copies."""

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS, BLOCK_TOKENS * TOKEN_BYTES)
        self.copies = 0

    def host_view(self, block: int) -> None:  # type: ignore[override]
        return None

    def read_block(self, block: int, out: U8) -> None:
        self.copies += 1
        np.copyto(out, self._blocks[block])

    def write_block(self, block: int, data: U8) -> None:
        self.copies += 1
        np.copyto(self._blocks[block], data)

    def copy_block(self, source: int, target: int) -> None:
        np.copyto(self._blocks[target], self._blocks[source])

    def rows(self, block: int) -> U8:
        """What a kernel on the device sees."""
        return self._blocks[block].reshape(BLOCK_TOKENS, TOKEN_BYTES)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def open_store(root: Path) -> tuple[AgentStore, DeviceBlocks]:
    memory = DeviceBlocks()
    place = DirectoryStore(root, UnsyncedFiles())
    store = AgentStore(Index(memory), model_ids(), place, quota=1 << 30, restore="always")
    return store, memory


def talk(store: AgentStore, memory: DeviceBlocks, agent: str, tokens: list[int]) -> str:
    expected = kv_bytes(tokens)
    with store.open_turn(agent, CAPACITY) as turn:
        tier = turn.acquire(tokens).tier
        for at in range(turn.kv.length):
            assert (memory.rows(turn.kv.blocks[at // BLOCK_TOKENS])[at % BLOCK_TOKENS] == expected[at]).all()
        turn.kv.reserve(len(tokens))
        for at in range(turn.kv.length, len(tokens)):
            memory.rows(turn.kv.blocks[at // BLOCK_TOKENS])[at % BLOCK_TOKENS] = expected[at]
        turn.kv.length = len(tokens)
        assert turn.commit((Run("x", False, len(tokens)),)).committed
    return tier


def test_agents_go_to_disk_and_come_back(tmp_path: Path) -> None:
    store, memory = open_store(tmp_path)
    assert talk(store, memory, "alice", HISTORY) == "cold"
    assert memory.copies == 5
    assert talk(store, memory, "alice", [*HISTORY, 1]) == "hot"
    store.evict("alice")
    assert talk(store, memory, "alice", [*HISTORY, 1, 2]) == "warm"
    store.fork("alice", "bob")
    store.close()
    assert memory.in_use == 0
    store, memory = open_store(tmp_path)
    assert talk(store, memory, "bob", [*HISTORY, 1, 3]) == "warm"
    talk(store, memory, "alice", [*HISTORY, 1, 2, 4])
    moved = export_agent(store, "alice", tmp_path / "alice.safetensors")
    assert moved.lost_blocks == 0
    import_agent(store, tmp_path / "alice.safetensors", "carol")
    assert talk(store, memory, "carol", [*HISTORY, 1, 2, 4, 5]) == "warm"
    store.close()
