"""`everwarm bench`: measurements that anyone can repeat. A table for people, then one line of JSON for programs."""

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from everwarm import config
from everwarm.cli.console import err, out, print_json
from everwarm.cli.options import Json, KvType, Model, Threads
from everwarm.errors import ConfigError

app = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("speed")
def speed(
    model: Model,
    prompt_tokens: Annotated[str, typer.Option(help="Sizes of prefill, separated by commas.")] = "512",
    decode_tokens: Annotated[int, typer.Option(help="Tokens to decode.", min=1)] = 128,
    depth: Annotated[str, typer.Option(help="How many tokens lie before the decoded ones, separated by commas.")] = "0",
    runs: Annotated[int, typer.Option(help="Runs of each measurement.", min=1)] = 3,
    isa: Annotated[str, typer.Option(help="Instruction set; `all` adds a row for each, and one for BLAS.")] = "auto",
    peer: Annotated[str | None, typer.Option(help="`llama.cpp`: measure it in the same run, run by run.")] = None,
    threads: Threads = None,
    kv_type: KvType = None,
    as_json: Json = False,
) -> None:
    """Prefill and decode in tokens per second, beside the ceiling of the machine and, with --peer, beside llama.cpp."""
    from everwarm.bench import speed as bench
    from everwarm.kernels import _native
    from everwarm.pull import resolve

    if peer not in (None, bench.PEER):
        raise ConfigError(f"--peer {peer}: known is {bench.PEER}")
    path = resolve(model, config.home())
    works = [bench.Work("prefill", size) for size in _numbers("--prompt-tokens", prompt_tokens, 1)]
    works += [bench.Work("decode", decode_tokens, at) for at in _numbers("--depth", depth, 0)]
    isas = [*_native.supported_isas(), "blas"] if isa == "all" else [None if isa == "auto" else isa]
    settings: dict[str, object] = {"threads": threads, "kv_type": kv_type}
    tell = (lambda text: err.print(text, style="dim", markup=False)) if sys.stderr.isatty() else lambda text: None
    series, ceiling = bench.run(path, works, runs, settings, isas, peer is not None, tell)
    rows = _rows(series, path.stat().st_size, ceiling)
    report = {
        "benchmark": "speed",
        "model": path.name,
        "threads": threads or config.cores(),
        "read_bytes_s": ceiling and ceiling.read_bytes_s,
        "integer_ops_s": ceiling and ceiling.integer_ops_s,
        "rows": rows,
    }
    if not as_json:
        _show(rows, report)
    print_json(report)


def _numbers(flag: str, text: str, least: int) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: expected whole numbers separated by commas") from None
    if min(values) < least:
        raise ConfigError(f"{flag} {text!r}: at least {least} is needed")
    return values


def _rows(series: Any, file_bytes: int, ceiling: Any) -> list[dict[str, Any]]:
    peers = {one.work: one.median for one in series if one.runner.startswith("llama.cpp")}
    rows = []
    for one in series:
        row = {
            "work": one.work.name,
            "runner": one.runner,
            "tok_s": one.median,
            "spread": one.spread,
            "runs": one.tok_s,
        }
        if one.work in peers and one.runner.startswith("everwarm"):
            row["ratio"] = one.median / peers[one.work]
        if one.work.kind == "decode" and one.work.depth == 0 and ceiling:
            row["bandwidth_share"] = one.median * file_bytes / ceiling.read_bytes_s
        rows.append(row)
    return rows


def _show(rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    if report["read_bytes_s"]:
        out.print(
            f"ceiling: memory read {report['read_bytes_s'] / 1e9:.1f} GB/s, "
            f"int8 {report['integer_ops_s'] / 1e9:.0f} GOPS; model {report['model']}",
            markup=False,
        )
    table = Table("work", "by", "tok/s", "spread", "x llama.cpp", "of bandwidth", box=None, header_style="bold")
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        share = f"{row['bandwidth_share']:.0%}" if "bandwidth_share" in row else ""
        table.add_row(row["work"], row["runner"], f"{row['tok_s']:.1f}", f"± {row['spread']:.1%}", ratio, share)
    out.print(table)
