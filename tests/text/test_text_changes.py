"""Where two prompts differ, and what a rule or another order would have saved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.text.text_changes import AROUND, Advice, NewText, TextChanges, common_characters, one_line
from everwarm.types import Run

RULES = "\n".join(f"Rule {number}: do it well." for number in range(20))


def prompt(text: str) -> NewText:
    """A token for each character."""
    return NewText([Run(text, False, len(text))], len(text))


def changes(old: str, new: str, user: str | None = None) -> TextChanges:
    return TextChanges(old, prompt(new), None if user is None else new.index(user))


@given(st.text("ab\n", max_size=30), st.text("ab\n", max_size=30))
def test_common_characters_are_the_longest_common_beginning(one: str, other: str) -> None:
    at = common_characters(one, other)
    assert one[:at] == other[:at]
    assert one[at : at + 1] != other[at : at + 1] or at == min(len(one), len(other))


@given(st.lists(st.tuples(st.text(max_size=9), st.integers(0, 9)), max_size=6), st.integers(0, 40))
def test_tokens_of_parts_come_to_those_of_the_whole(runs: list[tuple[str, int]], most: int) -> None:
    new = NewText([Run(text, False, count) for text, count in runs], most)
    counts = [new.tokens(at, at + 1) for at in range(len(new.text))]
    assert sum(counts) == pytest.approx(new.tokens(0, len(new.text)))
    assert all(count >= -1e-9 for count in counts)
    assert sum(counts) <= min(most, sum(count for _, count in runs)) + 1e-6


def test_the_excerpt_shows_both_texts_and_where_they_part() -> None:
    found = changes("One line\nDate: 1\tx\nthe same", "One line\nDate: 2\tx\nthe same").excerpt()
    assert (found.character, found.line, found.column) == (15, 2, 15)
    assert (found.old, found.new) == ("One line↵Date: 1·x↵the same", "One line↵Date: 2·x↵the same")
    long = changes("a" * 100 + "b" * 100, "a" * 100 + "c" * 100).excerpt()
    assert long.new == "..." + "a" * AROUND + "c" * AROUND + "..."
    assert long.new[long.column] == "c"


@pytest.mark.parametrize(("old", "new"), [("abc", "abc"), ("abc", "abcd"), ("abcd", "abc"), ("", "x")])
def test_a_text_that_goes_on_does_not_differ(old: str, new: str) -> None:
    assert not changes(old, new).differ


def test_a_rule_saves_what_stands_between_the_lines_it_moves_and_the_user() -> None:
    text = "Help.\nDate: {}\n" + RULES + "\n<user>Hi"
    found = changes(text.format("2026-11-16"), text.format("2026-11-17"), user="<user>")
    assert found.differ
    assert found.advice() == Advice(("dates-last",), len(RULES) + 1)
    assert found.advice(["dates-last"]) is None
    assert found.same_tokens() == len(RULES) + 1 + len("<user>Hi")


def test_two_rules_are_advised_where_one_is_not_enough() -> None:
    text = "Help.\nDate: {}\nBe brief.\nWorking directory: /{}\n" + RULES + "\n<user>Hi"
    found = changes(text.format("2026-11-16", "ada"), text.format("2026-11-17", "bob"), user="<user>")
    assert found.advice() == Advice(("dates-last", "environment-last"), len("Be brief.\n" + RULES) + 1)
    one = changes(text.format("2026-11-16", "ada"), text.format("2026-11-17", "ada"), user="<user>")
    assert one.advice() == Advice(("dates-last",), len("Be brief.\nWorking directory: /ada\n" + RULES) + 1)


def test_nothing_is_saved_behind_a_change_that_no_rule_knows() -> None:
    text = "Help.\nDate: {}\nBe brief.\nNumber {}\n" + RULES
    found = changes(text.format("2026-11-16", 1), text.format("2026-11-17", 2))
    assert found.advice() == Advice(("dates-last",), len("Be brief.\n"))
    assert changes(f"Number 1\n{RULES}", f"Number 2\n{RULES}").advice() is None
    assert changes(f"Number 1\n{RULES}", f"Number 2\n{RULES}").same_tokens() == len(RULES)


def test_a_line_that_is_new_or_gone_counts_as_changed() -> None:
    with_, without = f"Help.\nDate: 2026-11-16\n{RULES}", f"Help.\n{RULES}"
    assert changes(without, with_).advice() == Advice(("dates-last",), len(RULES))
    assert changes(with_, without).advice() == Advice(("dates-last",), len(RULES))


def test_a_long_and_monotonous_text_is_compared_in_time() -> None:
    old, new = "x\n" * 20_000 + "a", "y\n" + "x\n" * 20_000 + "b"
    assert changes(old, new).same_tokens() >= 0


@given(st.text(max_size=50))
def test_an_excerpt_is_one_line_of_as_many_characters(text: str) -> None:
    assert len(one_line(text)) == len(text)
    assert one_line(text).isprintable()
