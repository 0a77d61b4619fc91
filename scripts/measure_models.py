"""Measure models of real size, and write the tables of docs/models.md from what was measured.

    python scripts/measure_models.py FOLDER speed gemma-3-270m moe      beside llama.cpp, in one run each
    python scripts/measure_models.py FOLDER restore gemma-3-270m        time to first token: cold, warm, hot, restart
    python scripts/measure_models.py FOLDER tables                      only write the tables

FOLDER has the models as NAME.gguf; those that are random are made by benchmarks/make_shapes.py. A figure stays in
docs/measured/models.json until its model is measured again. Nothing else should run on the machine.
"""

import argparse
import datetime
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "docs" / "measured" / "models.json"
PAGE = ROOT / "docs" / "models.md"
EVERWARM = ROOT / ".venv" / "bin" / "everwarm"


@dataclass(frozen=True)
class Model:
    name: str  # of its file, without .gguf
    architecture: str
    title: str


MODELS = (
    Model("gemma-3-270m", "gemma3", "gemma-3-270m Q4_K_M"),
    Model("moe", "qwen3moe", "random, 32 experts, 4 chosen: 0.9B active of 4B, Q4_K_M"),
    Model("mla", "deepseek2", "random, DeepSeek-V2-Lite's attention (MLA), 1.2B, Q4_K_M"),
    Model("qwen35", "qwen35", "random, Qwen 3.5 0.8B with another vocabulary (0.65B), Q4_K_M"),
    Model("tinyllama-iq2_xxs", "llama", "TinyLlama 1.1B IQ2_XXS"),
    *(
        Model(f"random-1b.{kind}", "llama", f"random, 1B shape, {kind}")
        for kind in ("Q2_K", "Q3_K", "IQ2_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "MXFP4")
    ),
)


def bench(what: str, model: Path, *flags: str) -> dict[str, Any]:
    command = [str(EVERWARM), "bench", what, str(model), "--json", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def speed(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both programs, by work."""
    flags = ["--prompt-tokens", given.prompt_tokens, "--depth", given.depth, "--decode-tokens", "32"]
    found = bench("speed", model, *flags, "--runs", str(given.runs), "--peer", "llama.cpp")
    rows: dict[str, Any] = {}
    for row in found["rows"]:
        entry = rows.setdefault(row["work"], {})
        if row["runner"].startswith("everwarm"):
            entry["tok_s"] = round(row["tok_s"], 1)
            if "bandwidth_share" in row:
                entry["of_read"] = round(row["bandwidth_share"], 3)
        else:
            entry["llama_cpp"] = round(max(entry.get("llama_cpp", 0.0), row["tok_s"]), 1)
    return rows


def restore(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds until the first token, by context."""
    found = bench("ttft", model, "--contexts", given.contexts, "--runs", str(given.runs), "--no-overhead")
    by_context: dict[str, Any] = {}
    for row in found["rows"]:
        entry = by_context.setdefault(str(row["context"]), {})
        entry[row["state"]] = round(1e3 * row["ttft_s"], 1)
        if row["state"] == "warm":
            entry["read_mib"] = round(row["restored_bytes"] / 2**20, 1)
    for row in found["comparisons"]:
        entry = by_context[str(row["context"])]
        entry["warm_minus_hot"] = round(1e3 * row["warm_minus_hot_s"], 1)
        entry["allowed"] = round(1e3 * row["allowed_s"], 1)
    return by_context


def measure(given: argparse.Namespace) -> None:
    found: dict[str, Any] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for name in given.models:
        if name not in {model.name for model in MODELS}:
            raise SystemExit(f"{name}: known are {', '.join(model.name for model in MODELS)}")
        measured = {"speed": speed, "restore": restore}[given.what](given.folder / f"{name}.gguf", given)
        entry = found.setdefault(name, {})
        entry.setdefault(given.what, {}).update(measured)
        entry["date"] = datetime.date.today().isoformat()
        print(name, json.dumps(measured), flush=True)
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def speed_table(found: dict[str, Any]) -> list[str]:
    rows = ["| model | work | tok/s | x llama.cpp | of a plain read of memory |", "| --- | --- | --- | --- | --- |"]
    for model in MODELS:
        for work, one in found.get(model.name, {}).get("speed", {}).items():
            share = f"{one['of_read']:.0%}" if "of_read" in one else ""
            ratio = f"{one['tok_s'] / one['llama_cpp']:.2f}"
            rows.append(f"| {model.title} | {work} | {one['tok_s']:,} | {ratio} | {share} |")
    return rows


def restore_table(found: dict[str, Any]) -> list[str]:
    rows = [
        "| model | context | cold | warm | hot | after a restart | read | cold / warm | warm - hot, allowed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in MODELS:
        by_context = found.get(model.name, {}).get("restore", {})
        for context in sorted(by_context, key=int):
            one = by_context[context]
            rows.append(
                f"| {model.title} | {int(context):,} | {one['cold']:,.0f} | {one['warm']:,.0f} | {one['hot']:,.0f} "
                f"| {one['restart']:,.0f} | {one['read_mib']} MiB | {one['cold'] / one['warm']:.0f} "
                f"| {one['warm_minus_hot']}, {one['allowed']} |"
            )
    return rows


def write_tables() -> None:
    found = json.loads(MEASURED.read_text())
    page = PAGE.read_text()
    for name, rows in (("speed", speed_table(found)), ("restore", restore_table(found))):
        begin, end = f"<!-- {name}: begin (python scripts/measure_models.py) -->", f"<!-- {name}: end -->"
        before, after = page.split(begin)[0], page.split(end)[1]
        page = before + begin + "\n\n" + "\n".join(rows) + "\n\n" + end + after
    PAGE.write_text(page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=["speed", "restore", "tables"])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--prompt-tokens", default="512")
    parser.add_argument("--depth", default="0")
    parser.add_argument("--contexts", default="16384")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    measure(given)
    write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
