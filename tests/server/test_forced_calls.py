"""`tool_choice` that requires a call: a random model calls the right tool with arguments that are valid."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import TOOLS_TEMPLATE, Running, running

from tiny import Tiny

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Berlin", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMES = ("weather", "forecast")
HI: Any = [{"role": "user", "content": "How will it be?"}]


def check(name: str, arguments: Any, allowed: tuple[str, ...]) -> None:
    assert name in allowed
    assert arguments["city"] in ("Berlin", "Oslo")
    assert 1 <= arguments["days"] <= 9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home: Path = tmp_path_factory.mktemp("forced")
    Tiny(context=1024, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


@pytest.mark.parametrize("choice", ["required", *NAMES])
@pytest.mark.parametrize("seed", [1, 2])
def test_openai(server: Running, choice: str, seed: int) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        found = client.chat.completions.create(
            model="tiny", messages=HI, tools=tools, tool_choice=named, seed=seed, max_tokens=400,
            parallel_tool_calls=False,
        )  # fmt: skip
    (answer,) = found.choices
    (call,) = answer.message.tool_calls or []
    assert answer.finish_reason == "tool_calls"
    check(call.function.name, json.loads(call.function.arguments), NAMES if choice == "required" else (choice,))  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["any", *NAMES])
def test_anthropic(server: Running, choice: str) -> None:
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    named: Any = {"type": "any"} if choice == "any" else {"type": "tool", "name": choice}
    named |= {"disable_parallel_tool_use": True}
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        found = client.messages.create(model="tiny", messages=HI, tools=tools, tool_choice=named, max_tokens=400)
    (block,) = found.content
    assert (block.type, found.stop_reason) == ("tool_use", "tool_use")
    check(block.name, block.input, NAMES if choice == "any" else (choice,))


@pytest.mark.parametrize("choice", ["required", *NAMES])
def test_responses(server: Running, choice: str) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in NAMES]
    named: Any = choice if choice == "required" else {"type": "function", "name": choice}
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        found = client.responses.create(
            model="tiny", input="How?", tools=tools, tool_choice=named, max_output_tokens=400, parallel_tool_calls=False
        )
    (item,) = found.output
    assert item.type == "function_call"
    check(item.name, json.loads(item.arguments), NAMES if choice == "required" else (choice,))
