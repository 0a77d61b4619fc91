"""What the bench commands share: lists of numbers, progress, tables."""

import sys
from collections.abc import Callable

from rich.table import Table

from everwarm.cli.console import err
from everwarm.errors import ConfigError


def numbers(flag: str, text: str, least: int) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: expected whole numbers separated by commas") from None
    if min(values) < least:
        raise ConfigError(f"{flag} {text!r}: at least {least} is needed")
    return values


def teller() -> Callable[[str], None]:
    """Progress, if someone looks."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: err.print(text, style="dim", markup=False)


def table_of(*columns: str) -> Table:
    """A table without lines; all columns but the first are to the right."""
    table = Table(columns[0], box=None, header_style="bold", pad_edge=False)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table
