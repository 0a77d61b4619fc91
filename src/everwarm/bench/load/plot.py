"""A picture of a load: how many turns and tokens waited how long, a line per server. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from everwarm.bench.load.load import Run
from everwarm.bench.weights.plot import INSTALL

__all__ = ["INSTALL", "draw"]


def draw(runs: Sequence[Run], title: str, path: Path) -> bool:
    """Write the picture; False if matplotlib is not there."""
    try:
        from matplotlib.figure import Figure  # draws into files only: no window, no global state
    except ImportError:
        return False
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, returning, between = figure.subplots(1, 3)
    for server in dict.fromkeys(run.server for run in runs):
        turns = [turn for run in runs if run.server == server for turn in run.turns if not turn.error]
        for axes, values in (
            (first, [turn.ttft_s for turn in turns if turn.turn == 0]),
            (returning, [turn.ttft_s for turn in turns if turn.turn]),
            (between, [gap for turn in turns for gap in turn.gaps_s]),
        ):
            ordered = sorted(1e3 * value for value in values)
            if ordered:
                axes.step(
                    ordered, [100 * (n + 1) / len(ordered) for n in range(len(ordered))], where="post", label=server
                )
    for axes, name in (
        (first, "first token of the first turn"),
        (returning, "first token of later turns"),
        (between, "from token to token"),
    ):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlabel(f"{name}, ms")
        axes.set_ylabel("percent of all")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
