"""Calls that are required or strict, in every format; and JSON that was asked for beside tools."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest
from running import TOOLS_TEMPLATE, Running, running

import everwarm
from everwarm.events import Answer
from everwarm.server.request import check_choice
from everwarm.structured.calls import grammar_for_calls
from everwarm.text.tool_calls.choice import ToolChoice
from everwarm.text.tool_calls.formats import FORMATS
from everwarm.text.tool_calls.parsers import PARSERS, call_parser
from tiny import Tiny

PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "layers": {"type": "integer", "minimum": 1, "maximum": 9},
        "dry": {"type": "boolean"},
        "spots": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["colour", "layers"],
    "additionalProperties": False,
}
SCHEMAS = {"paint": PAINT, "wait": {"type": "object", "properties": {}, "additionalProperties": False}}
NO_BLANKS = dict.fromkeys(b" \t\r\n", -50.0)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("forced")
    Tiny(context=1024, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.arguments != "gemma"])
def test_every_format_can_be_forced_and_is_read(server: Running, name: str) -> None:
    llm, controls = server.llm, server.llm.tokenizer.special_tokens
    for seed in range(4):
        made = grammar_for_calls(FORMATS[name], SCHEMAS, parallel=False, controls=controls)
        parser = partial(call_parser, name, SCHEMAS, frozenset(controls))
        answer, finish = Answer(), ""
        for event in llm.stream(
            "x", constraint=llm.grammars.constraint(made), parser=parser, temperature=1.0,
            seed=seed, max_tokens=600, logit_bias=NO_BLANKS, cache=False,
        ):  # fmt: skip
            if isinstance(event, everwarm.Event):
                answer.add(event.content)
            else:
                finish = event.finish_reason
        assert finish == "tool_calls"
        assert not answer.text.strip()
        check([(call.name, call.arguments) for call in answer.calls])


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.arguments == "gemma"])
def test_formats_with_a_notation_of_their_own_name_an_offered_tool(server: Running, name: str) -> None:
    controls = server.llm.tokenizer.special_tokens
    made = grammar_for_calls(FORMATS[name], {"wait": {}}, parallel=False, controls=controls)
    text = server.llm.generate("x", constraint=server.llm.grammars.constraint(made), max_tokens=90, cache=False).text
    parser = call_parser(name, SCHEMAS, frozenset())
    answer = Answer()
    answer.add([*parser.feed(text), *parser.finish()])
    assert [(call.name, call.arguments) for call in answer.calls] == [("wait", "{}")]


def post(server: Running, **body: Any) -> httpx.Response:
    given = {"messages": HI, "tools": TOOLS, "max_tokens": 300, "seed": 1} | body
    return httpx.post(server.url + "/v1/chat/completions", json=given, timeout=60)


def test_json_or_a_call_where_both_may_be(server: Running) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "the answer"}}}
    for seed in range(6):
        answer = post(server, response_format=format_, seed=seed).json()["choices"][0]
        if answer["finish_reason"] == "tool_calls":
            check([(one["function"]["name"], one["function"]["arguments"]) for one in answer["message"]["tool_calls"]])
        elif answer["finish_reason"] == "stop":
            assert json.loads(answer["message"]["content"]) == "the answer"


def test_a_schema_that_is_not_supported_is_refused_only_for_a_strict_tool(server: Running) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 1}}}
    tool: Any = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    assert post(server, tools=[tool], tool_choice="required").status_code == 200
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}
    for choice in ("auto", "required"):
        refused = post(server, tools=[strict], tool_choice=choice)
        assert refused.status_code == 400
        assert "uniqueItems: not supported" in refused.json()["error"]["message"]


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_tool_binds_a_call_that_has_begun(server: Running, strict: bool) -> None:
    """The model may answer as it likes, but a call, once begun, follows the schema."""
    llm, tools = server.llm, [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
    grammar = llm.answer_grammar(None, tools, None)
    assert (grammar is not None) == strict
    if grammar is None:
        return
    constraint = llm.grammars.constraint(grammar)()
    for token in llm.tokenize('Some text. <tool_call>\n{"name": "paint", "arguments": {"colour": "'):
        assert allowed(constraint, token)
        constraint.advance(token)
    assert not allowed(constraint, ord("b"))
    assert allowed(constraint, ord("r"))
    assert allowed(constraint, ord("g"))


_BLUE = '{"colour": "blue", "layers": 77}'
OTHER_SPELLINGS = {
    "hermes": (
        f'<tool_call>{{"name": "paint", "arguments": {_BLUE}}}</tool_call>',
        f'<tool_call>\n{{"arguments": {_BLUE}, "name": "paint"}}\n</tool_call>',
        f'Hm. <tool_call> {{"name":"paint","arguments":{_BLUE}}}</tool_call>',
    ),
    "qwen3-coder": (
        "<tool_call><function=paint>\n<parameter=colour>\nblue\n</parameter>\n</function>\n</tool_call>",
        "So: <function=paint>\n<parameter=colour>\nblue\n</parameter>\n</function>",
    ),
    "mistral": (f"[TOOL_CALLS] paint[ARGS]{_BLUE}", f'[TOOL_CALLS][{{"name": "paint", "arguments": {_BLUE}}}]'),
    "mistral-json": (f'[TOOL_CALLS] [{{"name": "paint", "arguments": {_BLUE}}}]',),
    "apriel": (f'<tool_calls>{{"name": "paint", "arguments": {_BLUE}}}</tool_calls>',),
    "llama3": (
        f'{{ "name": "paint", "parameters": {_BLUE}}}',
        f'{{"name":"paint","parameters":{_BLUE}}}',
        f'\n{{"name": "paint", "parameters": {_BLUE}}}',
    ),
}


@pytest.mark.parametrize("name", OTHER_SPELLINGS)
def test_a_strict_tool_binds_a_call_however_it_begins(server: Running, name: str) -> None:
    """Models begin calls in other ways than the template shows, and parsers read them."""
    llm = server.llm
    made = grammar_for_calls(
        FORMATS[name], {"paint": PAINT}, required=False, openers=PARSERS[name].openers,
        controls=llm.tokenizer.special_tokens,
    )  # fmt: skip

    def follows(text: str) -> bool:
        constraint = llm.grammars.constraint(made)()
        for token in llm.tokenize(text):
            if not allowed(constraint, token):
                return False
            constraint.advance(token)
        return True

    for text in OTHER_SPELLINGS[name]:
        reader = call_parser(name, {"paint": PAINT}, frozenset())
        answer = Answer()
        answer.add([*reader.feed(text), *reader.finish()])
        assert [call.name for call in answer.calls] == ["paint"]
        assert not follows(text)
    assert follows('Well. It is {"name": "x"}, see <tool>, [TOOL] and <function>.\n')


def test_only_tools_that_are_allowed_can_be_called(server: Running) -> None:
    """Also where no call is required: all tools are shown, so that prompts stay the same, but only some may be used."""
    llm = server.llm
    assert llm.answer_grammar(None, TOOLS, ToolChoice("auto")) is None
    grammar = llm.answer_grammar(None, TOOLS, ToolChoice("auto", ("wait",)))
    assert grammar is not None
    constraint = llm.grammars.constraint(grammar)()
    for token in llm.tokenize('Some text. <tool_call>\n{"name": "'):
        assert allowed(constraint, token)
        constraint.advance(token)
    assert not allowed(constraint, ord("p"))
    assert allowed(constraint, ord("w"))


def test_many_tools_that_are_allowed_cost_bounded_time() -> None:
    tools = [{"function": {"name": f"tool {number}"}} for number in range(200_000)]
    choice = ToolChoice("auto", tuple(tool["function"]["name"] for tool in tools))
    assert check_choice(choice, tools) is choice


def test_a_tool_that_takes_free_text_can_be_chosen(server: Running) -> None:
    tools = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "wait", "parameters": SCHEMAS["wait"]}]
    body = {"input": "Hi", "tools": tools, "parallel_tool_calls": False, "max_output_tokens": 60, "temperature": 0}
    choice = {"type": "custom", "name": "patch"}
    found = httpx.post(server.url + "/v1/responses", json=body | {"tool_choice": choice}, timeout=60).json()
    assert [(item["type"], item["name"]) for item in found["output"]] == [("custom_tool_call", "patch")]


def allowed(constraint: Any, token: int) -> bool:
    mask = constraint.mask()
    return mask is None or bool(mask[token // 32] >> (token % 32) & 1)


def test_a_format_of_plain_text_requires_the_call_all_the_same(server: Running) -> None:
    """`text.format: {"type": "text"}` asks for nothing: what `tool_choice` says still holds."""
    body = {
        "input": "Hi", "text": {"format": {"type": "text"}}, "tool_choice": "required", "parallel_tool_calls": False,
        "tools": [{"type": "function", "name": "wait", "parameters": SCHEMAS["wait"]}], "max_output_tokens": 300,
    }  # fmt: skip
    found = httpx.post(server.url + "/v1/responses", json=body, timeout=60).json()
    assert [item["type"] for item in found["output"]] == ["function_call"]
