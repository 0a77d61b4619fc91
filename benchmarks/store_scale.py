"""Proves that a turn costs the same in a small and in a large agent store, also when the quota or the memory is full.

Stores of tiny blocks are made in memory (/dev/shm), so that what is measured is our own bookkeeping and not a disk.

    python benchmarks/store_scale.py [--blocks 1000,10000,100000]
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from everwarm.kv.chain import child_key, token_bytes
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.ids import ModelIds
from everwarm.kv.manifest import Manifest
from everwarm.kv.store import AgentStore
from everwarm.kv.warm.blocks import BlockName, ModelBlocks
from everwarm.kv.warm.tenants import Tenants
from everwarm.types import Run
from kv.fake import BLOCK_TOKENS, TOKEN_BYTES, model_ids, open_store, talk
from kv.simulated_disk import UnsyncedFiles

BLOCKS_PER_AGENT = 25
TURN_BLOCKS = 3
TURNS = 30


def fill(root: Path, ids: ModelIds, blocks: int) -> None:
    """Agents with so many blocks in all, as files."""
    files = UnsyncedFiles()
    place = DirectoryStore(root, files)
    place.lock().release()
    disk = ModelBlocks(place, ids)
    disk.prepare()
    salt = Tenants(place, True, Counter()).salt("default")
    data = np.zeros(BLOCK_TOKENS * TOKEN_BYTES, np.uint8)
    for number in range(blocks // BLOCKS_PER_AGENT):
        tokens = [number + 1] * BLOCK_TOKENS * BLOCKS_PER_AGENT
        spelt, keys = token_bytes(tokens), []
        parent = ids.root(salt)
        for at in range(0, len(spelt), 4 * BLOCK_TOKENS):
            part = spelt[at : at + 4 * BLOCK_TOKENS]
            key = child_key(parent, part)
            disk.put(BlockName(key, parent, part), [data])
            keys.append(key)
            parent = key
        manifest = Manifest(
            "default", f"agent {number}", 1, salt.hex(), ids.weights_id, ids.numerics_id, ids.layout.digest, "fake",
            "f16", np.array(tokens, np.uint32), len(tokens), tuple(keys), (Run("x" * 100, False, len(tokens)),),
            created=1.0, used=float(number),
        )  # fmt: skip
        disk.commit(manifest, 0, lambda size: None)


def turn_ms(store: AgentStore, name: str) -> list[float]:
    """Milliseconds of turns of new agents, each with three new blocks."""
    taken = []
    for number in range(TURNS):
        tokens = [random.randrange(10**6) for _ in range(TURN_BLOCKS * BLOCK_TOKENS)]
        started = time.perf_counter()
        assert talk(store, f"{name} {number}", tokens).committed
        taken.append(1e3 * (time.perf_counter() - started))
    return taken


def measure(blocks: int, root: Path) -> dict[str, float]:
    fill(root / "own", model_ids(), blocks)
    store = open_store(root / "own", files=UnsyncedFiles(), quota=1 << 40)
    figures = {"quota_far_ms": statistics.median(turn_ms(store, "far"))}
    store.shared.quota = store.warm.bytes + store.shared.other_bytes
    figures["quota_full_ms"] = statistics.median(turn_ms(store, "full"))
    store.close()

    store = open_store(root / "hot", files=UnsyncedFiles(), quota=1 << 40, budget_blocks=blocks)
    while store.index.pool.in_use < blocks - 200:
        talk(store, f"filler {store.index.pool.in_use}", [store.index.pool.in_use] * BLOCK_TOKENS * 100)
    store.flush()
    turn_ms(store, "last")
    figures["memory_full_ms"] = statistics.median(turn_ms(store, "full"))
    store.close()

    fill(root / "other", model_ids(weights="o" * 64), blocks)
    store = open_store(root / "other", files=UnsyncedFiles(), quota=1 << 40)
    store.shared.quota = store.warm.bytes + store.shared.other_bytes
    taken = turn_ms(store, "beside another model")
    figures |= {"other_model_first_ms": taken[0], "other_model_ms": statistics.median(taken[1:])}
    store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="1000,10000,100000")
    sizes = [int(size) for size in parser.parse_args().blocks.split(",")]
    found = {}
    print(f"{'blocks':>8}  far from quota  quota full  memory full  other model: first turn, later  (ms per turn)")
    for size in sizes:
        shared = Path("/dev/shm")
        root = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        try:
            found[size] = figures = measure(size, root)
        finally:
            shutil.rmtree(root)
        far, quota, memory, first, later = figures.values()
        print(f"{size:8,}  {far:14.2f}  {quota:10.2f}  {memory:11.2f}  {first:24.2f}, {later:.2f}")
    print(json.dumps({"benchmark": "store_scale", "turn_blocks": TURN_BLOCKS, "figures": found}))


if __name__ == "__main__":
    main()
