"""Many agents in one store: how long a start takes, what memory and disk they take. Needs no model.

    python benchmarks/agents.py [--agents 1000] [--blocks 10] [--token-bytes 1024] [--budget-mib 100] [--json]

Shows: the start-up scan of 1,000 agents with 10,000 blocks takes at most 1 s; under a hot budget of 100 MiB the process
grows by no more than the budget and a tenth, the index included; 100 forks of one history take hardly more than one; a
turn of 10 tokens on a long history writes at most two blocks and a manifest.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from everwarm.kernels.native import NativeBlocks
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.layout import Group, Layout
from everwarm.kv.store import AgentStore
from everwarm.types import Run

HEAD_DIM = 64


def open_store(root: Path, token_bytes: int, budget: int | None) -> AgentStore:
    memory = NativeBlocks([(1, HEAD_DIM, HEAD_DIM, False)] * (token_bytes // (4 * HEAD_DIM)), "f16")
    group = Group("full", memory.block_bytes, HEAD_DIM, HEAD_DIM, "f16", memory.block_bytes)
    ids = ModelIds("w" * 64, "n" * 64, Layout(memory.block_tokens, (group,)), "none", "f16")
    return AgentStore(
        Index(memory, budget), ids, DirectoryStore(root), quota=1 << 40, restore="always", durability="async"
    )


def talk(store: AgentStore, agent: str, tokens: list[int]) -> None:
    """A turn; computing is filling memory with something."""
    with store.open_turn(agent, len(tokens)) as turn:
        turn.acquire(tokens)
        while turn.kv.length < len(tokens):
            end = min(turn.kv.length + 512, len(tokens))
            turn.kv.reserve(end)
            for block in turn.kv.blocks[turn.kv.length // store.index.pool.block_tokens :]:
                store.index.pool.read(block)[:] = tokens[-1] % 251
            turn.kv.length = end
            turn.seal_full()
        turn.commit((Run("x" * (4 * len(tokens)), False, len(tokens)),))


def rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return 1024 * int(line.split()[1])
    raise AssertionError


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--token-bytes", type=int, default=1024)
    parser.add_argument("--budget-mib", type=int, default=100)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the store is made (default: a temporary directory)"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
        root = Path(directory) / "agents"
        rng = np.random.default_rng(0)
        length = asked.blocks * 64 - 20
        histories = {f"agent {n}": rng.integers(0, 49152, length).tolist() for n in range(asked.agents)}
        store = open_store(root, asked.token_bytes, asked.budget_mib << 20)
        gc.collect()
        before, peak = rss(), 0
        for name, tokens in histories.items():
            talk(store, name, tokens)
            peak = max(peak, rss())
        store.flush()
        figures |= {"budget_mib": asked.budget_mib, "rss_growth_mib": (peak - before) / 2**20}
        figures["rss_over_budget"] = (peak - before) / (asked.budget_mib << 20)
        for name in list(histories)[:: max(1, asked.agents // 100)]:
            talk(store, name, [*histories[name], 1])
            peak = max(peak, rss())
        figures["rss_growth_with_restores_mib"] = (peak - before) / 2**20
        store.close()
        del store
        started = time.perf_counter()
        store = open_store(root, asked.token_bytes, asked.budget_mib << 20)
        figures["scan_s"] = time.perf_counter() - started
        figures |= {"agents": len(store.agents.by_name), "blocks": len(store.index.warm)}
        store.close()

        root = Path(directory) / "forks"
        store = open_store(root, 23040, None)
        prefix = rng.integers(0, 49152, 4096 + 30).tolist()
        talk(store, "one", prefix)
        store.flush()
        disk, ram = on_disk(root), store.index.pool.bytes_in_use
        for n in range(100):
            store.fork("one", f"fork {n}")
        figures |= {"forks_disk_ratio": on_disk(root) / disk, "forks_ram_ratio": store.index.pool.bytes_in_use / ram}
        counted = dict(store.counters)
        history = prefix
        for _ in range(20):
            history = [*history, *rng.integers(0, 49152, 10).tolist()]
            talk(store, "one", history)
        store.flush()
        new = {name: store.counters[name] - counted.get(name, 0) for name in store.counters}
        file = store.warm.block_bytes  # type: ignore[union-attr]
        figures["blocks_per_10_token_turn"] = (new["saved_bytes"] + new.get("saved_tail_bytes", 0)) / file / 20
        figures["write_amplification"] = (
            new["saved_bytes"] / (len(history) // 64 - len(prefix) // 64) / store.index.pool.block_bytes
        )
        figures["tail_bytes_per_turn"] = new.get("saved_tail_bytes", 0) / 20
        figures["manifest_bytes_per_turn"] = new["manifest_bytes"] / 20
        store.close()
    for name, value in figures.items():
        print(f"{name:32} {value:,.3f}")
    if asked.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
