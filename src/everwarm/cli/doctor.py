"""`everwarm doctor`: what this machine has, what everwarm makes of it, and where every setting comes from."""

import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from everwarm import config
from everwarm.cli.console import human_bytes, out, print_json, printable
from everwarm.setting_kinds import settings_of
from everwarm.settings import ServeSettings


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """What this machine has, which kernels compute and why, and every setting with its source."""
    report = examine()
    if as_json:
        print_json(report)
        return
    for title, rows in report.items():
        table = Table(
            box=None, show_header=False, title=title, title_justify="left", title_style="bold", padding=(0, 2, 0, 2)
        )
        for key, value in rows.items():
            shown = f"{value['value']}  ({value['source']})" if isinstance(value, dict) else str(value)
            table.add_row(key, Text(printable(shown)))
        out.print(table)


def examine() -> dict[str, dict[str, Any]]:
    """Everything the doctor says, by section."""
    from everwarm import kernels, pull

    found = config.resolve(ServeSettings)
    choice = kernels.choose(found.settings.backend, found.settings.isa)
    cpu, home = kernels.detect_cpu(), config.home()
    return {
        "versions": {
            "everwarm": version("everwarm"),
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "blas": _blas(),
        },
        "machine": {
            "processor": cpu.model,
            "instructions": " ".join(cpu.features) or "none that we know",
            "cores": config.cores(),
            "memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        },
        "kernels": {"backend": choice.backend, "instructions": choice.isa, "why": choice.why},
        "files": {
            "home": str(home),
            "state": _state(home),
            "models": ", ".join(model.name for model in pull.pulled(home)) or "none (try: everwarm pull smollm2)",
        },
        "settings": {
            name: {"value": setting.show(getattr(found.settings, name)), "source": found.sources[name]}
            for name, setting in settings_of(ServeSettings).items()
        },
    }


def _blas() -> str:
    import numpy  # noqa: F401  (threadpoolctl sees libraries that are loaded)
    from threadpoolctl import threadpool_info

    found = [
        f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return "; ".join(found) or "unknown"


def _state(home: Path) -> str:
    existing = next(path for path in (home, *home.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return f"NOT writable: set EVERWARM_HOME to a directory that is ({existing})"
    return f"writable, {human_bytes(shutil.disk_usage(existing).free)} free"
