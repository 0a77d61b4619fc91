"""`GET /v1/agents/{name}/why`."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import Running, running

from tiny import Tiny

Json = dict[str, Any]
KEYS = {"key-a": "a", "key-b": "b"}
SYSTEM = "You look after files.\nDate: {}\n" + "\n".join(f"Rule {number}: do it well." for number in range(20))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("why")
    Tiny(context=2048).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home, keys=KEYS) as server:
        yield server


def ask(server: Running, date: str, agent: str | None = None, key: str = "key-a") -> Json:
    messages = [{"role": "system", "content": SYSTEM.format(date)}, {"role": "user", "content": "Hi"}]
    headers = {"Authorization": f"Bearer {key}"} | ({"X-Agent-Id": agent} if agent else {})
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    found: Json = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers, timeout=60).json()
    return found["everwarm"]


def why(server: Running, agent: str, key: str = "key-a") -> httpx.Response:
    return httpx.get(f"{server.url}/v1/agents/{agent}/why", headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_a_changed_prompt_is_explained(server: Running) -> None:
    ask(server, "2026-11-16", "ada")
    receipt = ask(server, "2026-11-17", "ada")
    found = why(server, "ada").json()
    assert {name: found[name] for name in ("object", "agent", "compared_with", "cached_tokens", "prompt_tokens")} == {
        "object": "agent.why", "agent": "ada", "compared_with": "ada",
        "cached_tokens": receipt["cached_tokens"], "prompt_tokens": receipt["prompt_tokens"],
    }  # fmt: skip
    assert "Date: 2026-11-16" in found["difference"]["old"]
    assert found["advice"]["prompt_rules"] == "claude-billing-header,dates-last"
    assert 0 < found["advice"]["saved_tokens"] <= found["same_tokens"] < receipt["prompt_tokens"]


def test_a_new_conversation_is_compared_with_those_of_its_tenant_only(server: Running) -> None:
    ask(server, "2026-10-01", "first")
    mine = ask(server, "2026-10-02")["agent"]
    assert why(server, mine).json()["difference"] is not None
    alone = ask(server, "2026-10-03", key="key-b")["agent"]
    found = why(server, alone, "key-b").json()
    assert (found["difference"], found["advice"], found["compared_with"]) == (None, None, None)
    assert found["summary"].startswith("nothing to explain: ")
    assert why(server, mine, "key-b").status_code == 404
    assert why(server, "nobody").status_code == 404


def test_an_agent_whose_name_ends_so_is_shown(server: Running) -> None:
    ask(server, "2026-09-01", "tell/why")
    shown = httpx.get(f"{server.url}/v1/agents/tell%2Fwhy", headers={"Authorization": "Bearer key-a"}).json()
    assert (shown["id"], shown["object"]) == ("tell/why", "agent")
