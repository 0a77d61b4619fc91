"""How `everwarm agents` shows what it has found. What files say is text, never markup or control characters."""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from everwarm.cli.console import err, human_bytes, out, printable
from everwarm.kv.warm.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from everwarm.kv.tools.inventory import AgentEntry, ModelEntry
    from everwarm.kv.warm.blockstore import BlockStore
    from everwarm.text.why import Explanation


def row_of(entry: "ModelEntry", agent: "AgentEntry") -> dict[str, Any]:
    """An agent as data: for tables and for JSON."""
    manifest = agent.manifest
    return {
        "agent": manifest.name,
        "tenant": manifest.tenant,
        "model": entry.name,
        "model_id": entry.directory,
        "kv_type": entry.kv_type,
        "tokens": len(manifest.tokens),
        "kv_tokens": manifest.kv_tokens,
        "blocks": len(manifest.blocks),
        "lost_blocks": len(agent.lost),
        "own_bytes": agent.own_bytes,
        "shared_bytes": agent.shared_bytes,
        "created": _when(manifest.created),
        "used": _when(manifest.used),
        "used_ago": _ago(time.time() - manifest.used),
        "pinned": manifest.pinned,
        "anonymous": manifest.anonymous,
        "group": manifest.group,
        "generation": manifest.generation,
    }


def print_agents(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, int], hidden: int) -> None:
    """The table of `ls` and what it all comes to."""
    if rows:
        out.print(_table(rows))
    also = f", {hidden} without a name (--all shows them)" if hidden else ""
    out.print(
        f"{count_of(len(rows), 'agent')}{also}; {count_of(totals['blocks'], 'block')}, {totals['unowned_blocks']} of "
        f"no agent; {human_bytes(totals['bytes'])} of a quota of {human_bytes(totals['quota_bytes'])}; "
        f"{totals['quarantined']} in quarantine"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ["agent", "model", "kv", "tokens", "blocks", "own", "shared", "last used", ""]
    tenants = any(row["tenant"] != DEFAULT_TENANT for row in rows)
    if tenants:
        heads.insert(1, "tenant")
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = column.header not in ("agent", "tenant", "model", "")
        column.overflow = "fold"
        column.justify = "right" if column.header in ("tokens", "blocks", "own", "shared") else "left"
    for row in rows:
        marks = [word for word in ("pinned", "anonymous") if row[word]]
        marks += [f"group {row['group']}"] if row["group"] else []
        marks += [f"{row['lost_blocks']} lost"] if row["lost_blocks"] else []
        cells = [row["agent"], *([row["tenant"]] if tenants else []), row["model"], row["kv_type"]]
        cells += [f"{row['tokens']:,}", f"{row['blocks']:,}", human_bytes(row["own_bytes"])]
        cells += [human_bytes(row["shared_bytes"]), row["used_ago"], ", ".join(marks)]
        table.add_row(*(Text(_short(printable(cell))) for cell in cells))
    return table


def print_agent(row: Mapping[str, Any], messages: Sequence[Any] | None) -> None:
    """What `show` says: fields, then the conversation."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for key, value in row.items():
        if key == "lost":
            value = _ranges(value) or "none"
        elif key.endswith("bytes"):
            value = human_bytes(value)
        table.add_row(key.replace("_", " "), Text(printable(str(value)), overflow="fold"))
    out.print(table)
    if messages is None:
        err.print("(no messages: its turns were given as plain text or tokens)", style="dim")
    for message in messages or ():
        said = message if isinstance(message, dict) else {"content": message}
        out.print(Text(f"\n{printable(str(said.get('role', '?')))}:", style="bold"))
        for line in _plain(said.get("content")).splitlines():
            out.print(Text(printable(line)))


def print_problems(store: "BlockStore", entry: "ModelEntry") -> None:
    """What `ls` can't list."""
    if entry.problem:
        err.print(Text(printable(f"{entry.directory}: {entry.problem} (everwarm agents verify --repair)")))
    for blob, why in {**entry.unreadable, **entry.other_versions}.items():
        err.print(Text(printable(f"{store.where(blob)}: {why}")))


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).isoformat()
    except (ValueError, OverflowError, OSError):  # a file can say anything
        return "never" if math.isnan(seconds) else "unknown"


def _ago(seconds: float) -> str:
    if not seconds < 1e11:  # or not a number: a file can say anything
        return "unknown"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def _plain(content: Any) -> str:
    """The text of a message: itself, or what its parts say."""
    if isinstance(content, list):
        return "\n".join(_plain(part.get("text", part) if isinstance(part, dict) else part) for part in content)
    return content if isinstance(content, str) else repr(content)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> 0-2, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _short(text: str, most: int = 48) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def count_of(number: int, what: str) -> str:
    """1 block, 2 blocks."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def print_explanation(found: "Explanation", active: Sequence[str]) -> None:
    """What `why` has found: both texts around their first difference, and what would have helped."""
    summary = f"{found.summary[0].upper()}{found.summary[1:]}."
    out.print(Text(printable(f"{found.agent}: {summary}")), soft_wrap=True)
    if (difference := found.difference) is None:
        return
    out.print()
    for name, said in (("old", difference.old), ("new", difference.new)):
        out.print(Text(printable(f"  {name}  {said}")), soft_wrap=True)
    out.print(Text(" " * (7 + cell_len(difference.new[: difference.column])) + "^"), soft_wrap=True)
    out.print()
    if found.rules:
        out.print(f"Prompt rules that were applied: {', '.join(found.rules)}.", soft_wrap=True)
    if found.advice is not None:
        rules, several = " and ".join(found.advice.rules), len(found.advice.rules) > 1
        saved = count_of(found.advice.saved_tokens, "token")
        out.print(
            f"The prompt rule{'s' * several} {rules} would have saved about {saved}. "
            f"Switch {'them' if several else 'it'} on with "
            f"--prompt-rules {found.setting(active)} (or EVERWARM_PROMPT_RULES, or prompt_rules in config.toml).",
            soft_wrap=True,
        )
    else:
        out.print("No prompt rule would have saved a token.")
    out.print(
        f"Another order would have saved about {count_of(found.same_tokens, 'token')}: those behind the difference "
        "that are the same in both, if what changes stood last.",
        soft_wrap=True,
    )
