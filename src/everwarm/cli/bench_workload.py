"""`everwarm bench speed --workload`: decode on the work of agents, with and without drafts."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from everwarm import config
from everwarm.cli import bench_text
from everwarm.cli.console import out, print_json
from everwarm.errors import ConfigError
from everwarm.setting_kinds import Given
from everwarm.settings import Settings


def workload(
    path: Path,
    names: str,
    agents: int,
    max_tokens: int,
    runs: int,
    settings: dict[str, Given],
    peer: bool,
    as_json: bool,
) -> None:
    """Measure some workloads, or `all` of them, and print what came out."""
    from everwarm.bench.agentic import measure
    from everwarm.bench.agentic.peer import KINDS, Peer
    from everwarm.bench.agentic.workloads import WORKLOADS
    from everwarm.llm import LLM

    wanted = list(WORKLOADS) if names == "all" else names.split(",")
    for name in wanted:
        if name not in WORKLOADS:
            raise ConfigError(f"--workload {name}: expected all, or some of {', '.join(WORKLOADS)}")
    tell = bench_text.teller()
    chosen = config.resolve(Settings, {**settings, "speculate": "on", "warm": "off"}).settings
    threads = chosen.threads or config.cores()
    with ExitStack() as held:
        llm = held.enter_context(LLM(path, chosen))
        llm.weights.preload()
        prefill = measure.prefill_tok_s(llm, runs)
        works = [measure.Comparison(llm, name, agents, max_tokens) for name in wanted]
        longest = max(len(prompt) for work in works for prompt in work.prompts) + max_tokens
        servers = held.enter_context(Peer(path, longest + 256, threads, list(KINDS))) if peer else None
        for number in range(runs):
            for work in works:
                tell(f"{work.result.workload}: run {number + 1} of {runs}")
                work.run()
                if servers is not None:
                    servers.run(work.result.workload, work.prompts[0], work.tasks[0].sampling, max_tokens)
    rows = [_row(work.result, prefill) for work in works]
    theirs = [] if servers is None else list(servers.results.values())
    report = {
        "benchmark": "workload",
        "model": path.name,
        "threads": threads,
        "agents": agents,
        "max_tokens": max_tokens,
        "prefill_tok_s": prefill,
        "rows": rows,
        "llama.cpp": [
            {"work": one.workload, "kind": one.kind, "tok_s": one.tok_s, "runs": one.runs}
            | {"drafted": one.drafted, "accepted": one.accepted}
            for one in theirs
        ],
    }
    if not as_json:
        _show(rows, report)
    print_json(report)


def _row(result: Any, prefill: float) -> dict[str, Any]:
    without, drafted = result.tok_s
    return {
        "work": result.workload,
        "without_tok_s": without,
        "drafts_tok_s": drafted,
        "ratio": result.ratio,
        "acceptance": result.acceptance,
        "tokens_per_pass": result.tokens_per_pass,
        "of_prefill": drafted / prefill,
        "tokens": sum(map(len, result.drafted[0].tokens)),
        "same_tokens": result.same,
        "runs": [[run.tok_s for run in runs] for runs in (result.without, result.drafted)],
    }


def _show(rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    out.print(
        f"{report['model']}, {report['threads']} threads, {report['agents']} agent(s) at once; prefill of 512 tokens: "
        f"{report['prefill_tok_s']:.1f} tok/s",
        markup=False,
    )
    table = bench_text.table_of(
        "decode, tok/s", "without", "with drafts", "ratio", "accepted", "tokens/pass", "of prefill", "tokens", "same"
    )
    for row in rows:
        accepted = "none drafted" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
        table.add_row(
            row["work"], f"{row['without_tok_s']:.1f}", f"{row['drafts_tok_s']:.1f}", f"{row['ratio']:.2f} x", accepted,
            f"{row['tokens_per_pass']:.2f}", f"{row['of_prefill']:.0%}", str(row["tokens"]),
            "yes" if row["same_tokens"] else "NO",
        )  # fmt: skip
    out.print(table)
    if report["llama.cpp"]:
        _show_peer(rows, report["llama.cpp"])


def _show_peer(rows: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    table = bench_text.table_of("llama.cpp, tok/s", "drafts", "tok/s", "accepted", "everwarm is")
    for row in rows:
        for one in (one for one in theirs if one["work"] == row["work"]):
            accepted = f"{one['accepted'] / one['drafted']:.0%}" if one["drafted"] else ""
            faster = f"{row['drafts_tok_s'] / one['tok_s']:.2f} x"
            table.add_row(row["work"], one["kind"], f"{one['tok_s']:.1f}", accepted, faster)
    out.print(table)
