"""Reasoning over HTTP, as the official clients see it. The model's output is given, all else is real."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import LETTERS, Running
from speaking import HI, THINKING_TEMPLATE, says, served

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(tmp_path_factory.mktemp("reasoning"), THINKING_TEMPLATE) as server:
        yield server


def ask(client: OpenAI, messages: Any = HI, **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 300} | more)


def prompt_tokens(client: OpenAI, **more: Any) -> int:
    return int(ask(client, max_tokens=1, **more).usage.prompt_tokens)


def test_reasoning_comes_apart_from_the_answer(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, "Let me think.\n</think>\n\nYes.")
    found = ask(client)
    message = found.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "Let me think.")
    assert found.usage.completion_tokens_details.reasoning_tokens > 10
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "Let me think."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_reasoning_and_calls_in_one_answer(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, f"I could write {CALL}.</think>\n\n{CALL}")
    choice = ask(client, tools=[TOOL]).choices[0]
    assert choice.message.model_extra["reasoning_content"] == f"I could write {CALL}."
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


def test_thinking_can_be_switched_off(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    says(server, monkeypatch, "Yes.")
    on = prompt_tokens(client)
    closed = len("\n</think>\n\n")
    assert prompt_tokens(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == on + closed
    assert prompt_tokens(client, reasoning_effort="none") == on + closed
    assert prompt_tokens(client, extra_body={"thinking": {"type": "disabled"}}) == on + closed
    assert prompt_tokens(client, extra_body={"thinking": {"type": "enabled"}}) == on
    assert prompt_tokens(client, reasoning_effort="high") == on + len("effort high\n")
    off = ask(client, reasoning_effort="none").choices[0].message
    assert (off.content, "reasoning_content" in (off.model_extra or {})) == ("Yes.", False)


def test_a_budget_is_kept(server: Running, client: OpenAI) -> None:
    for body in (
        {"reasoning_budget": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"chat_template_kwargs": {"thinking_budget": 5}},
    ):
        found = ask(client, max_tokens=40, logit_bias=LETTERS, extra_body=body)
        message = found.choices[0].message
        assert len(message.model_extra["reasoning_content"]) == 5
        assert len(message.content) == 40 - 5 - len("\n</think>\n\n")


def test_anthropics_client_gets_thinking_only_if_it_asks(
    server: Running, claude: Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(server, monkeypatch, "Let me think.\n</think>\n\nYes.")
    found = claude.messages.create(model="tiny", messages=HI, max_tokens=300, thinking={"type": "adaptive"})
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].thinking == "Let me think."  # type: ignore[union-attr]
    says(server, monkeypatch, "Yes.")
    for more in ({}, {"thinking": {"type": "disabled"}}):
        found = claude.messages.create(model="tiny", messages=HI, max_tokens=300, **more)  # type: ignore[arg-type]
        assert [block.type for block in found.content] == ["text"]


def test_anthropics_budget_is_kept(server: Running) -> None:
    body = {"messages": HI, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 4}, "temperature": 0}
    found = httpx.post(server.url + "/v1/messages", json=body, timeout=60).json()
    assert found["content"][0]["type"] == "thinking"
    assert found["usage"]["output_tokens"] == 60


def test_reasoning_in_a_history_reaches_the_template(server: Running, client: OpenAI) -> None:
    said = {"role": "assistant", "content": "Yes."}
    plain = prompt_tokens(client, messages=[*HI, said, *HI])
    for name in ("reasoning_content", "reasoning"):
        more = prompt_tokens(client, messages=[*HI, said | {name: "hm"}, *HI])
        assert more == plain + len("<think>hm</think>")
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Yes."}]
    talk = [*HI, {"role": "assistant", "content": blocks}, *HI]
    body = {"messages": talk, "max_tokens": 1, "thinking": {"type": "adaptive"}}
    counted = httpx.post(server.url + "/v1/messages/count_tokens", json=body | {"max_tokens": None}).json()
    assert counted["input_tokens"] == plain + len("<think>hm</think>")
