"""Where output goes: results to stdout, talk to stderr, bars only on a terminal."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from everwarm.events import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

# C1 controls, marks of direction, ends of lines and halves of characters: JSON allows them as they are.
_STEERING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Report(Protocol):
    """Told (what is being done, bytes done, bytes in all if known)."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def print_answer(event: Event, print_text: Callable[[str], None]) -> None:
    """What has come of an answer. Reasoning and tool calls are talk, not results."""
    for part in event.content:
        match part:
            case Text():
                print_text(part.text)
            case Reasoning() | ToolCallArguments():
                err.print(part.text, end="", style="dim", markup=False)
            case ToolCallStart():
                err.print(f"\ncalls {part.name} ", end="", style="dim", markup=False)
            case ToolCallEnd():
                err.print()


def print_json(value: Any) -> None:
    """One object on one line: for programs. What could steer a terminal is escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    print(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


@contextmanager
def bytes_bar() -> Iterator[Report]:
    """A progress bar on stderr if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield show


def printable(text: str) -> str:
    """On one line, without control characters: what a file says must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def human_bytes(count: int) -> str:
    """98362432 -> 93.8 MiB."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
