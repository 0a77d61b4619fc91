"""What rules take out of prompts, and where they put it."""

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.settings import Settings
from everwarm.text.prompt_rules import LONGEST_LINE, RULES, apply

ALL = tuple(RULES)
HEADER = "x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=cli; cch=12345;"
HELP = "You help with code."
ASK = {"role": "user", "content": "Hi"}


def system(*blocks: str) -> dict[str, Any]:
    content = blocks[0] if len(blocks) == 1 else [{"type": "text", "text": block} for block in blocks]
    return {"role": "system", "content": content}


@pytest.mark.parametrize(
    ("messages", "expected", "applied"),
    [
        ([ASK], [ASK], False),
        ([system(HEADER), ASK], [ASK], True),
        ([system(HEADER, HELP), ASK], [system(HELP), ASK], True),
        ([system(HELP, HEADER + "\n"), ASK], [system(HELP), ASK], True),
        ([system(HELP, HEADER, "Be brief."), ASK], [system(HELP, "Be brief."), ASK], True),
        ([system(HEADER + "\nAnd rules."), ASK], None, False),
        ([system("See " + HEADER), ASK], None, False),
        ([ASK, system(HEADER)], None, False),
        ([{"role": "user", "content": HEADER}], None, False),
        ([{"role": "system", "content": [{"type": "image"}, 3]}, 7, None], None, False),
    ],
)
def test_a_billing_line_is_dropped_where_it_is_a_whole_block_of_the_system_text(
    messages: list[Any], expected: list[Any] | None, applied: bool
) -> None:
    before = copy.deepcopy(messages)
    found = apply(messages, ("claude-billing-header",))
    assert list(found.messages) == (before if expected is None else expected)
    assert found.rules == (("claude-billing-header",) if applied else ())
    assert messages == before
    assert apply(messages, ()).messages is messages


@pytest.mark.parametrize(
    ("rule", "line", "moved"),
    [
        ("dates-last", "Today's date: 2026-11-16", True),
        ("dates-last", "  - Today is Monday, 16 November 2026.", True),
        ("dates-last", "The current time is 09:30.", True),
        ("dates-last", "Current date and time: 16/11/2026, 9:30", True),
        ("dates-last", "<current_date>2026-11-16</current_date>", True),
        ("dates-last", "Date: Nov 16th, 2026", True),
        ("dates-last", "timestamp: 1763283600", True),
        ("dates-last", "Knowledge cutoff: 2024-06-01", False),
        ("dates-last", "Write a date as 2024-01-31.", False),
        ("dates-last", "Time limit: 10 minutes", False),
        ("dates-last", "Date: 2026-11-16 " + "x" * LONGEST_LINE, False),
        ("environment-last", "Working directory: /home/ada/project", True),
        ("environment-last", "<cwd>/home/ada</cwd>", True),
        ("environment-last", "Your current working directory is /home/ada", True),
        ("environment-last", "Is this directory a git repo: Yes", True),
        ("environment-last", "Current branch: main", True),
        ("environment-last", "gitStatus: as it was when the session began", True),
        ("environment-last", "Keep the working directory clean.", False),
        ("environment-last", "The working directory is where you work.", False),
        ("environment-last", "Use git status: it shows what has changed.", False),
        ("environment-last", "Status:", False),
    ],
)
def test_lines_that_tell_what_a_rule_names_are_moved(rule: str, line: str, moved: bool) -> None:
    found = apply([system(f"{HELP}\n{line}\nBe brief."), ASK], (rule,))
    if moved:
        assert list(found.messages) == [system(f"{HELP}\nBe brief."), {"role": "user", "content": f"{line}\n\nHi"}]
    else:
        assert list(found.messages) == [system(f"{HELP}\n{line}\nBe brief."), ASK]
    assert found.rules == ((rule,) if moved else ())


def test_a_listing_of_git_moves_with_its_heading() -> None:
    listed = "Status:\n M a.py\n?? b.txt"
    commits = "Recent commits:\n0a1b2c3 fix it\n4d5e6f7 begin"
    found = apply([system(f"{HELP}\n{listed}\n\n{commits}\nBe brief."), ASK], ("environment-last",))
    opened = {"role": "user", "content": f"{listed}\n{commits}\n\nHi"}
    assert list(found.messages) == [system(f"{HELP}\n\nBe brief."), opened]


def test_moved_lines_open_the_first_message_of_the_user_also_if_it_has_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    answer = {"role": "assistant", "content": "Hello"}
    found = apply([system(HELP), system("Date: 2026-11-16"), parts, answer, ASK], ALL)
    opened = {"role": "user", "content": [{"type": "text", "text": "Date: 2026-11-16\n\n"}, *parts["content"]]}
    assert list(found.messages) == [system(HELP), opened, answer, ASK]
    assert found.rules == ("dates-last",)


def test_nothing_is_moved_where_no_message_of_the_user_can_take_it() -> None:
    date = system("Date: 2026-11-16")
    for messages in ([date], [date, {"role": "user", "content": None}], [date, {"role": "user"}]):
        assert apply(messages, ALL).messages is messages


@given(st.lists(st.sampled_from([HELP, HEADER, "Date: 2026-11-16", "cwd: /x", "Status:", " M a", "", "x" * 400])))
def test_no_line_is_lost_but_billing_lines(lines: list[str]) -> None:
    messages = [system("\n".join(lines)), ASK]
    found = apply(messages, ALL)
    said = "\n".join(message["content"] for message in found.messages).split("\n")
    kept = sorted(line for line in said if line.strip() and line != "Hi")
    dropped = [line for line in lines if line.strip()] == [HEADER]
    assert kept == ([] if dropped else sorted(line for line in lines if line.strip()))


def test_the_setting_knows_every_rule_and_every_rule_says_why() -> None:
    (rule,) = {one.name: one for one in dataclasses.fields(Settings)}["prompt_rules"].metadata.values()
    assert rule.choices == ("none", *RULES)
    assert all(rule.why and rule.name == name for name, rule in RULES.items())
    assert rule.parse("dates-last, claude-billing-header") == ("dates-last", "claude-billing-header")
    assert rule.parse(["none"]) == ()
    for wrong in ("", "all", "none dates-last", 3, [3]):
        with pytest.raises(ValueError, match="expected"):
            rule.parse(wrong)
