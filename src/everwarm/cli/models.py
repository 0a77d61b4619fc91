"""`everwarm pull` and `everwarm inspect`."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from everwarm import config
from everwarm.cli.console import bytes_bar, err, human_bytes, out, print_json, printable
from everwarm.cli.model_use import told_use
from everwarm.errors import ConfigError
from everwarm.inspection import model_use, summarise
from everwarm.sizes import parse_size


def pull(
    name: Annotated[
        str | None, typer.Argument(help="A name from the catalogue (smollm2), or hf:ORG/REPO[/FILE.gguf].")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Verify the hash of a model that is already there.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the catalogue and what was pulled.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: one JSON object.")] = False,
) -> None:
    """Fetch a model into EVERWARM_HOME; prints where it is."""
    from everwarm.pull import pull as fetch

    if show:
        _show_models(as_json)
        return
    if name is None:
        raise ConfigError("which model? `everwarm pull --list` shows the names; hf:ORG/REPO/FILE.gguf is one, too")
    with bytes_bar() as bar:
        path = fetch(name, config.home(), progress=bar, check=check)
    err.print(f"{name} is ready, {human_bytes(path.stat().st_size)}")
    out.print(str(path), markup=False)


def _show_models(as_json: bool) -> None:
    from everwarm.catalogue import CATALOGUE
    from everwarm.pull import pulled

    there = {model.name: model for model in pulled(config.home())}
    known: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "family": entry.family,
            "size_bytes": entry.size_bytes,
            "sha256": entry.sha256,
            "licence": entry.licence,
            "description": entry.description,
            "path": str(there[entry.name].path) if entry.name in there else None,
        }
        for entry in CATALOGUE.values()
    ]
    others: list[dict[str, Any]] = [
        {"name": model.name, "size_bytes": model.size_bytes, "licence": model.licence, "path": str(model.path)}
        for model in there.values()
        if model.name not in CATALOGUE
    ]
    if as_json:
        print_json({"catalogue": known, "others": others})
        return
    table = Table("name", "family", "size", "licence", "pulled", "what it is", box=None, header_style="bold")
    for column in table.columns[:5]:
        column.no_wrap = True
    for one in [*known, *others]:
        table.add_row(
            *(Text(printable(str(one.get(key, "")))) for key in ("name", "family")),
            human_bytes(one["size_bytes"]),
            Text(printable(str(one["licence"]))),
            "yes" if one["path"] else "no",
            Text(str(one.get("description", "from the Hugging Face hub"))),
        )
    out.print(table)
    out.print("any other: everwarm pull hf:ORG/REPO/FILE.gguf, from the Hugging Face hub", markup=False)


def inspect(
    model: Annotated[str, typer.Argument(help="Path or pulled name.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    weight_budget: Annotated[
        str, typer.Option(help="Say what this budget for weights would mean, such as 300MiB or 50%.")
    ] = "100%",
    context: Annotated[
        int | None, typer.Option(min=1, help="Say what this many tokens would take in memory (default: the model's).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What a model file holds: metadata, tensor types, sizes; whether it can be run, and what it takes in memory. Works
    for architectures that can't be run, too.
    """
    from everwarm.pull import resolve
    from everwarm.weights.gguf.file import GGUFFile

    path = resolve(model, config.home())
    with GGUFFile(path) as file:
        summary = summarise(path, file)
        summary["use"] = use = model_use(file, context)
        summary["weight_budget"] = plan = _budget(file, weight_budget)
        rows = [(info.name, info.type.name, info.shape, info.size_bytes) for info in file.stored.values()]
    if as_json:
        if tensors:
            summary["tensors"] = [dict(zip(("name", "type", "shape", "size_bytes"), row, strict=True)) for row in rows]
        print_json(summary)
        return
    table = Table("key", "value", box=None, header_style="bold")
    for key, value in summary["metadata"].items():
        table.add_row(Text(printable(key)), Text(_short(value)))
    out.print(table)
    out.print(
        f"\n{summary['tensor_count']} tensors, {summary['parameters']:,} parameters, "
        f"{human_bytes(summary['size_bytes'])}: "
        + ", ".join(f"{count} x {kind}" for kind, count in summary["tensor_types"].items())
    )
    if summary["sampling"]:
        out.print("sampling that the file recommends: " + ", ".join(f"{k} {v}" for k, v in summary["sampling"].items()))
    for line in told_use(use):
        out.print(line, markup=False, highlight=False)
    if plan:
        out.print(_told(weight_budget, plan))
    if tensors:
        table = Table("tensor", "type", "shape", "bytes", box=None, header_style="bold")
        table.columns[3].justify = "right"
        for name, kind, shape, size in rows:
            table.add_row(Text(printable(name)), kind, " x ".join(map(str, shape)), f"{size:,}")
        out.print(table)


def _budget(file: Any, weight_budget: str) -> dict[str, int] | None:
    """What the budget would mean with native kernels; None if they have no form for some tensor."""
    from everwarm import kernels
    from everwarm.weights.cache.plan import plan_budget
    from everwarm.weights.pack.source import FileSource

    try:
        budget = parse_size(weight_budget)
    except ValueError as error:
        raise ConfigError(f"flag --weight-budget: can't understand {weight_budget!r}: {error}") from None
    if any(len(info.shape) > 2 for info in file.tensors.values()):
        return None
    try:
        sizes = FileSource(file, kernels.make(kernels.choose("native", "portable"), 1, 1, "f16")).sizes
    except ValueError:
        return None
    return asdict(plan_budget(sizes, budget))


def _told(budget: str, plan: dict[str, int]) -> str:
    whole = f"{human_bytes(plan['total_bytes'])} of weights in the kernels' form; "
    if not plan["streamed_bytes"]:
        return whole + f"a budget of {budget} keeps them all, the least is {human_bytes(plan['least_bytes'])}"
    return (
        f"{whole}a budget of {budget} keeps {human_bytes(plan['kept_bytes'])}, reads "
        f"{human_bytes(plan['streamed_bytes'])} again for each forward pass, and takes "
        f"{human_bytes(plan['ring_bytes'])} more for what is on its way; "
        f"the least is {human_bytes(plan['least_bytes'])}"
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['length']:,} items: {', '.join(repr(item) for item in value['first'])[:80]} ..."
    text = printable(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
