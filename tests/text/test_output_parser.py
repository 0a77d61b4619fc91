"""The seam between the text of an answer and its content, with a small parser."""

from hypothesis import given
from hypothesis import strategies as st

from everwarm.events import Answer, Content, Text
from everwarm.text.output_parser import OutputParser, PlainText
from output_parsers import ANSWER, CONTENT, TagParser, joined


def parse(parser: OutputParser, pieces: list[str]) -> list[Content]:
    content = [part for piece in pieces if piece for part in parser.feed(piece)]
    return joined([*content, *parser.finish()])


def test_by_default_everything_is_text() -> None:
    assert parse(PlainText(), ["<think>", "a", "</think>"]) == [Text("<think>a</think>")]


def test_a_parser_tells_reasoning_text_and_calls_apart() -> None:
    assert parse(TagParser(), [ANSWER]) == CONTENT


def test_where_the_text_is_cut_does_not_matter() -> None:
    for at in range(len(ANSWER)):
        assert parse(TagParser(), [ANSWER[:at], ANSWER[at:]]) == CONTENT
    assert parse(TagParser(), list(ANSWER)) == CONTENT


@given(st.text(alphabet="<>/ thinkcalx", max_size=60), st.integers(1, 7))
def test_pieces_of_any_size_give_the_same_content(text: str, size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(TagParser(), pieces) == parse(TagParser(), [text])


def test_what_only_looks_like_a_call_comes_back_as_text() -> None:
    for text in ("<call>name</call>", "<call>name", "a < b", "<thin", "</think>"):
        assert parse(TagParser(), list(text)) == [Text(text)]


def test_content_is_collected_into_a_message() -> None:
    answer = Answer()
    answer.add(CONTENT)
    assert answer.message() == {
        "role": "assistant",
        "content": "Let me see.  and ",
        "reasoning_content": "hm, ä?",
        "tool_calls": [
            {"id": "call-0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}},
            {"id": "call-1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }


def test_a_message_of_text_alone_has_nothing_else() -> None:
    answer = Answer()
    assert answer.message() == {"role": "assistant", "content": ""}
    answer.add([Text("a"), Text("b")])
    assert answer.message() == {"role": "assistant", "content": "ab"}
