"""A picture of time to first token over context, a line per state. Needs matplotlib, which is no dependency."""

from pathlib import Path
from typing import Any

from everwarm.bench.weights.plot import INSTALL

__all__ = ["INSTALL", "draw"]


def draw(report: dict[str, Any], title: str, path: Path) -> bool:
    """Write the picture; False if matplotlib is not there."""
    try:
        from matplotlib.figure import Figure  # draws into files only: no window, no global state
    except ImportError:
        return False
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["state"] != "off":
            lines.setdefault((row["state"], row["batch"]), []).append(row)
    for (state, batch), rows in lines.items():
        rows.sort(key=lambda row: row["context"])
        label = state if batch == 1 else f"{state}, {batch} agents"
        seconds = [1e3 * row["ttft_s"] for row in rows]
        axes.plot(
            [row["context"] for row in rows], seconds, marker="o", linestyle="-" if batch == 1 else "--", label=label
        )
    peers = [(one["context"], 1e3 * one["peer"]["ttft_s"]) for one in report["comparisons"] if "peer" in one]
    if peers:
        axes.plot(*zip(*sorted(peers), strict=True), marker="x", color="grey", label="llama.cpp restore")
    contexts = sorted({row["context"] for row in report["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xlabel(f"context, tokens; {report['suffix']} new ones follow")
    axes.set_ylabel("time to first token, ms")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
