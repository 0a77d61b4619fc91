"""Prompts that change for no reason: a table of rules that change the messages of a request before they are rendered.

Some programs put text at the beginning of a prompt that differs from request to request. Nothing behind it can be
reused then: neither the rest of the system text, nor the tools that a template lists after it. A rule either drops a
block that means nothing to a model, or moves lines from the system text to the beginning of the first message of the
user: there they say the same, and all that stands before them is equal in every session.

Which rules are applied is a setting (`prompt_rules`). The names of those that changed a prompt are in its receipt.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

LONGEST_LINE = 300
"""Characters of a line that a rule may move. A longer one is a paragraph of instructions."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is changed in the system messages before the first message of the user."""

    name: str
    why: str
    moves: bool  # whether what it takes out goes to the user's message; else it is dropped
    takes: Callable[[list[str]], list[bool]]  # which of the lines of a block are taken out


@dataclass(frozen=True, slots=True)
class Applied:
    """Messages after the rules, and the names of the rules that have changed them."""

    messages: Sequence[Message]
    rules: tuple[str, ...] = ()


def apply(messages: Sequence[Message], names: Sequence[str]) -> Applied:
    """Apply the rules of these names, in this order. What is no text is left as it is."""
    first = next((at for at, message in enumerate(messages) if _get(message, "role") == "user"), len(messages))
    can_move = first < len(messages) and isinstance(_get(messages[first], "content"), str | list)
    head, moved, applied = list(messages[:first]), list[str](), list[str]()
    for name in dict.fromkeys(names):
        rule, before = RULES[name], head
        if can_move or not rule.moves:
            head = [out for message in before for out in _without(message, rule, moved)]
        if head != before:
            applied.append(name)
    if not applied:
        return Applied(messages)
    tail = list(messages[first:])
    if moved:
        tail[0] = _opened_by(moved, tail[0])
    return Applied([*head, *tail], tuple(applied))


def _without(message: Message, rule: Rule, moved: list[str]) -> list[Message]:
    """A message without what a rule takes out; none if nothing is left of it. Lines that are moved are added."""
    content = _get(message, "content")
    blocks = [content] if isinstance(content, str) else content
    if _get(message, "role") != "system" or not isinstance(blocks, list):
        return [message]
    kept = []
    for block in blocks:
        text = block if isinstance(block, str) else _get(block, "text")
        lines = text.split("\n") if isinstance(text, str) else []
        taken = rule.takes(lines)
        if not any(taken):
            kept.append(block)
            continue
        if rule.moves:
            moved += [line.rstrip("\r") for line, out in zip(lines, taken, strict=True) if out]
        rest = "\n".join(line for line, out in zip(lines, taken, strict=True) if not out)
        if rest.strip():
            kept.append(rest if isinstance(block, str) else {**block, "text": rest})
    if kept == blocks:
        return [message]
    if len(kept) == 1 and isinstance(_get(kept[0], "text"), str):
        kept = [kept[0]["text"]]  # as if the client had sent one block
    return [{**message, "content": kept[0] if isinstance(kept[0], str) else kept}] if kept else []


def _opened_by(lines: list[str], message: Message) -> Message:
    """A message that begins with these lines."""
    text, content = "\n".join(lines) + "\n\n", message["content"]
    opened = text + content if isinstance(content, str) else [{"type": "text", "text": text}, *content]
    return {**message, "content": opened}


def _get(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


# The table -----------------------------------------------------------------------------------------------------------

_BILLING = re.compile(r"\s*x-anthropic-billing-header:")


def _is_billing_header(lines: list[str]) -> list[bool]:
    """The whole block, if it is that one line."""
    said = [line for line in lines if line.strip()]
    return [len(said) == 1 and _BILLING.match(said[0]) is not None] * len(lines)


_GAP = r"[\s_-]*"
_LEADING = r"[^\w]*(?:(?:the|it is|your|this|current|present|local|system|session|primary|main|default)[\s_-]+)*"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    rf"{_LEADING}(?:today(?:'s|’s)?|now|date|time|datetime|timestamp|day)\b[^\d]{{0,60}}?(?:"
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d{2}|\d{10,13}\b"
    rf"|\d{{1,2}}(?:st|nd|rd|th|\.)?\s+{_MONTH},?\s+\d{{4}}|\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}})",
    re.IGNORECASE,
)
"""The word, then a date, a time of day or seconds since 1970."""
_FOLDER = (
    rf"(?:cwd|working{_GAP}dir(?:ectory)?|(?:workspace|project|repository){_GAP}(?:root|path|dir(?:ectory)?|folder))"
)
_GIT = (
    rf"(?:(?:is{_GAP})?(?:this{_GAP})?(?:dir(?:ectory)?{_GAP})?(?:a{_GAP})?git{_GAP}repo(?:sitory)?"
    rf"|git{_GAP}(?:status|branch|user|commit|root)|branch|last{_GAP}commit)"
)
_ENVIRONMENT = re.compile(
    rf"{_LEADING}(?:{_FOLDER}|{_GIT})(?:\s*\([^)]*\))?\s*(?:[:=>]\s*\S|is\s+[\"'`]?(?:[/~]|[a-z]:\\))", re.IGNORECASE
)
"""The name, then a value; after `is` only a path."""
_LISTING = re.compile(rf"[^\w]*(?:(?:git{_GAP})?status|(?:recent|last|latest){_GAP}commits)\s*:\s*\Z", re.IGNORECASE)
_LISTED = re.compile(r"\s*(?:[MADRCUT?!]{1,2}\s+\S|[0-9a-f]{7,40}\s|\(clean\)|##\s)")
"""A line of `git status --short` or `git log --oneline`."""


def _tells_date(lines: list[str]) -> list[bool]:
    return [len(line) <= LONGEST_LINE and _DATE.match(line) is not None for line in lines]


def _tells_environment(lines: list[str]) -> list[bool]:
    """Lines with a name and a value; a heading such as `Recent commits:` with the lines of git that follow it."""
    taken = []
    listed = False  # a heading stands before, and only lines of git since
    for number, line in enumerate(lines):
        after = lines[number + 1] if number + 1 < len(lines) else ""
        short = len(line) <= LONGEST_LINE
        heading = short and _LISTING.match(line) is not None and _LISTED.match(after) is not None
        listed = heading or (listed and _LISTED.match(line) is not None)
        taken.append(listed or (short and _ENVIRONMENT.match(line) is not None))
    return taken


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "claude-billing-header",
            "Claude Code's first system block, a line for its maker's billing whose last digits change with the prompt",
            moves=False,
            takes=_is_billing_header,
        ),
        Rule(
            "dates-last",
            "lines of the system text that tell the date or the time",
            moves=True,
            takes=_tells_date,
        ),
        Rule(
            "environment-last",
            "lines of the system text that tell the working directory, the branch, git's status or recent commits",
            moves=True,
            takes=_tells_environment,
        ),
    )
}
