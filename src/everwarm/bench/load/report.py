"""What a load says: percentiles, throughput, where prefixes came from, stalls and errors."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from everwarm.bench.load.client import Heard
from everwarm.bench.load.load import Run

STALL_S = 0.25
PERCENTILES = (50, 95, 99)


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """A row per server, over all its runs; with two servers, how the first compares with the second."""
    names = list(dict.fromkeys(run.server for run in runs))
    rows = [_row(name, [run for run in runs if run.server == name]) for name in names]
    return {"rows": rows, "comparison": _compare(*rows) if len(rows) == 2 else None}


def _row(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    turns = [turn for run in runs for turn in run.turns if not turn.error]
    errors = Counter(turn.error for run in runs for turn in run.turns if turn.error)
    gaps = [gap for turn in turns for gap in turn.gaps_s]
    tiers = Counter(_tier(turn) for turn in turns if turn.turn)
    returning = sum(tiers.values())
    prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
    return {
        "server": name,
        "runs": len(runs),
        "turns": len(turns),
        "errors": dict(errors),
        "ttft_first_s": percentiles(turn.ttft_s for turn in turns if turn.turn == 0),
        "ttft_returning_s": percentiles(turn.ttft_s for turn in turns if turn.turn),
        "inter_token_s": percentiles(gaps),
        "longest_gap_s": max(gaps, default=None),
        "stalls": sum(gap > STALL_S for gap in gaps),
        "decode_tok_s": statistics.median(decode_tok_s(run.turns) for run in runs),
        "prefill_tok_s": statistics.median(prefill_tok_s(run.turns) for run in runs),
        "answer_tok_s": statistics.median(_answer_tok_s(run) for run in runs),
        "decode_tok_s_runs": [decode_tok_s(run.turns) for run in runs],
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "answer_tokens": sum(turn.tokens for turn in turns),
        "longest_prompt": max((turn.prompt_tokens for turn in turns), default=0),
        "returning_by_tier": {tier: count / returning for tier, count in sorted(tiers.items())},
        "rss_bytes": max((run.rss.get("now", 0) for run in runs), default=0) or None,
        "rss_peak_bytes": max((run.rss.get("peak", 0) for run in runs), default=0) or None,
        "wall_s": sum(run.ended - run.began for run in runs),
    }


def _compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"servers": [first["server"], second["server"]]}
    for name in ("decode_tok_s", "prefill_tok_s", "answer_tok_s"):
        said[f"{name}_ratio"] = first[name] / second[name] if second[name] else None
    for name in ("ttft_first_s", "ttft_returning_s"):
        ours, theirs = first[name].get("p95"), second[name].get("p95")
        said[f"{name}_p95_ratio"] = ours / theirs if ours is not None and theirs else None
    return said


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The smallest value that so many percent of all do not exceed; empty if there are none."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTILES}


def decode_tok_s(turns: Iterable[Heard]) -> float:
    """Tokens behind the first of each answer, per second in which anybody was between first and last token."""
    good = [turn for turn in turns if not turn.error and len(turn.deltas) > 1]
    seconds = covered((turn.deltas[0], turn.deltas[-1]) for turn in good)
    return sum(turn.tokens - 1 for turn in good) / seconds if seconds else 0.0


def prefill_tok_s(turns: Iterable[Heard]) -> float:
    """Tokens of prompts that were not cached, per second in which anybody waited for a first token."""
    good = [turn for turn in turns if not turn.error]
    seconds = covered((turn.sent, turn.deltas[0]) for turn in good)
    return sum(turn.prompt_tokens - turn.cached_tokens for turn in good) / seconds if seconds else 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much time lies in at least one of the spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _answer_tok_s(run: Run) -> float:
    """Tokens of answers per second of wall time, waiting included."""
    return sum(turn.tokens for turn in run.turns if not turn.error) / (run.ended - run.began)


def _tier(turn: Heard) -> str:
    """What the receipt says; a server without receipts says at least whether something was cached."""
    return str(turn.receipt.get("tier") or ("cached" if turn.cached_tokens else "cold"))
