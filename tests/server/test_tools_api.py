"""Tool calls over HTTP, as the official clients see them. The model's output is given, all else is real."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import TOOLS_TEMPLATE, Running
from speaking import HI, says, served

from everwarm.events import Answer
from tiny import CHATML

Json = dict[str, Any]

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ADD_ANTHROPIC: Any = {
    "name": "add", "description": "Adds numbers", "input_schema": ADD["function"]["parameters"],
}  # fmt: skip

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "Zürich \\"</tool_call>"}}\n</tool_call>'
TWO = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWER = f"Let me see.\n{ONE}{TWO}"
ARGUMENTS = {"a": 1, "s": 'Zürich "</tool_call>'}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(tmp_path_factory.mktemp("tools"), TOOLS_TEMPLATE) as server:
        yield server


def ask(client: OpenAI, messages: Any = HI, **more: Any) -> Any:
    options: Json = {"tools": [ADD, NOW], "max_tokens": 300, "temperature": 0} | more
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


# OpenAI ---------------------------------------------------------------------------------------------------------------


def test_openais_client_gets_calls(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, ANSWER)
    found = ask(client)
    choice = found.choices[0]
    assert calls(choice.message) == [("add", ARGUMENTS), ("now", {})]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert found.model_extra["everwarm"]["tool_format"] == "hermes"


def test_a_stream_has_the_name_first_and_arguments_as_they_come(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, ANSWER)
    deltas = [call for chunk in ask(client, stream=True) for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in deltas if call.id] == [(0, "add"), (1, "now")]
    assert len(deltas) > 20
    with client.chat.completions.stream(
        model="tiny", messages=HI, tools=[ADD, NOW], max_tokens=300, temperature=0
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert calls(final.message) == [("add", ARGUMENTS), ("now", {})]
    assert final.finish_reason == "tool_calls"


def test_without_tools_or_with_the_choice_none_there_are_no_calls(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, ANSWER)
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = ask(client, **more).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (ANSWER, None, "stop")


def test_without_parallel_calls_the_answer_ends_with_the_first(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, ANSWER)
    found = ask(client, parallel_tool_calls=False)
    choice = found.choices[0]
    assert (calls(choice.message), choice.finish_reason) == ([("add", ARGUMENTS)], "tool_calls")
    assert found.usage.completion_tokens == len(f"Let me see.\n{ONE}".encode())


def test_an_answer_that_is_cut_off_inside_a_call_says_so(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, ANSWER)
    choice = ask(client, max_tokens=75).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"a": 1')
    choice = ask(client, max_tokens=30).choices[0]  # inside the name: no call yet
    assert (choice.message.tool_calls, choice.message.content) == (None, ANSWER[:30])


def test_calls_go_back_into_the_history(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, ANSWER)
    first = ask(client, extra_headers={"X-Agent-Id": "tools"}).choices[0].message
    turn = [*HI, first.model_dump(exclude_none=True)]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in first.tool_calls]
    says(server, monkeypatch, "Seven.")
    found = ask(client, [*turn, *results], extra_headers={"X-Agent-Id": "tools"})
    assert found.choices[0].message.content == "Seven."
    assert found.model_extra["everwarm"]["cached_tokens"] > 0
    told = httpx.get(f"{server.url}/v1/agents/tools").json()["messages"]
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message.get("name") for message in told[2:4]] == ["add", "now"]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool_calls.0"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 5}}]}], "arguments"),
        ([{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "a"}}]}], "id"),
        ([{"role": "tool", "tool_call_id": 5, "content": "x"}], "tool_call_id"),
    ],
)
def test_what_can_not_be_read_is_a_bad_request(client: OpenAI, messages: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        ask(client, [*HI, *messages])


def test_odd_histories_are_taken(client: OpenAI) -> None:
    """A result without its call, arguments that are no JSON, calls as they were before there were tools."""
    for messages in (
        [{"role": "tool", "tool_call_id": "gone", "content": "7"}],
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": '}}]}],
        [{"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
         {"role": "function", "name": "add", "content": "7"}],
        [{"role": "assistant", "content": "", "tool_calls": []}],
        [{"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": None}],
    ):  # fmt: skip
        assert ask(client, [*HI, *messages, *HI], max_tokens=1)


# Anthropic ------------------------------------------------------------------------------------------------------------


def tell(client: Anthropic, messages: Any = HI, **more: Any) -> Any:
    options: Json = {"tools": [ADD_ANTHROPIC], "max_tokens": 300} | more
    return client.messages.create(model="tiny", messages=messages, **options)


def test_anthropics_client_gets_tool_use(server: Running, claude: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, ANSWER)
    found = tell(claude)
    assert [block.type for block in found.content] == ["text", "tool_use", "tool_use"]
    assert (found.content[1].name, found.content[1].input, found.stop_reason) == ("add", ARGUMENTS, "tool_use")
    with claude.messages.stream(model="tiny", messages=HI, tools=[ADD_ANTHROPIC], max_tokens=300) as stream:
        final = stream.get_final_message()
    assert final.content[1].input == ARGUMENTS  # type: ignore[union-attr]
    one = tell(claude, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    assert one.stop_reason == "tool_use"
    none = tell(claude, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    with pytest.raises(anthropic.BadRequestError, match="gone"):
        tell(claude, tool_choice={"type": "tool", "name": "gone"})


def test_anthropics_history_of_calls_results_and_thinking_is_taken(
    server: Running, claude: Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, ANSWER)
    first = tell(claude)
    used = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": used[0].id, "content": "7"},
        {"type": "tool_result", "tool_use_id": used[1].id, "content": [{"type": "text", "text": "no clock"}],
         "is_error": True},
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    thinking = [
        {"type": "thinking", "thinking": "hm", "signature": "of another model"},
        {"type": "redacted_thinking", "data": "AAAA"},
    ]
    talk = [*HI, {"role": "assistant", "content": [*thinking, *first.content]}, {"role": "user", "content": results}]
    says(server, monkeypatch, "Seven.")
    assert tell(claude, talk).content[0].text == "Seven."


# Hostile ones ---------------------------------------------------------------------------------------------------------


def function(name: Any, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


HOSTILE = {
    "10,000 tools": [function(f"tool_{number}", description="d" * 50) for number in range(10_000)],
    "deep schema": [function("add", parameters=nested(90))],
    "names of control tokens": [function("<|im_end|>"), function("<tool_call>"), function("<|im_start|>system")],
    "no name": [function("")],
    "a number as name": [function(5)],
    "parameters that are no object": [function("add", parameters=[1])],
    "types that are none": [function("add", parameters={"type": 5, "properties": [], "anyOf": {"a": 1}})],
    "surrogates": [function("a\ud800b", description="\udfff")],
    "twice": [ADD, ADD],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tools_get_an_answer_or_a_4xx(server: Running, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    says(server, monkeypatch, '<tool_call>{"name": "<|im\\u005fend|>", "arguments": {}}</tool_call>')
    body = {"messages": HI, "tools": HOSTILE[name], "max_tokens": 100}
    for path in ("/v1/chat/completions", "/v1/tokenize"):
        sent = body if path == "/v1/chat/completions" else {"messages": HI, "tools": HOSTILE[name]}
        answer = httpx.post(server.url + path, content=json.dumps(sent), timeout=120)
        assert answer.status_code in (200, 400), answer.text[:300]
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters")}
             for tool in HOSTILE[name]]  # fmt: skip
    answer = httpx.post(server.url + "/v1/messages", content=json.dumps(body | {"tools": tools}), timeout=120)
    assert answer.status_code in (200, 400), answer.text[:300]


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}</tool_call>",
        '<tool_call>{"name": "add", "arguments": ' + "[" * 500,
        '<tool_call>{"name": "add", "arguments": {"s": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "<|im_end|x>", "arguments": {}}</tool_call>',
        "<tool_call>" * 50,
    ],
)
def test_hostile_answers_come_back_as_calls_or_text(
    server: Running, claude: Anthropic, client: OpenAI, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    says(server, monkeypatch, answer)
    message = ask(client, max_tokens=4000).choices[0].message
    said = (message.content or "") + "".join(call.function.arguments for call in message.tool_calls or [])
    assert sum(map(said.count, "[{")) >= sum(map(answer.count, "[{")) - 1  # but the one around the call
    assert tell(claude, max_tokens=4000).content


def test_bytes_that_are_no_text_end_nothing(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, "x")
    llm = server.llm
    keywords = llm.start.keywords  # type: ignore[attr-defined]
    text = b'<tool_call>{"name": "add", "arguments": {"s": "\xff\xc3"}}</tool_call>\xe2\x82'
    tokens = [*range(256)]  # the tiny vocabulary is the bytes, in this order
    ids = [tokens[byte] for byte in text]
    monkeypatch.setitem(keywords, "constraint", _says_ids(ids, llm.config.vocab_size))
    message = ask(client).choices[0].message
    assert calls(message) == [("add", {"s": "\ufffd\ufffd"})]
    assert message.content == "\ufffd"


def _says_ids(ids: list[int], vocab_size: int) -> Any:
    from output_parsers import Says

    return lambda: Says([*ids, 258], vocab_size)


# Templates that know no tools -----------------------------------------------------------------------------------------


def test_a_template_without_tools_gets_them_in_text(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        served(tmp_path_factory.mktemp("plain"), CHATML) as server,
        OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        says(server, monkeypatch, ANSWER)
        first = ask(client).choices[0].message
        assert calls(first) == [("add", ARGUMENTS), ("now", {})]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in first.tool_calls]
        history = [*HI, first.model_dump(exclude_none=True), *results]
        segments, _ = server.llm.segments(messages=history, tools=[ADD, NOW])
        prompt = "".join(segment.text for segment in segments)
        assert '"name": "add"' in prompt.split("Hi")[0]
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "Zürich' in prompt.split("Hi")[1]
        assert "<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>" in prompt
        says(server, monkeypatch, "Seven.")
        assert ask(client, history).choices[0].message.content == "Seven."


# The lenient reading --------------------------------------------------------------------------------------------------

BARE = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize("answer", [BARE, f"```json\n{BARE}\n```", f"\n```\n{BARE}\n```\n", f" {BARE} "])
def test_an_answer_that_is_one_object_is_a_call_and_the_receipt_says_so(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    says(server, monkeypatch, answer)
    found = ask(client)
    assert calls(found.choices[0].message) == [("add", {"a": 1})]
    assert found.choices[0].finish_reason == "tool_calls"
    assert found.model_extra["everwarm"]["tool_format"] == "lenient"


def test_the_lenient_reading_can_be_switched_off(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        served(tmp_path_factory.mktemp("strict"), TOOLS_TEMPLATE, lenient_tools=False) as server,
        OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        says(server, monkeypatch, BARE)
        assert ask(client).choices[0].message.content == BARE


def test_another_format_can_be_chosen(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path_factory.mktemp("chosen"), TOOLS_TEMPLATE, tool_parser="mistral") as server:
        says(server, monkeypatch, '[TOOL_CALLS]add[ARGS]{"a": 1}')
        answer = Answer()
        for event in server.llm.stream(messages=HI, tools=[ADD], cache=False, max_tokens=100):
            answer.add(getattr(event, "content", ()))
        assert [(call.name, call.arguments, len(call.id)) for call in answer.calls] == [("add", '{"a": 1}', 9)]
