"""Exact replay as clients see it: they send calls back in their own spelling, and nothing is computed twice."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import Running
from speaking import says, served

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>\n{\"name\": {{ c['function']['name'] | tojson }}, "
    "\"arguments\": {{ c['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ANSWER = 'I will see. <tool_call>{"arguments":{"days":3,  "city":"K\\u00f6ln"},"name":"weather"}</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 3}
ASKED: Any = {"role": "user", "content": "How will it be? " * 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(tmp_path_factory.mktemp("replay"), TEMPLATE) as server:
        yield server


def check(first: Any, second: Any) -> None:
    """Nothing of the first turn is computed again, but for its last token, whose KV nobody has had."""
    known = first["prompt_tokens"] + len(ANSWER.encode())
    assert second["replayed_answers"] == 1
    assert second["cached_tokens"] >= known - 1
    assert second["match"] == "extended"


@pytest.mark.parametrize("agent", ["one", None])
def test_chat(server: Running, monkeypatch: pytest.MonkeyPatch, agent: str | None) -> None:
    says(server, monkeypatch, ANSWER)
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    headers = {"X-Agent-Id": agent} if agent else {}
    asked: Any = {**ASKED, "content": f"{agent}: {ASKED['content']}"}
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, default_headers=headers) as client:
        first: Any = client.chat.completions.create(model="tiny", messages=[asked], tools=tools)
        (call,) = first.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == ARGUMENTS
        function = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
        messages: Any = [
            asked,
            {"role": "assistant", "content": "I will see.", "tool_calls": [
                {"id": "other", "type": "function", "function": function}
            ]},
            {"role": "tool", "tool_call_id": "other", "content": "Rain."},
        ]  # fmt: skip
        second: Any = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    check(first.everwarm, second.everwarm)


def test_anthropic(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, ANSWER)
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    asked: Any = {**ASKED, "content": f"anthropic: {ASKED['content']}"}
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        first: Any = client.messages.create(model="tiny", messages=[asked], tools=tools, max_tokens=400)
        text, call = first.content
        assert (text.text.strip(), call.input) == ("I will see.", ARGUMENTS)
        messages: Any = [
            asked,
            {"role": "assistant", "content": [{"type": "text", "text": "I will see."}, {
                "type": "tool_use", "id": call.id, "name": "weather", "input": ARGUMENTS,
            }]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}]},
        ]  # fmt: skip
        second: Any = client.messages.create(model="tiny", messages=messages, tools=tools, max_tokens=400)
    check(first.everwarm, second.everwarm)


@pytest.mark.parametrize("store", [True, False])
def test_responses(server: Running, monkeypatch: pytest.MonkeyPatch, store: bool) -> None:
    """Stored, the history is ours; else the client sends it back, as Codex does."""
    says(server, monkeypatch, ANSWER)
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    asked: Any = {**ASKED, "content": f"{store}: {ASKED['content']}"}
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        common: Any = {"model": "tiny", "tools": tools, "store": store, "prompt_cache_key": f"key-{store}"}
        first: Any = client.responses.create(input=[asked], **common)
        text, call = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        if store:
            second: Any = client.responses.create(previous_response_id=first.id, input=[result], **common)
        else:
            said = {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": text.content[0].text.strip(), "annotations": []}
            ]}  # fmt: skip
            called = {"type": "function_call", "call_id": call.call_id, "name": "weather"}
            called["arguments"] = json.dumps(ARGUMENTS)
            second = client.responses.create(input=[asked, said, called, result], **common)
    check(first.everwarm, second.everwarm)
