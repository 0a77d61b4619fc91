"""`everwarm bench load`: many agents at once, over HTTP."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from everwarm import config
from everwarm.cli import bench_text
from everwarm.cli.console import err, human_bytes, out, print_json
from everwarm.cli.options import Json, KvType, Threads
from everwarm.errors import ConfigError

if TYPE_CHECKING:
    from everwarm.bench.load import Tell


def load(
    model: Annotated[str | None, typer.Argument(help="Path or pulled name; a server is started for it.")] = None,
    url: Annotated[str | None, typer.Option(help="Measure a server that runs already.")] = None,
    agents: Annotated[int, typer.Option(help="Conversations at once.", min=1, max=1024)] = 8,
    turns: Annotated[int, typer.Option(help="Turns of each.", min=1)] = 3,
    context: Annotated[int, typer.Option(help="Tokens with which a conversation begins, about.", min=1)] = 512,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 64,
    runs: Annotated[
        int, typer.Option(help="How often; with a peer, the servers take turns in being first.", min=1)
    ] = 1,
    peer: Annotated[
        str | None, typer.Option(help="`llama.cpp`: the same load on its llama-server, with a slot for each agent.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the distributions into this PNG file.")] = None,
    kv_budget: Annotated[str | None, typer.Option(help="Memory for keys and values.")] = None,
    threads: Threads = None,
    kv_type: KvType = None,
    as_json: Json = False,
) -> None:
    """Conversations of many agents at once, as streaming clients see them: waiting, speed, cache hits, stalls."""
    from everwarm.bench import load as bench
    from everwarm.bench import load_plot, load_report
    from everwarm.pull import resolve

    if (model is None) == (url is None):
        raise ConfigError("give either a model, for which a server is started, or the --url of one that runs")
    if peer not in (None, bench.PEER):
        raise ConfigError(f"--peer {peer}: known is {bench.PEER}")
    if url is not None and (peer or kv_budget or threads or kv_type):
        raise ConfigError("--peer, --kv-budget, --threads and --kv-type need a server that is started here, not --url")
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise ConfigError(f"--plot {plot}: expected a file name that ends in .png, in a folder that exists")
    settings = {"threads": threads, "kv_type": kv_type, "kv_budget": kv_budget}
    config.resolve(settings)  # what it can't understand is said before all else
    asked = bench.LoadOptions(agents, turns, context, answer, runs, peer is not None, settings)
    with _bar() as tell:
        if url is not None:
            name = url
            found = bench.run_url(url, asked, tell, os.environ.get("EVERWARM_API_KEY"))
        else:
            path = resolve(str(model), config.home())
            name = path.name
            found = bench.run(path, asked, tell)
    head = {
        "benchmark": "load", "model": name, "threads": threads or config.cores(), "agents": agents, "turns": turns,
        "context": context, "answer": answer, "runs": runs,
    }  # fmt: skip
    report = head | load_report.summarise(found)
    title = f"{name}: {agents} agents, {turns} turns, context {context:,}, answers of {answer}"
    drawn = plot is not None and load_plot.draw(found, title, plot)
    if plot is not None and not drawn:
        err.print(f"no plot: matplotlib is not installed; {load_plot.INSTALL}", markup=False)
    report["plot"] = str(plot) if drawn else None
    if not as_json:
        out.print(title + "\n", markup=False)
        _show(report)
    print_json(report)


def _show(report: dict[str, Any]) -> None:

    table = bench_text.table_of("ms", *(row["server"] for row in report["rows"]))
    for title, name in (
        ("first token, first turn", "ttft_first_s"),
        ("first token, later turns", "ttft_returning_s"),
        ("from token to token", "inter_token_s"),
    ):
        for percentile in ("p50", "p95", "p99"):
            values = [row[name].get(percentile) for row in report["rows"]]
            table.add_row(f"{title}, {percentile}", *("" if v is None else f"{1e3 * v:,.1f}" for v in values))
    out.print(table)
    rest = bench_text.table_of("", *(row["server"] for row in report["rows"]))
    for title, name in (
        ("decode, tokens/s of all", "decode_tok_s"),
        ("prefill, tokens/s of all", "prefill_tok_s"),
        ("answers, tokens/s of wall time", "answer_tok_s"),
    ):
        rest.add_row(title, *(f"{row[name]:,.0f}" for row in report["rows"]))
    rest.add_row(
        "cached, of all prompts", *(_share(row["cached_tokens"], row["prompt_tokens"]) for row in report["rows"])
    )
    rest.add_row("later turns by tier", *(_tiers(row) for row in report["rows"]))
    rest.add_row("gaps above 250 ms", *(str(row["stalls"]) for row in report["rows"]))
    rest.add_row("errors", *(str(sum(row["errors"].values())) for row in report["rows"]))
    rest.add_row(
        "memory of the server",
        *(human_bytes(row["rss_peak_bytes"]) if row["rss_peak_bytes"] else "" for row in report["rows"]),
    )
    out.print(rest)
    for row in report["rows"]:
        for error, count in row["errors"].items():
            err.print(f"{row['server']}: {count} x {error}", markup=False)
    if (found := report["comparison"]) is not None:
        first, second = found["servers"]
        out.print(
            f"\n{first} over {second}: decode {_times(found['decode_tok_s_ratio'])}, prefill "
            f"{_times(found['prefill_tok_s_ratio'])}, answers {_times(found['answer_tok_s_ratio'])}; p95 of first "
            f"tokens {_times(found['ttft_first_s_p95_ratio'])}, of later turns "
            f"{_times(found['ttft_returning_s_p95_ratio'])}",
            markup=False,
        )
    out.print()


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _tiers(row: dict[str, Any]) -> str:
    return ", ".join(f"{tier} {share:.0%}" for tier, share in row["returning_by_tier"].items())


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


@contextmanager
def _bar() -> "Iterator[Tell]":
    """A bar of turns on stderr if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda title, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(title: str, done: int, total: int) -> None:
            if title not in tasks:
                tasks[title] = progress.add_task(title, total=total)
            progress.update(tasks[title], completed=done)

        yield show
