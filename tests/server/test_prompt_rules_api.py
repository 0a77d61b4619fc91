"""Rules for prompts in all three APIs: two sessions that differ in a date share system text and tools."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import Running, running

from tiny import Tiny

Json = dict[str, Any]

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% if loop.first and tools %}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Lists the tools after the system text."""

SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "Where the file is. " * 5}}}
SYSTEM = "You look after files.\nDate: {}\nWorking directory: /home/{}\nBe brief."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("rules")
    Tiny(context=2048, template=TEMPLATE).write(home / "tiny.gguf")
    rules = "claude-billing-header,dates-last,environment-last"
    with running(home / "tiny.gguf", home, prompt_rules=rules) as server:
        yield server


def chat(server: Running, system: str, ask: str) -> Json:
    function = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
    messages = [{"role": "developer", "content": system}, {"role": "user", "content": ask}]
    body = {"messages": messages, "tools": [function], "max_tokens": 2, "temperature": 0}
    return post(server, "/v1/chat/completions", body)


def responses(server: Running, system: str, ask: str, **more: Any) -> Json:
    tool = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}
    body = {"instructions": system, "input": ask, "tools": [tool], "max_output_tokens": 2, "temperature": 0} | more
    return post(server, "/v1/responses", body)


def messages(server: Running, system: str, ask: str) -> Json:
    tool = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
    body = {"messages": [{"role": "user", "content": ask}], "tools": [tool], "max_tokens": 2, "temperature": 0}
    header = {"type": "text", "text": "x-anthropic-billing-header: 1"}
    return post(server, "/v1/messages", body | {"system": [header, {"type": "text", "text": system}]})


def post(server: Running, path: str, body: Json) -> Json:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


@pytest.mark.parametrize(
    ("api", "rules"),
    [
        (chat, ["dates-last", "environment-last"]),
        (responses, ["dates-last", "environment-last"]),
        (messages, ["claude-billing-header", "dates-last", "environment-last"]),
    ],
)
def test_a_second_session_reuses_system_text_and_tools(server: Running, api: Any, rules: list[str]) -> None:
    first = api(server, SYSTEM.format("2026-11-16", "ada"), f"Hello to {api.__name__}")["everwarm"]
    second = api(server, SYSTEM.format("2026-11-17", "bob"), f"Hello to {api.__name__}")["everwarm"]
    assert (first["rules"], second["rules"]) == (rules, rules)
    stable = server.llm.segments(
        messages=[{"role": "system", "content": "You look after files.\nBe brief."}],
        tools=[{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}],
    )[0]
    assert second["cached_tokens"] > sum(len(segment.text) for segment in stable if not segment.special) - 20
    assert second["prompt_tokens"] - second["cached_tokens"] < 80


def test_a_continued_response_has_its_moved_lines_once(server: Running) -> None:
    system = SYSTEM.format("2026-11-18", "eve")
    first = responses(server, system, "Hello, continued")
    second = responses(server, system, "And now?", previous_response_id=first["id"])
    receipt = second["everwarm"]
    assert receipt["cached_tokens"] >= first["everwarm"]["prompt_tokens"]
    spelt = "".join(run.text for run in server.llm.agents.history(server.llm.agents.find(second["id"])).runs)
    assert spelt.count("Date: 2026-11-18") == 1
    assert spelt.index("Date: 2026-11-18") > spelt.index("Where the file is.")


def test_without_such_lines_no_rule_is_named(server: Running) -> None:
    assert chat(server, "You look after files.", "Hello")["everwarm"]["rules"] == []
