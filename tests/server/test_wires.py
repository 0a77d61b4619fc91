"""How each API writes typed events: the events themselves, and what the official clients make of them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import Running, running

from everwarm.events import (
    Content,
    End,
    Event,
    FinishReason,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from everwarm.kv.receipt import Receipt
from everwarm.server.anthropic.wire import MessageWire
from everwarm.server.app import create_app
from everwarm.server.openai.wire import ChatWire, TextWire
from everwarm.server.serving import Serving
from everwarm.server.wire import ServerEvents, Wire
from output_parsers import ANSWER, Says, TagParser
from tiny import Tiny

Json = dict[str, Any]

USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=9, reasoning_tokens=2)
RECEIPT = {"tier": "hot"}

CALL: list[Content] = [
    Reasoning("Let me "),
    Reasoning("think."),
    Text("I will "),
    Text("add."),
    ToolCallStart(0, "call-0", "add"),
    ToolCallArguments(0, '{"a": '),
    ToolCallArguments(0, "1}"),
    ToolCallEnd(0),
    ToolCallStart(1, "call-1", "now"),
    ToolCallEnd(1),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("wires")
    Tiny(context=512).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


@pytest.fixture(scope="module")
def serving(server: Running) -> Iterator[Serving]:
    serving: Serving = create_app(server.llm, "tiny").state.serving
    yield serving
    serving.close()


def answer(
    content: Iterable[Content], finish: FinishReason, stop: str | None = None, choice: int = 0
) -> list[Event | End]:
    """An event for each piece of content, a token without content, and the end."""
    events: list[Event | End] = [Event(65, -1.0, (), (part,), choice=choice) for part in content]
    events.append(Event(258, -1.0, (), (), finish, stop, choice))
    return [*events, End(Receipt(""), finish, Usage(7, 3, len(events), 2), stop, choice=choice)]


def streamed(wire: Wire, events: Sequence[Event | End]) -> ServerEvents:
    middle = [written for event in events for written in wire.add(event)]
    return [*wire.begin(USAGE), *middle, *wire.end(USAGE, RECEIPT)]


def whole(wire: Wire, events: Sequence[Event | End]) -> Json:
    for event in events:
        wire.add(event)
    return wire.whole(USAGE, RECEIPT)


def deltas(events: ServerEvents, choice: int = 0) -> list[tuple[Json, str | None]]:
    """Of OpenAI's chunks: deltas and finish reasons of one choice."""
    chunks = [event.data for event in events if isinstance(event.data, dict)]
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
    return [(part["delta"], part["finish_reason"]) for part in parts]


# OpenAI ---------------------------------------------------------------------------------------------------------------


def test_openai_streams_reasoning_text_and_calls_as_deltas(serving: Serving) -> None:
    events = streamed(ChatWire(serving, 1, logprobs=False, usage=False), answer(CALL, "tool_calls"))
    first, second = {"name": "add", "arguments": ""}, {"name": "now", "arguments": ""}
    assert deltas(events) == [
        ({"role": "assistant", "content": ""}, None),
        ({"reasoning_content": "Let me "}, None),
        ({"reasoning_content": "think."}, None),
        ({"content": "I will "}, None),
        ({"content": "add."}, None),
        ({"tool_calls": [{"index": 0, "id": "call-0", "type": "function", "function": first}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, None),
        ({"tool_calls": [{"index": 1, "id": "call-1", "type": "function", "function": second}]}, None),
        ({}, "tool_calls"),
    ]
    assert events[-1].data == "[DONE]"
    assert events[-2].data["everwarm"] == RECEIPT  # type: ignore[index]


def test_openai_writes_the_whole_message(serving: Serving) -> None:
    body = whole(ChatWire(serving, 1, logprobs=False, usage=False), answer(CALL, "tool_calls"))
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I will add.")
    assert choice["message"]["reasoning_content"] == "Let me think."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "now", "arguments": ""},
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert body["everwarm"] == RECEIPT


def test_openai_writes_no_content_where_there_are_only_calls(serving: Serving) -> None:
    wire = ChatWire(serving, 1, logprobs=False, usage=False)
    assert whole(wire, answer(CALL[4:], "tool_calls"))["choices"][0]["message"]["content"] is None


def test_openai_keeps_the_choices_of_a_request_apart(serving: Serving) -> None:
    one, two = answer(CALL, "tool_calls"), answer([Text("a"), Text("b")], "length", choice=1)
    mixed = [event for pair in zip(one, two, strict=False) for event in pair] + one[len(two) :]
    events = streamed(ChatWire(serving, 2, logprobs=False, usage=True), mixed)
    alone = streamed(ChatWire(serving, 1, logprobs=False, usage=True), one)
    assert deltas(events) == deltas(alone)
    said = [delta.get("content", "") for delta, _ in deltas(events, 1)]
    assert ("".join(said), deltas(events, 1)[-1]) == ("ab", ({}, "length"))
    assert events[-2].data["usage"]["completion_tokens"] == 9  # type: ignore[index]


def test_openai_tells_logprobs_once_for_an_event_with_much_content(serving: Serving) -> None:
    event = Event(65, -1.0, ((65, -1.0),), tuple(CALL[3:6]))
    written = ChatWire(serving, 1, logprobs=True, usage=False).add(event)
    found = [part["logprobs"] for one in written for part in one.data["choices"]]  # type: ignore[index]
    assert [entry and [token["token"] for token in entry["content"]] for entry in found] == [["A"], None, None]


def test_plain_completions_have_text_only(serving: Serving) -> None:
    wire = TextWire(serving, 1, logprobs=False, usage=False, prompt_chars=[0])
    assert whole(wire, answer([Text("a"), Text("b")], "stop"))["choices"][0]["text"] == "ab"


# Anthropic ------------------------------------------------------------------------------------------------------------


def kinds(events: ServerEvents) -> list[Json]:
    """What Anthropic's events hold, without the frame of the message."""
    found: list[Json] = []
    for event in events:
        assert isinstance(event.data, dict)
        assert event.data["type"] == event.name
        if event.name and event.name.startswith("content_block"):
            found.append({key: value for key, value in event.data.items() if key != "type"})
    return found


def test_anthropic_streams_content_as_blocks() -> None:
    events = streamed(MessageWire("tiny", 100, kept=True), answer(CALL, "tool_calls"))
    assert kinds(events) == [
        {"index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"index": 0, "delta": {"type": "thinking_delta", "thinking": "Let me "}},
        {"index": 0, "delta": {"type": "thinking_delta", "thinking": "think."}},
        {"index": 0},
        {"index": 1, "content_block": {"type": "text", "text": ""}},
        {"index": 1, "delta": {"type": "text_delta", "text": "I will "}},
        {"index": 1, "delta": {"type": "text_delta", "text": "add."}},
        {"index": 1},
        {"index": 2, "content_block": {"type": "tool_use", "id": "call-0", "name": "add", "input": {}}},
        {"index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
        {"index": 2, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"index": 2},
        {"index": 3, "content_block": {"type": "tool_use", "id": "call-1", "name": "now", "input": {}}},
        {"index": 3},
    ]
    names = [event.name for event in events]
    assert (names[:3], names[-2:]) == (
        ["message_start", "content_block_start", "ping"],
        ["message_delta", "message_stop"],
    )
    assert events[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}  # type: ignore[index]
    assert events[-2].data["everwarm"] == RECEIPT  # type: ignore[index]


def test_anthropic_writes_the_whole_message() -> None:
    body = whole(MessageWire("tiny", 100, kept=True), answer(CALL, "tool_calls"))
    assert body["content"] == [
        {"type": "thinking", "thinking": "Let me think.", "signature": ""},
        {"type": "text", "text": "I will add."},
        {"type": "tool_use", "id": "call-0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call-1", "name": "now", "input": {}},
    ]
    assert body["stop_reason"] == "tool_use"
    assert body["usage"] == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 4,
        "cache_read_input_tokens": 3,
        "output_tokens": 9,
    }


def test_anthropic_keeps_the_arguments_of_a_call_that_was_cut_off() -> None:
    body = whole(MessageWire("tiny", 4, kept=True), answer(CALL[4:6], "length"))
    assert body["content"][0]["input"] == {"INVALID_JSON": '{"a": '}
    assert body["stop_reason"] == "model_context_window_exceeded"  # fewer tokens than max_tokens


@pytest.mark.parametrize(
    ("finish", "stop", "max_tokens", "reason"),
    [
        ("stop", None, 9, "end_turn"),
        ("stop", "END", 9, "stop_sequence"),
        ("length", None, 2, "max_tokens"),
        ("length", None, 9, "model_context_window_exceeded"),
        ("tool_calls", None, 9, "tool_use"),
    ],
)
def test_anthropic_says_why_it_stopped(finish: FinishReason, stop: str | None, max_tokens: int, reason: str) -> None:
    body = whole(MessageWire("tiny", max_tokens, kept=False), answer([Text("a")], finish, stop))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)


def test_an_answer_without_content_has_no_block() -> None:
    assert kinds(streamed(MessageWire("tiny", 9, kept=True), answer([], "stop"))) == []
    assert whole(MessageWire("tiny", 9, kept=True), answer([], "stop"))["content"] == []


# The official clients -------------------------------------------------------------------------------------------------


@pytest.fixture
def speaking(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The model says `ANSWER`, and a parser reads it."""
    llm = server.llm
    ids = [*llm.tokenize(ANSWER), 258]
    constraint = partial(Says, ids, llm.config.vocab_size)
    monkeypatch.setattr(llm, "start", partial(llm.start, constraint=constraint, parser=TagParser))
    return server


HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("n", [1, 2])
def test_openais_client_reads_calls_from_a_real_server(speaking: Running, n: int) -> None:
    with OpenAI(base_url=speaking.url + "/v1", api_key="any", max_retries=0) as client:
        found = client.chat.completions.create(model="tiny", messages=HI, max_tokens=200, n=n)
        with client.chat.completions.stream(model="tiny", messages=HI, max_tokens=200, n=n) as stream:
            final = stream.get_final_completion()
    for choice in (*found.choices, *final.choices):
        assert (choice.message.content, choice.finish_reason) == ("Let me see.  and ", "tool_calls")
        calls = [(call.id, call.function) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
        read = [(id_, function.name, json.loads(function.arguments)) for id_, function in calls]
        assert read == [("call-0", "add", {"a": 1, "b": [2]}), ("call-1", "now", {})]
    for choice in found.choices:
        assert choice.message.model_extra["reasoning_content"] == "hm, ä?"  # type: ignore[index]
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    assert found.usage.completion_tokens_details.reasoning_tokens == len("hm, ä?</think>".encode()) * n


def test_anthropics_client_reads_blocks_from_a_real_server(speaking: Running) -> None:
    with Anthropic(base_url=speaking.url, api_key="any", max_retries=0) as client:
        found = client.messages.create(model="tiny", messages=HI, max_tokens=200)
        with client.messages.stream(model="tiny", messages=HI, max_tokens=200) as stream:
            final = stream.get_final_message()
    for message in (found, final):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "text", "tool_use"]
        assert message.content[0].thinking == "hm, ä?"  # type: ignore[union-attr]
        assert message.content[2].input == {"a": 1, "b": [2]}  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"
