"""`everwarm weights ls | verify | rm`: the packs on disk."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from everwarm import config
from everwarm.cli.console import err, human_bytes, out, print_json
from everwarm.cli.options import Json
from everwarm.errors import ConfigError, PackError
from everwarm.weights.pack.file import Pack

app = typer.Typer(help="Packs: weights on disk in the form that the kernels eat.", no_args_is_help=True)

Which = Annotated[list[str] | None, typer.Argument(help="Beginnings of weights ids; all packs if none is given.")]


@app.command("ls")
def list_packs(as_json: Json = False) -> None:
    """The packs, newest first."""
    rows = [_describe(path) for path in _packs()]
    if as_json:
        print_json(rows)
        return
    table = Table("weights id", "size", "made", "state", box=None, header_style="bold")
    for row in rows:
        table.add_row(row["weights_id"][:16], human_bytes(row["size_bytes"]), row["made"][:16], row["state"])
    out.print(table if rows else "no packs: the first load of a model makes one")


@app.command("verify")
def verify(which: Which = None, as_json: Json = False) -> None:
    """Read packs and compare every tensor with its checksum. Exit code 1 if one is damaged."""
    results = []
    for path in _chosen(which):
        try:
            bad = list(Pack(path).altered())
            results.append({"path": str(path), "ok": not bad, "altered": bad})
        except (PackError, OSError) as error:
            results.append({"path": str(path), "ok": False, "error": str(error)})
    if as_json:
        print_json(results)
    else:
        for result in results:
            reason = result.get("error") or ", ".join(result.get("altered", ()))  # type: ignore[arg-type]
            out.print(f"{'ok     ' if result['ok'] else 'DAMAGED'} {result['path']} {reason}", markup=False)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


@app.command("rm")
def remove(
    which: Which = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every pack.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove packs. They are built again when their model is next loaded."""
    if bool(which) == everything:
        raise ConfigError("name the packs to remove, or give --all")
    for path in _chosen(which):
        size = path.lstat().st_size
        if not dry_run:
            path.unlink(missing_ok=True)
        err.print(f"{'would remove' if dry_run else 'removed'} {path} ({human_bytes(size)})", markup=False)


def _packs() -> Iterator[Path]:
    found = [path for path in (config.home() / "packs").glob("*.safetensors") if not path.name.startswith(".")]
    yield from sorted(found, key=lambda path: -path.lstat().st_mtime)


def _chosen(which: list[str] | None) -> list[Path]:
    packs = list(_packs())
    for start in which or ():
        if not any(path.name.startswith(start) for path in packs):
            raise ConfigError(f"no pack of weights {start}: everwarm weights ls shows those there are")
    return [path for path in packs if not which or path.name.startswith(tuple(which))]


def _describe(path: Path) -> dict[str, Any]:
    stat = path.lstat()
    row = {
        "path": str(path),
        "weights_id": path.name.split(".")[0],
        "size_bytes": stat.st_size,
        "made": _when(stat.st_mtime),
    }
    try:
        pack = Pack(path)
        return row | {"state": "good header", "tensors": len(pack.entries), "everwarm": pack.metadata.get("everwarm")}
    except (PackError, OSError) as error:
        return row | {"state": f"will be rebuilt: {error}"}


def _when(seconds: float) -> str:
    """A date and time; a file can carry times that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds).isoformat()
    except (ValueError, OverflowError, OSError):
        return "unknown"
