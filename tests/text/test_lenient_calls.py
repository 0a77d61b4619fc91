"""Answers that are one JSON object as a whole: calls, if they name an offered tool. Anything else is text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_call_answers import TOOLS, parser

from everwarm.events import Content, Text, ToolCallArguments, ToolCallStart
from everwarm.text.tool_calls.lenient import Lenient, WholeObject
from output_parsers import joined

BARE = '{"name": "add", "arguments": {"a": 1, "s": "}```"}}'


def lenient() -> Lenient:
    numbers = iter(range(100))
    return Lenient(parser("hermes"), WholeObject("lenient", TOOLS, frozenset(), lambda: f"call-{next(numbers)}"))


def read(pieces: list[str]) -> list[Content]:
    reader = lenient()
    content = [part for piece in pieces if piece for part in reader.feed(piece)]
    return joined([*content, *reader.finish()])


@pytest.mark.parametrize(
    "answer",
    [
        BARE,
        f"\n {BARE}\n",
        f"```json\n{BARE}\n```",
        f"```\n{BARE}\n```\n",
        '{"tool": "add", "parameters": {"a": 1, "s": "}```"}}',
        '{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "s": "}```"}}}',
        '{"function": "add", "args": {"a": 1, "s": "}```"}}',
        '{"arguments": {"a": 1, "s": "}```"}, "name": "add"}',
    ],
)
def test_an_object_that_names_an_offered_tool_is_a_call(answer: str) -> None:
    for pieces in ([answer], list(answer)):
        start, arguments, _ = read(pieces)
        assert isinstance(start, ToolCallStart)
        assert (start.name, start.format) == ("add", "lenient")
        assert isinstance(arguments, ToolCallArguments)
        assert json.loads(arguments.text) == {"a": 1, "s": "}```"}


@pytest.mark.parametrize(
    "answer",
    [
        f"Call this: {BARE}",  # quoted
        f"{BARE}\nThat is how to do it.",
        f"```json\n{BARE}\n```\nRun it.",
        f"> {BARE}",
        f"`{BARE}`",
        f"{BARE}{BARE}",
        f"[{BARE}]",
        '{"name": "gone", "arguments": {}}',  # no such tool
        '{"name": "add"}',  # no arguments: an answer in JSON may look like this
        '{"name": "add", "arguments": {}, "price": 5}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1}',  # cut off
        '{"city": "Zürich"}',
        "```python\nadd(1)\n```",
        "{",
        "```",
        "",
    ],
)
def test_anything_else_is_text_to_the_last_character(answer: str) -> None:
    for pieces in ([answer], list(answer)):
        assert "".join(part.text for part in read(pieces) if isinstance(part, Text)) == answer


def test_text_is_not_held_back() -> None:
    for answer in ('{"city": "', '{"name": "gone", "', "Hello", "```python\n"):
        assert "".join(part.text for part in lenient().feed(answer) if isinstance(part, Text)) == answer.rstrip()


def test_the_format_of_the_model_is_read_as_before() -> None:
    start = read([f"Well. <tool_call>{BARE}</tool_call>"])[1]
    assert isinstance(start, ToolCallStart)
    assert start.format == "hermes"


def test_llamas_own_objects_come_as_they_are_written() -> None:
    reader = Lenient(parser("llama3"), WholeObject("lenient", TOOLS, frozenset(), lambda: "call"), fenced_only=True)
    content = [part for character in BARE for part in reader.feed(character)]
    assert isinstance(content[0], ToolCallStart)
    assert content[0].format == "llama3"


@given(st.text(alphabet='{}[]":, `\njsonamedrgut', max_size=60), st.integers(1, 7))
def test_nothing_is_lost_wherever_it_is_cut(written: str, size: int) -> None:
    content = read([written])
    assert content == read([written[at : at + size] for at in range(0, len(written), size)])
    if all(isinstance(part, Text) for part in content):
        assert "".join(part.text for part in content if isinstance(part, Text)) == written
