"""A picture of hit rate and speed over the budget, a line per policy. Needs matplotlib, which is no dependency."""

from pathlib import Path

from everwarm.bench.weights.weights import RealRow
from everwarm.weights.cache.policy import POLICIES

INSTALL = "pip install 'everwarm[plot]'"


def draw(rows: list[RealRow], title: str, path: Path) -> bool:
    """Write the picture; False if matplotlib is not there."""
    try:
        from matplotlib.figure import Figure  # draws into files only: no window, no global state
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")
    rates, speeds = figure.subplots(1, 2)
    cached = [row for row in rows if row.budget > 0]
    for policy in POLICIES:
        mine = sorted(
            (row for row in cached if row.row.policy == policy or row.budget >= 1), key=lambda row: row.budget
        )
        budgets = [100 * row.budget for row in mine]
        rates.plot(budgets, [100 * row.row.hit_rate for row in mine], marker="o", label=policy)
        speeds.plot(budgets, [row.row.tok_s for row in mine], marker="o", label=policy)
    best = sorted({(100 * row.budget, 100 * row.optimum) for row in cached})
    rates.plot(*zip(*best, strict=True), color="black", linestyle=":", label="optimum")
    for row in rows:
        if row.budget == 0:
            speeds.axhline(row.row.tok_s, color="grey", linestyle=":" if "pack" in row.name else "--", label=row.name)
    for axes, what in ((rates, "bytes served without being read or built again, %"), (speeds, "decode, tokens/s")):
        axes.set_xlabel("budget, % of the weights")
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
