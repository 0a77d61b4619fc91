"""Proves the choice of 64 tokens per block: what blocks of other sizes would cost on disk, for the same history.

    python benchmarks/block_size.py [--token-bytes 23040] [--context 4096] [--turn 200] [--rounds 7]

Files of each size are written and read through the store's own `DirectoryStore` (checksums, syncs, renames), by as many
readers as a restore has and into memory that was filled before. Sizes take turns; figures are medians. What a turn
writes follows from the size: its full blocks, the partial one at its end (a file of full size), a manifest; a sync for
each of them and for two directories.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from everwarm import config
from everwarm.kv.chain import Key, token_bytes
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.ids import ModelIds
from everwarm.kv.layout import Group, Layout
from everwarm.kv.warm.blocks import BlockName, ModelBlocks
from everwarm.kv.warm.restore import READERS

SIZES = (32, 64, 128, 256)


class Case:
    """A history of so many tokens in blocks of one size."""

    def __init__(self, root: Path, block_tokens: int, per_token: int, context: int) -> None:
        self.block_tokens, self.block_bytes = block_tokens, block_tokens * per_token
        layout = Layout(block_tokens, (Group("full", 1, 1, 1, "f16", self.block_bytes),))
        place = DirectoryStore(root)
        place.lock().release()
        self.store = ModelBlocks(place, ModelIds("w" * 64, f"{block_tokens:064}", layout, "synthetic", "f16"))
        self.store.prepare()
        draw = np.random.default_rng(block_tokens)
        self.names = [
            BlockName(Key(draw.bytes(16)), Key(draw.bytes(16)), token_bytes(draw.integers(0, 49152, block_tokens)))
            for _ in range(context // block_tokens)
        ]
        self.memory = [draw.integers(0, 256, self.block_bytes, np.uint8) for _ in self.names]
        self.read_s: list[float] = []
        self.write_s: list[float] = []

    def write(self) -> None:
        for name in self.names:
            self.store.delete(name.id)
        started = time.perf_counter()
        for name, data in zip(self.names, self.memory, strict=True):
            self.store.put(name, [data])
        self.store.sync()
        self.write_s.append(time.perf_counter() - started)

    def read(self, readers: ThreadPoolExecutor) -> None:
        started = time.perf_counter()
        list(readers.map(lambda pair: self.store.get(pair[0], [pair[1]]), zip(self.names, self.memory, strict=True)))
        self.read_s.append(time.perf_counter() - started)

    def row(self, context: int, turn: int) -> dict[str, float]:
        read, write = statistics.median(self.read_s), statistics.median(self.write_s)
        bytes_in_all = len(self.names) * self.block_bytes
        # On average over where a history ends: every block that fills during the turn, and the partial one after it.
        new_full = turn / self.block_tokens
        return {
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "files": len(self.names),
            "read_ms": 1e3 * read,
            "read_gb_s": bytes_in_all / read / 1e9,
            "files_s": len(self.names) / read,
            "write_ms": 1e3 * write,
            "write_gb_s": bytes_in_all / write / 1e9,
            "syncs_per_turn": new_full + 1 + 3,
            "tail_bytes_per_turn": self.block_bytes,
            "written_over_new": (new_full + 1) * self.block_tokens / turn,
            "header_share": 4096 / (4096 + self.block_bytes),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-bytes", type=int, default=23040, help="KV of one token (SmolLM2-135M in f16)")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--turn", type=int, default=200, help="new tokens of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    config.home().mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="bench-blocks-", dir=config.home()))
    try:
        cases = [Case(root, size, asked.token_bytes, asked.context) for size in SIZES]
        with ThreadPoolExecutor(READERS) as readers:
            for _ in range(asked.rounds):
                for case in cases:
                    case.write()
                for _ in range(3):
                    for case in cases:
                        case.read(readers)
        rows = [case.row(asked.context, asked.turn) for case in cases]
    finally:
        shutil.rmtree(root)
    print(f"{'tokens':>6} {'KiB':>6} {'files':>5} {'read+verify':>12} {'GB/s':>5} {'files/s':>8} {'write+sync':>11} "
          f"{'syncs/turn':>10} {'tail KiB/turn':>13} {'written/new':>11}")  # fmt: skip
    for row in rows:
        print(f"{row['block_tokens']:6} {row['block_bytes'] / 1024:6.0f} {row['files']:5} {row['read_ms']:9.1f} ms "
              f"{row['read_gb_s']:5.1f} {row['files_s']:8,.0f} {row['write_ms']:8.0f} ms {row['syncs_per_turn']:10.1f} "
              f"{row['tail_bytes_per_turn'] / 1024:13,.0f} {row['written_over_new']:11.2f}")  # fmt: skip
    print(json.dumps({"benchmark": "block size", "context": asked.context, "turn": asked.turn, "rows": rows}))


if __name__ == "__main__":
    main()
