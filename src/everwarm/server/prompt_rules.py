"""Prompts that change for no reason: a few rules that take out what would make every prompt a new one.

Some programs put text at the very beginning of a prompt that differs from request to request and means nothing to a
model. Nothing behind it can be reused then. Each rule says what it takes out and why; those in `DEFAULT` are applied.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is taken out of the blocks of a system prompt."""

    name: str
    pattern: re.Pattern[str]  # a block that matches from its beginning is dropped
    why: str


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "billing-header",
            re.compile(r"\s*x-anthropic-billing-header:[^\n]*\s*\Z"),
            "Claude Code's first block is a line for its maker's billing, whose last digits change with the prompt",
        ),
    )
}
DEFAULT = ("billing-header",)


@dataclass(frozen=True, slots=True)
class Applied:
    """A system prompt after the rules, and which of them have changed it."""

    system: str | list[Json] | None
    rules: tuple[str, ...] = ()


def apply(system: str | list[Json] | None, names: Sequence[str] = DEFAULT) -> Applied:
    """Drop whole blocks that a rule names. A system prompt that is one text is left as it is: it has no blocks."""
    if not isinstance(system, list):
        return Applied(system)
    applied: list[str] = []
    kept = []
    for block in system:
        text = block.get("text") if isinstance(block, dict) else None
        rule = next((name for name in names if isinstance(text, str) and RULES[name].pattern.match(text)), None)
        if rule is None:
            kept.append(block)
        elif rule not in applied:
            applied.append(rule)
    return Applied(kept, tuple(applied))
