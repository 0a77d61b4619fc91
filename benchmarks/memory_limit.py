"""A model larger than the memory that a control group leaves it: the same tokens as without a limit.

Each row is a process of its own: free, then under each limit, with the default budget or the one that is given. Needs
the right to make control groups (root, or a delegated one).

python benchmarks/memory_limit.py MODEL LIMIT[:BUDGET]...          such as 300MiB 450MiB:25%
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from everwarm.sizes import parse_size

TOKENS = 24
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


def confine(limit: int) -> Path:
    """Go into a new group; where it tells the most that was used."""
    for top, most, peak in GROUPS:
        group = top / f"everwarm-{os.getpid()}"
        try:
            group.mkdir()
            (group / most).write_text(str(limit))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return group / peak
        except OSError:
            if group.is_dir():
                group.rmdir()
    raise SystemExit("no control group can be made here: run it as root")


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024


def run(model: str, limit: int, budget: str) -> None:
    used = confine(limit) if limit else None
    import everwarm.llm

    before = resident_mib()
    with everwarm.load(model, warm="off", weight_budget=budget or None) as llm:
        started = time.perf_counter()
        answer = llm.generate("Once upon a time", max_tokens=TOKENS, ignore_eos=True, cache=False)
        seconds = time.perf_counter() - started
        stats = llm.weights.stats()
        row: dict[str, Any] = {
            "limit_mib": limit / 2**20 or None,
            "budget_mib": stats.budget / 2**20,
            "ring_mib": stats.ring_bytes / 2**20,
            "weights_peak_mib": stats.peak_bytes / 2**20,
            "rss_growth_mib": resident_mib() - before,
            "tok_s": TOKENS / seconds,
            "tokens": hashlib.sha256(repr(answer.tokens).encode()).hexdigest()[:12],
        }
        if used is not None and used.exists():
            row["group_peak_mib"] = int(used.read_text()) / 2**20
    print(json.dumps(row))


def main() -> None:
    model, *limits = sys.argv[1:]
    rows = []
    for said in ("0", *limits):
        limit, _, budget = said.partition(":")
        command = [sys.executable, __file__, "--one", model, str(parse_size(limit)), budget]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{said}: exit {done.returncode}\n{done.stderr}")
        rows.append(json.loads(done.stdout))
        print(
            " ".join(
                f"{name} {round(value, 1) if isinstance(value, float) else value}" for name, value in rows[-1].items()
            )
        )
    assert len({row["tokens"] for row in rows}) == 1, "a limit has changed the answer"
    print("the same tokens in all rows")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
