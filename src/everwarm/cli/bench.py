"""`everwarm bench`: measurements that anyone can repeat. A table for people, then one line of JSON for programs."""

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from everwarm import config
from everwarm.cli import bench_load, bench_text, bench_ttft, bench_workload
from everwarm.cli.console import err, human_bytes, out, print_json
from everwarm.cli.options import Json, KvType, Model, Threads
from everwarm.errors import ConfigError
from everwarm.setting_kinds import Given

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
    workload: Annotated[
        str | None,
        typer.Option(
            help="Instead: decode on the work of agents with and without drafts. `all`, or some of edit, json, tool, "
            "summary, prose, separated by commas; at most --decode-tokens of each answer."
        ),
    ] = None,
    agents: Annotated[int, typer.Option(help="With --workload: so many agents at once.", min=1, max=64)] = 1,
    threads: Threads = None,
    kv_type: KvType = None,
    as_json: Json = False,
) -> None:
    """Prefill and decode in tokens per second, beside the ceiling of the machine and, with --peer, beside llama.cpp."""
    from everwarm.bench import speed as bench
    from everwarm.kernels import supported_isas
    from everwarm.pull import resolve

    if peer not in (None, bench.PEER):
        raise ConfigError(f"--peer {peer}: known is {bench.PEER}")
    path = resolve(model, config.home())
    if workload is not None:
        settings: dict[str, Given] = {"threads": threads, "kv_type": kv_type, "isa": isa}
        bench_workload.workload(path, workload, agents, decode_tokens, runs, settings, peer is not None, as_json)
        return
    works = [bench.Work("prefill", size) for size in bench_text.numbers("--prompt-tokens", prompt_tokens, 1)]
    works += [bench.Work("decode", decode_tokens, at) for at in bench_text.numbers("--depth", depth, 0)]
    isas = [*supported_isas(), "blas"] if isa == "all" else [None if isa == "auto" else isa]
    settings = {"threads": threads, "kv_type": kv_type}
    series, ceiling = bench.run(path, works, runs, settings, isas, peer is not None, bench_text.teller())
    rows = _rows(series, _bytes_of_a_token(path), ceiling)
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


@app.command("weights")
def weights(
    model: Model,
    budgets: Annotated[
        str, typer.Option(help="Shares of the weights' bytes to keep, separated by commas.")
    ] = "0.25,0.5,0.75,1",
    form: Annotated[str, typer.Option(help="`packed` (native kernels) or `f32` (dequantised, BLAS).")] = "packed",
    passes: Annotated[
        int, typer.Option(help="Tokens to generate for each row; with --steady, per request.", min=2)
    ] = 24,
    prefetch_ahead: Annotated[str, typer.Option(help="Layers to read ahead, separated by commas.")] = "0,1,2,4",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 8,
    steady: Annotated[
        int | None, typer.Option(help="Only this: so many consecutive requests after preloading.", min=2)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate and speed over budget into this PNG file.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The weight cache: first and later uses, every policy beside the best possible, speed, memory and disk."""
    from everwarm.bench.weights import plot as weights_plot
    from everwarm.bench.weights import weights as bench
    from everwarm.bench.weights.row import FORMS
    from everwarm.pull import resolve

    if form not in FORMS:
        raise ConfigError(f"--form {form}: expected one of {', '.join(FORMS)}")
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise ConfigError(f"--plot {plot}: expected a file name that ends in .png, in a folder that exists")
    path = resolve(model, config.home())
    asked = bench.WeightsOptions(
        path, form, _shares("--budgets", budgets), passes, bench_text.numbers("--prefetch-ahead", prefetch_ahead, 0),
        prompt_tokens, threads,
    )  # fmt: skip
    head = {"model": path.name, "form": form, "threads": threads or config.cores(), "prompt_tokens": prompt_tokens}
    if steady is not None:
        told = {"benchmark": "weights steady"} | head | _steadiness(bench.steady(asked, steady, bench_text.teller()))
        if not as_json:
            _show_steady(told)
        print_json(told)
        return
    report = bench.run(asked, bench_text.teller())
    drawn = plot is not None and weights_plot.draw(report.rows, f"{path.name}, {form}", plot)
    if plot is not None and not drawn:
        err.print(f"no plot: matplotlib is not installed; {weights_plot.INSTALL}", markup=False)
    if not as_json:
        _show_weights(report)
    print_json({"benchmark": "weights"} | head | asdict(report) | {"plot": str(plot) if drawn else None})


app.command("ttft")(bench_ttft.ttft)
app.command("validate")(bench_ttft.validate)
app.command("load")(bench_load.load)


def _shares(flag: str, text: str) -> list[float]:
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 < value <= 1 for value in values):
        raise ConfigError(f"{flag} {text!r}: expected numbers above 0 and up to 1, separated by commas")
    return values


def _bytes_of_a_token(path: Path) -> int:
    """Bytes of the file that are read for each token: of the experts, those that are chosen."""
    from everwarm.model.facts import active_bytes, read_model
    from everwarm.weights.gguf.file import GGUFFile

    with GGUFFile(path) as file:
        config = read_model(file)
        return active_bytes(config, {name: info.size_bytes for name, info in file.tensors.items()})


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


def _show_weights(report: Any) -> None:
    out.print(f"{report.tensors} tensors, {human_bytes(report.total_bytes)}, {report.uses_per_pass} uses per pass")
    if report.hot_experts is not None:
        out.print(f"experts: {report.hot_experts:.0%} of their uses fall on the quarter that is used most")
    uses = bench_text.table_of("access", "tensors", "first", "hit", "ratio", "least ratio", "same memory")
    for one in report.access:
        uses.add_row(
            one.kind, str(one.tensors), f"{one.cold_median_s * 1e6:,.0f} µs", f"{one.hit_ns:.0f} ns",
            f"{one.ratio:,.0f} x", f"{one.least_ratio:,.0f} x", "yes" if one.same_memory else "NO",
        )  # fmt: skip
    out.print(uses)
    built = sum(one.cold_s for one in report.access)
    read = (
        f", read from the pack in {sum(one.pack_s for one in report.access):.2f} s" if report.access[0].pack_s else ""
    )
    out.print(f"all of them built from the model file in {built:.2f} s{read}\n", markup=False)

    policies = list(dict.fromkeys(row.name for row in report.rows if 0 < row.budget < 1))
    rates = bench_text.table_of("hit rate, bytes", "budget", *policies, "optimum", "value/optimum")
    for trace, budget, best, found in _by_budget(report):
        ratio = f"{found['value'] / best:.3f}" if best else ""
        rates.add_row(trace, f"{budget:.0%}", *(f"{found[name]:.1%}" for name in policies), f"{best:.1%}", ratio)
    out.print(rates)
    for note in report.notes:
        out.print(note, markup=False)

    real = bench_text.table_of(
        "\nreal requests", "kept", "ahead", "waited", "tok/s", "CPU ms", "disk MB", "peak MiB", "weights"
    )
    for row in report.rows:
        one = row.row
        real.add_row(
            f"{row.budget:.0%} {row.name}" if row.budget else row.name, f"{one.hit_rate:.1%}", f"{one.ring_rate:.1%}",
            f"{one.miss_rate:.1%}", f"{one.tok_s:.1f} ±{one.spread:.0%}", f"{one.cpu_s * 1e3:.0f}",
            f"{one.disk_bytes / 1e6:.1f}", f"{(one.peak_rss - one.import_rss) / 2**20:.0f}",
            f"{row.weights_rss / 2**20:.0f}" if row.weights_rss is not None else "",
        )  # fmt: skip
    out.print(real)
    out.print(
        "shares of bytes; CPU time and bytes from disk per token; peak RSS above that after import, in MiB, and what "
        "of it is weights: without what loading took, KV and activations, as in the row that keeps all\n",
        markup=False,
    )
    if report.prefetch:
        _show_prefetch(report)


def _by_budget(report: Any) -> list[tuple[str, float, float, dict[str, float]]]:
    """Trace, budget, optimum, and the hit rate of each policy."""
    found: dict[tuple[str, float], tuple[float, dict[str, float]]] = {}
    for row in report.traces:
        found.setdefault((row.trace, row.budget), (row.optimum, {}))[1][row.policy] = row.hit_rate
    for row in report.rows:
        if 0 < row.budget < 1:
            found.setdefault(("real passes", row.budget), (row.optimum, {}))[1][row.name] = row.row.hit_rate
    return [(trace, budget, best, rates) for (trace, budget), (best, rates) in found.items()]


def _show_prefetch(report: Any) -> None:
    ahead = bench_text.table_of("layers ahead", "tok/s", "stall per token", "first token", "of request 1", "ring MiB")
    for one in report.prefetch:
        ahead.add_row(
            str(one.ahead), f"{one.tok_s:.1f} ±{one.spread:.0%}", f"{one.stall_s * 1e3:.1f} ms",
            f"{one.ttft_s * 1e3:.0f} ms", f"{one.cold_ttft_s * 1e3:.0f} ms", f"{one.ring_bytes / 2**20:.1f}",
        )  # fmt: skip
    out.print(ahead)
    out.print(
        f"recommended with a budget of {report.prefetch_budget:.0%}: --prefetch-ahead {report.recommended_ahead} "
        "(the smallest within 3 % of the fastest)",
        markup=False,
    )


def _steadiness(found: Any) -> dict[str, Any]:
    from everwarm.bench.weights.weights import variation

    requests = found.requests
    machine = [one.machine for one in requests if one.machine is not None]
    quiet = [
        one
        for before, one in zip([requests[0], *requests], requests, strict=False)
        if machine and min(before.machine, one.machine) >= 0.9 * max(machine)
    ]
    ttft, speed = [one.ttft_s for one in requests], [one.tok_s for one in requests]
    median = statistics.median(ttft)
    return {
        "requests": [asdict(one) for one in requests],
        "ttft_median_s": median,
        "ttft_variation": variation(ttft),
        "ttft_first_over_median": ttft[0] / median,
        "ttft_worst_over_median": max(ttft) / median,
        "tok_s_median": statistics.median(speed),
        "tok_s_variation": variation(speed),
        "decode_limit_tok_s": found.decode_limit_tok_s,
        "prefill_tok_s_least": min(one.prefill_tok_s for one in requests),
        "quiet_requests": len(quiet),
        "quiet_tok_s_variation": variation([one.tok_s for one in quiet]) if quiet else None,
        "quiet_ttft_worst_over_median": (
            max(one.ttft_s for one in quiet) / statistics.median(one.ttft_s for one in quiet) if quiet else None
        ),
        "quiet_prefill_tok_s_least": min((one.prefill_tok_s for one in quiet), default=None),
        "slowest_window": max((one.slowest_window for one in requests if one.slowest_window), default=None),
        "machine_variation": variation(machine) if machine else None,
        "misses": sum(one.misses for one in requests),
        "instances": sorted({one.instance for one in requests}),
        "problems": found.problems,
    }


def _show_steady(told: dict[str, Any]) -> None:
    table = bench_text.table_of("request", "first token", "prefill tok/s", "decode tok/s", "misses", "cache")
    for number, one in enumerate(told["requests"], start=1):
        table.add_row(
            str(number), f"{one['ttft_s'] * 1e3:.1f} ms", f"{one['prefill_tok_s']:.0f}", f"{one['tok_s']:.1f}",
            str(one["misses"]), one["instance"],
        )  # fmt: skip
    out.print(table)
    limit, machine = told["decode_limit_tok_s"], told["machine_variation"]
    lines = [
        f"first token: median {told['ttft_median_s'] * 1e3:.1f} ms, request 1 {told['ttft_first_over_median']:.2f} x, "
        f"worst {told['ttft_worst_over_median']:.2f} x of it, variation {told['ttft_variation']:.1%}",
        f"decode: median {told['tok_s_median']:.1f} tok/s, variation {told['tok_s_variation']:.1%}"
        + (f"; memory allows {limit:.0f} tok/s" if limit else ""),
        f"prefill: at least {told['prefill_tok_s_least']:.0f} tok/s",
        f"{told['misses']} misses, {len(told['instances'])} weight cache; verify: "
        f"{'; '.join(told['problems']) or 'no problem'}",
    ]
    if machine is not None:
        lines.append(f"the machine itself, integer products after each request: variation {machine:.1%}")
    if told["quiet_requests"]:
        lines.append(
            f"{told['quiet_requests']} requests with the machine within 10 % of its best before and after: decode "
            f"variation {told['quiet_tok_s_variation']:.1%}, worst first token "
            f"{told['quiet_ttft_worst_over_median']:.2f} x the median, prefill at least "
            f"{told['quiet_prefill_tok_s_least']:.0f} tok/s"
        )
    if told["slowest_window"] is not None:
        lines.append(f"slowest 100 tokens: {told['slowest_window']:.2f} x what their context explains")
    for line in lines:
        out.print(line, markup=False)
