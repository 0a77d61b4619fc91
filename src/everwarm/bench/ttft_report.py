"""What the measurements of time to first token say: medians, ratios, and what was promised beside what was found."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everwarm.bench.ttft import PeerRun
from everwarm.bench.ttft_child import Measured
from everwarm.errors import ConfigError
from everwarm.kv.warm.restore import READERS

SLACK, CONSTANT_S = 1.3, 0.003
"""Warm may be slower than hot by 1.3 times what reading and hashing its bytes takes, and 3 ms."""


def summarise(found: Sequence[Measured], peers: Sequence[PeerRun]) -> dict[str, Any]:
    """Everything, for JSON: a row per context, batch and state; a comparison per context and batch."""
    keys = list(dict.fromkeys((one.context, one.batch) for one in found))
    rows: list[dict[str, Any]] = []
    comparisons = []
    for context, batch in keys:
        mine = [one for one in found if (one.context, one.batch) == (context, batch)]
        states = dict.fromkeys(one.state for one in mine if one.state != "bandwidth")
        here = {state: _row([one for one in mine if one.state == state]) for state in states}
        rows += here.values()
        own_peers = [one for one in peers if one.context == context] if batch == 1 else []
        comparisons.append(_compare(here, mine, own_peers))
    return {
        "rows": rows,
        "comparisons": comparisons,
        "exponents": _exponents(rows),
        "same_answers": True,  # or it would have ended with an error
        "page_cache": _page_cache(found),
    }


def _row(runs: Sequence[Measured]) -> dict[str, Any]:
    """Times of a batch are the mean over its agents; then the median over runs."""
    receipts = [receipt for one in runs for receipt in one.receipts]
    ttft = [statistics.fmean(one.ttft_s) for one in runs]

    def median(name: str) -> float:
        return float(statistics.median(receipt[name] for receipt in receipts))

    row = {
        "context": runs[0].context,
        "batch": runs[0].batch,
        "state": runs[0].state,
        "tier": receipts[0]["tier"],
        "cached_tokens": receipts[0]["cached_tokens"],
        "ttft_s": statistics.median(ttft),
        "ttft_least_s": min(ttft),
        "ttft_last_s": statistics.median(max(one.ttft_s) for one in runs),  # of the agent that came last
        "spread": (max(ttft) - min(ttft)) / 2 / statistics.median(ttft),
        "runs": ttft,
        "last_token_s": statistics.median(one.last_s for one in runs),
        "lookup_s": median("lookup_s"),
        "restore_s": median("restore_s"),
        "read_s": median("read_s") / READERS,
        "verify_s": median("verify_s") / READERS,
        "restored_bytes": receipts[0]["restored_bytes"],
        "save_s": median("save_s"),
        "saved_bytes": receipts[0]["saved_bytes"],
        "writer_cpu_s": statistics.median(one.writer_cpu_s for one in runs),
        "receipts": receipts,
    }
    row["compute_s"] = row["ttft_s"] - row["lookup_s"] - row["restore_s"]  # and all else
    processes = [one.process for one in runs if one.process is not None]
    if processes:
        row["process"] = {key: statistics.median(one[key] for one in processes) for key in processes[0]}
    return row


def _compare(here: dict[str, dict[str, Any]], mine: Sequence[Measured], peers: Sequence[PeerRun]) -> dict[str, Any]:
    said: dict[str, Any] = {"context": mine[0].context, "batch": mine[0].batch}
    for state in ("warm", "hot", "restart"):
        if "cold" in here and state in here:
            said[f"cold_over_{state}"] = here["cold"]["ttft_s"] / here[state]["ttft_s"]
    measured = [one.bandwidth for one in mine if one.bandwidth is not None]
    bandwidth = {key: statistics.median(one[key] for one in measured) for key in measured[0]} if measured else {}
    if bandwidth:
        said["bandwidth"] = bandwidth
    if "warm" in here:
        warm = here["warm"]
        said["restore_bytes_s"] = warm["restored_bytes"] / warm["restore_s"]
    if "warm" in here and "hot" in here:
        bound = SLACK * said["batch"] * warm["restored_bytes"] / bandwidth["hash_recycled"] + CONSTANT_S
        pairs = zip(here["warm"]["runs"], here["hot"]["runs"], strict=True)
        said["warm_minus_hot_s"] = statistics.median(warm - hot for warm, hot in pairs)
        said["allowed_s"] = bound
        said["within_bound"] = said["warm_minus_hot_s"] <= bound
        said["warm_over_hot"] = here["warm"]["ttft_s"] / here["hot"]["ttft_s"]
    if "cold" in here:
        said["save_s"] = here["cold"]["save_s"]
        said["save_cpu_share"] = here["cold"]["writer_cpu_s"] / here["cold"]["last_token_s"]
    if "off" in here:
        cold, off = ([one for one in mine if one.state == state] for state in ("cold", "off"))
        said["save_overheads"] = [a.last_s / b.last_s - 1 for a, b in zip(cold, off, strict=True)]
        said["save_overhead"] = statistics.median(said["save_overheads"])
    if peers:
        said["peer"] = _best_peer(peers)
        if "warm" in here:
            said["warm_over_peer"] = here["warm"]["ttft_s"] / said["peer"]["ttft_s"]
    return said


def _best_peer(peers: Sequence[PeerRun]) -> dict[str, Any]:
    """With or without flash attention, whichever is faster in all."""
    found = []
    for flash in (False, True):
        runs = [one for one in peers if one.flash == flash]
        found.append(
            {
                "flash": flash,
                "ttft_s": statistics.median(one.restore_s + one.suffix_s for one in runs),
                "restore_s": statistics.median(one.restore_s for one in runs),
                "copy_s": statistics.median(one.copy_s for one in runs),
                "suffix_s": statistics.median(one.suffix_s for one in runs),
                "bytes": runs[0].bytes,
            }
        )
    return min(found, key=lambda one: one["ttft_s"])


def exponent(contexts: Sequence[int], seconds: Sequence[float]) -> float:
    """Of the power of the context that fits best: least squares over logarithms."""
    return float(np.polyfit(np.log(contexts), np.log(seconds), 1)[0])


def _exponents(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of each state with one agent, and of the time that its restore takes."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["batch"] == 1 and row["state"] != "off":
            found.setdefault(row["state"], []).append((row["context"], row["ttft_s"]))
        if row["batch"] == 1 and row["restore_s"] > 0:
            found.setdefault(f"{row['state']} restore", []).append((row["context"], row["restore_s"]))
    return {
        state: exponent(*zip(*points, strict=True)) for state, points in found.items() if len(dict(points)) > 1
    }  # fmt: skip


def _page_cache(found: Sequence[Measured]) -> dict[str, Any]:
    drops = [one.dropped for one in found if one.dropped is not None]
    if not drops:
        return {"state": "warm", "how": "as writing and reading have left it"}
    left, size = sum(one["resident_bytes"] for one in drops), sum(one["file_bytes"] for one in drops)
    return {"state": "dropped", "how": drops[0]["how"], "resident_share": left / size, "verified_by": "mincore"}


def read_result(path: Path) -> dict[str, Any]:
    """The JSON line that `everwarm bench ttft` ends with, from a file with its output."""
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read as a result: {error}") from None
    result: dict[str, Any] = found if isinstance(found, dict) else {}
    if result.get("benchmark") != "ttft" or not isinstance(result.get("rows"), list):
        raise ConfigError(f"{path}: not a result of `everwarm bench ttft`")
    return result


def too_slow(result: dict[str, Any], min_speedup: float, tell: Callable[[str], None]) -> list[str]:
    """A sentence for each context whose warm or restart is not that much faster than cold."""
    try:
        times = {(row["context"], row["batch"], row["state"]): float(row["ttft_s"]) for row in result["rows"]}
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"a row of the result can't be understood: {error!r}") from None
    found, compared = [], 0
    for (context, batch, state), seconds in times.items():
        cold = times.get((context, batch, "cold"))
        if state not in ("warm", "restart") or cold is None:
            continue
        compared += 1
        ratio = cold / seconds if seconds > 0 else math.nan
        sentence = f"context {context}, batch {batch}: {state} is {ratio:.2f} times as fast as cold"
        if ratio >= min_speedup:
            tell(sentence)
        else:
            found.append(f"{sentence}, at least {min_speedup:g} is asked for")
    if not compared:
        raise ConfigError("the result has no context with both cold and warm (or restart): nothing can be compared")
    return found
