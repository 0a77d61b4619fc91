"""`everwarm bench ttft` and `bench validate`: what a known prefix is worth, and whether it is worth enough."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from everwarm import config
from everwarm.cli import bench_text
from everwarm.cli.console import err, human_bytes, out, print_json
from everwarm.cli.options import Json, KvType, Threads
from everwarm.errors import ConfigError

_WIDTH = 130


def ttft(
    model: Annotated[str | None, typer.Argument(help="Path or pulled name.")] = None,
    contexts: Annotated[str, typer.Option(help="Tokens that are known, separated by commas.")] = "1024,4096",
    batch_sizes: Annotated[str, typer.Option(help="Agents that ask at once, separated by commas.")] = "1",
    runs: Annotated[int, typer.Option(help="Rounds of each measurement.", min=1)] = 5,
    states: Annotated[str, typer.Option(help="What to measure, separated by commas.")] = "cold,warm,hot,restart",
    suffix: Annotated[int, typer.Option(help="New tokens behind the context.", min=1)] = 32,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 16,
    page_cache: Annotated[
        str, typer.Option(help="`warm`: files may be in the system's memory; `dropped`: they must come from the disk.")
    ] = "warm",
    overhead: Annotated[bool, typer.Option(help="Measure cold turns a second time, with saving switched off.")] = True,
    peer: Annotated[
        str | None, typer.Option(help="`llama.cpp`: measure its restore of a saved state in the same run.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time to first token over context into this PNG file.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure a server that runs already, as a streaming client sees it; no restart.")
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="The same with a server that is started for the model, and killed.")
    ] = False,
    threads: Threads = None,
    kv_type: KvType = None,
    as_json: Json = False,
) -> None:
    """Time to first token of the same question: cold, warm (from disk), hot (in memory), and after a restart."""
    from everwarm.bench import ttft as bench
    from everwarm.bench import ttft_plot, ttft_report
    from everwarm.pull import resolve

    asked_states = list(dict.fromkeys(states.split(",")))
    if unknown := set(asked_states) - set(bench.STATES):
        raise ConfigError(f"--states {','.join(sorted(unknown))}: known are {', '.join(bench.STATES)}")
    if page_cache not in bench.PAGE_CACHE:
        raise ConfigError(f"--page-cache {page_cache}: expected one of {', '.join(bench.PAGE_CACHE)}")
    if peer not in (None, bench.PEER):
        raise ConfigError(f"--peer {peer}: known is {bench.PEER}")
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise ConfigError(f"--plot {plot}: expected a file name that ends in .png, in a folder that exists")
    config.resolve({"kv_type": kv_type, "threads": threads})  # what it can't understand is said before all else
    if url is not None or http:
        if batch_sizes != "1" or page_cache != "warm" or peer or plot:
            raise ConfigError(
                "--batch-sizes, --page-cache, --peer and --plot are for measuring without --url and --http"
            )
        settings: dict[str, object] = {"kv_type": kv_type, "threads": threads}
        numbers = sorted(set(bench_text.numbers("--contexts", contexts, 1)))
        _over_http(model, url, numbers, runs, asked_states, suffix, answer, settings, as_json)
        return
    if model is None:
        raise ConfigError("give a model, or the --url of a server")
    path = resolve(model, config.home())
    asked = bench.TtftOptions(
        path, sorted(set(bench_text.numbers("--contexts", contexts, 1))),
        sorted(set(bench_text.numbers("--batch-sizes", batch_sizes, 1))),
        runs, asked_states, suffix, answer, page_cache, kv_type, threads, peer is not None, overhead,
    )  # fmt: skip
    bench.check(asked)
    found, peers = bench.run(asked, bench_text.teller())
    said = config.resolve({"kv_type": kv_type})["kv_type"].value
    report = {
        "benchmark": "ttft", "model": path.name, "threads": threads or config.cores(), "kv_type": said,
        "suffix": suffix, "answer": answer, "rounds": runs, "durability": "turn", "restore": "always",
    } | ttft_report.summarise(found, peers)  # fmt: skip
    drawn = plot is not None and ttft_plot.draw(report, f"{path.name}, KV in {said}", plot)
    if plot is not None and not drawn:
        err.print(f"no plot: matplotlib is not installed; {ttft_plot.INSTALL}", markup=False)
    report["plot"] = str(plot) if drawn else None
    if not as_json:
        _show(report)
    print_json(report)


def _over_http(
    model: str | None, url: str | None, contexts: list[int], runs: int, states: list[str], suffix: int, answer: int,
    settings: dict[str, object], as_json: bool,
) -> None:  # fmt: skip
    from everwarm.bench import ttft_http
    from everwarm.pull import resolve

    if url is not None:
        states = [state for state in states if state != "restart"]
    path = resolve(model, config.home()) if model is not None else None
    asked = ttft_http.HttpTtftOptions(
        contexts, runs, states, suffix, answer, url, path, os.environ.get("EVERWARM_API_KEY"), settings
    )
    ttft_http.check(asked)
    found = ttft_http.run(asked, bench_text.teller())
    head = {"benchmark": "ttft", "over": "http", "model": path.name if path else url, "suffix": suffix, "rounds": runs}
    report = head | ttft_http.summarise(found)
    if not as_json:
        table = bench_text.table_of("context", "state", "first token", "", "look-up", "restore", "since process start")
        for row in report["rows"]:
            receipt, since = row["receipts"][0], row["since_start_s"]
            table.add_row(
                f"{row['context']:,}", row["state"], _ms(row["ttft_s"]), f"±{row['spread']:.0%}",
                _ms(receipt["lookup_s"]), _ms(receipt["restore_s"]), _ms(since) if since else "",
            )  # fmt: skip
        _print(table)
        out.print("ms; first delta that holds text; answers are the same in all states (receipts)\n", markup=False)
    print_json(report)


def validate(
    result: Annotated[Path, typer.Argument(help="A file with the output of `everwarm bench ttft`.")],
    min_speedup: Annotated[float, typer.Option(help="How much faster than cold warm and restart must be.")] = 1.5,
) -> None:
    """Exit with 1, naming each context, unless every warm and restart of a result is so much faster than cold."""
    from everwarm.bench.ttft_report import read_result, too_slow

    slow = too_slow(read_result(result), min_speedup, lambda sentence: out.print(sentence, markup=False))
    for sentence in slow:
        err.print(sentence, markup=False)
    if slow:
        raise typer.Exit(1)


def _show(report: dict[str, Any]) -> None:
    cache = report["page_cache"]
    left = f", {cache['resident_share']:.1%} of it left (mincore)" if "resident_share" in cache else ""
    out.print(
        f"{report['model']}, KV in {report['kv_type']}, {report['threads']} threads; {report['suffix']} new tokens, "
        f"answers of {report['answer']}; page cache {cache['state']}: {cache['how']}{left}\n",
        markup=False,
    )
    _show_states(report["rows"])
    _show_comparisons(report["comparisons"])
    fitted = ", ".join(f"{state} {value:.2f}" for state, value in report["exponents"].items())
    if fitted:
        out.print(f"fitted exponent over context: {fitted}", markup=False)
    out.print("answers are the same in all states, tiers as meant (receipts)\n", markup=False)


def _show_states(rows: list[dict[str, Any]]) -> None:
    table = bench_text.table_of(
        "context", "agents", "state", "first token", "", "look-up", "read", "verify", "restore", "rest", "read bytes",
        "since process start",
    )  # fmt: skip
    for row in rows:
        if row["state"] == "off":
            continue
        process = row.get("process")
        table.add_row(
            f"{row['context']:,}", str(row["batch"]), row["state"], _ms(row["ttft_s"]), f"±{row['spread']:.0%}",
            _ms(row["lookup_s"]), *(_ms(row[key]) if row["restored_bytes"] else "" for key in _RESTORE),
            _ms(row["compute_s"]), human_bytes(row["restored_bytes"]) if row["restored_bytes"] else "",
            _ms(process["first_token_s"]) if process else "",
        )  # fmt: skip
    _print(table)
    out.print("ms; read and verify: per reader, of restore; rest: computing and all else\n", markup=False)


_RESTORE = ("read_s", "verify_s", "restore_s")


def _show_comparisons(comparisons: list[dict[str, Any]]) -> None:
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("cold/warm", lambda one: f"{one['cold_over_warm']:.1f}"),
        ("cold/restart", lambda one: f"{one['cold_over_restart']:.1f}"),
        ("cold/hot", lambda one: f"{one['cold_over_hot']:.1f}"),
        ("warm - hot", lambda one: _ms(one["warm_minus_hot_s"])),
        ("allowed", lambda one: _ms(one["allowed_s"])),
        ("restore GB/s", lambda one: f"{one['restore_bytes_s'] / 1e9:.1f}"),
        ("read+hash", lambda one: _both(one["bandwidth"], "hash")),
        ("read", lambda one: _both(one["bandwidth"], "read")),
        ("save", lambda one: _ms(one["save_s"])),
        ("overhead", lambda one: f"{one['save_overhead']:+.1%}"),
        ("writer CPU", lambda one: f"{one['save_cpu_share']:.1%}"),
        ("llama.cpp", lambda one: _ms(one["peer"]["ttft_s"])),
        ("of it restore", lambda one: _ms(one["peer"]["restore_s"])),
        ("warm/llama.cpp", lambda one: f"{one['warm_over_peer']:.2f}"),
    ]
    for first, last in ((0, 8), (8, len(columns))):
        _show_columns(comparisons, columns[first:last])
    out.print(
        "ms and GB/s; allowed: 1.3 x bytes / (read+hash, recycled) + 3 ms; read and read+hash into recycled / fresh "
        "memory; save: from the last token until it is safe; overhead: until the last token of a cold turn, against "
        "saving switched off\n",
        markup=False,
    )


def _show_columns(
    comparisons: list[dict[str, Any]], columns: list[tuple[str, Callable[[dict[str, Any]], str]]]
) -> None:
    """Those columns of which something is known."""
    known = [column for column in columns if any(_cell(column[1], one) for one in comparisons)]
    if not known:
        return
    table: Table = bench_text.table_of("context", "agents", *(name for name, _ in known))
    for one in comparisons:
        table.add_row(f"{one['context']:,}", str(one["batch"]), *(_cell(show, one) for _, show in known))
    _print(table)
    out.print()


def _cell(show: Callable[[dict[str, Any]], str], one: dict[str, Any]) -> str:
    try:
        return show(one)
    except KeyError:  # not measured
        return ""


def _print(table: Table) -> None:
    """As wide as it is: rows that are broken can't be read."""
    Console(highlight=False, width=max(out.width, _WIDTH)).print(table)


def _both(bandwidth: dict[str, float], what: str) -> str:
    return f"{bandwidth[f'{what}_recycled'] / 1e9:.1f} / {bandwidth[f'{what}_fresh'] / 1e9:.1f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
