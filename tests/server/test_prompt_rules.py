"""What is taken out of prompts, and which conversation a request belongs to."""

from typing import Any

import pytest

from everwarm.server.anthropic.session import session_of
from everwarm.server.prompt_rules import RULES, apply

HEADER = {"type": "text", "text": "x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=cli; cch=12345;"}
RULE = {"type": "text", "text": "You help with code."}


@pytest.mark.parametrize(
    ("system", "kept", "rules"),
    [
        (None, None, ()),
        ("x-anthropic-billing-header: 1", "x-anthropic-billing-header: 1", ()),
        ([HEADER, RULE], [RULE], ("billing-header",)),
        ([RULE, HEADER], [RULE], ("billing-header",)),
        ([HEADER], [], ("billing-header",)),
        ([RULE], [RULE], ()),
        ([{"type": "text", "text": HEADER["text"] + "\nAnd rules."}],) * 2 + ((),),
        ([{"type": "text", "text": "See x-anthropic-billing-header: 1"}],) * 2 + ((),),
        ([{"type": "image"}, 3],) * 2 + ((),),
    ],
)
def test_only_whole_blocks_that_a_rule_names_are_dropped(system: Any, kept: Any, rules: tuple[str, ...]) -> None:
    found = apply(system)
    assert (found.system, found.rules) == (kept, rules)
    assert apply(system, ()).system == system


def test_every_rule_says_why() -> None:
    assert all(rule.why and rule.name == name for name, rule in RULES.items())


@pytest.mark.parametrize(
    ("user_id", "group"),
    [
        (None, ""),
        ("", ""),
        ("ada", "ada"),
        ('{"device_id": "d", "account_uuid": "", "session_id": "0b5e-1"}', "0b5e-1"),
        ("user_5e884898_account__session_01234567-89ab-cdef-0123-456789abcdef", "01234567-89ab-cdef-0123-456789abcdef"),
        ('{"session_id": 3}', '{"session_id": 3}'),
        ("{not json", "{not json"),
        ("[" * 10_000, "[" * 256),
        ("{" * 10_000, "{" * 256),
    ],
)
def test_the_session_names_the_group(user_id: str | None, group: str) -> None:
    assert session_of(user_id) == group
