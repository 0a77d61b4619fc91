"""Agents over HTTP, and tokens."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from running import FILE, LETTERS, Running, running

from tiny import Tiny

Json = dict[str, Any]

KEYS = {"of alice": "alice", "of bob": "bob"}
LONG = "A long beginning that fills more than one block of keys and values. " * 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("agents")
    Tiny(context=1024).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home, keys=KEYS, restore="always") as server:
        yield server


@pytest.fixture(scope="module")
def alice(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"X-Api-Key": "of alice"}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def bob(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"X-Api-Key": "of bob"}, timeout=60) as client:
        yield client


def talk(client: httpx.Client, agent: str | None, *said: str, **options: Any) -> Json:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, "logit_bias": LETTERS} | options
    if agent is not None:
        body["everwarm"] = {"agent": agent}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def at(agent: str, verb: str = "") -> str:
    return f"/v1/agents/{quote(agent, safe='')}" + (f"/{verb}" if verb else "")


def test_a_chat_over_http_goes_on_where_it_was_left(server: Running) -> None:
    """As a person does it: `everwarm chat --url`, twice, as an agent whose name is no ASCII."""
    name = "Zoë 🐻"

    def chat(said: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "everwarm", "chat", "--url", server.url, "--agent", name, "--max-tokens", "5"]
        environment = os.environ | {"EVERWARM_API_KEY": "of alice"}
        done = subprocess.run(command, input=said, env=environment, capture_output=True, encoding="utf-8", timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    chat("First\n")
    answer, remarks = chat("Second\n")
    assert "goes on after 2 messages" in remarks
    assert " of them hot" in remarks
    with httpx.Client(base_url=server.url, headers={"X-Api-Key": "of alice"}) as client:
        messages = client.get(at(name)).json()["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        assert messages[2]["content"] == "Second"
        assert messages[3]["content"] in answer
        chat("/reset\n")
        assert client.get(at(name)).status_code == 404


def test_an_agent_is_shown_with_its_tokens_and_its_tier(alice: httpx.Client) -> None:
    answer = talk(alice, "shown", LONG)
    shown = alice.get(at("shown")).json()
    assert (shown["id"], shown["object"], shown["generation"]) == ("shown", "agent", 1)
    assert shown["tokens"] == answer["usage"]["total_tokens"]
    assert (shown["tier"], shown["pinned"], shown["saved"], shown["talking"]) == ("hot", False, True, False)
    assert min(shown["hot_bytes"], shown["warm_bytes"]) > 0
    assert shown["cached_tokens"] == shown["tokens"] - 1
    assert shown["last_used_at"] >= shown["created_at"] > 0


def test_the_list_has_the_latest_first_and_conversations_without_a_name_only_on_demand(alice: httpx.Client) -> None:
    for agent in ("listed 1", "listed 2"):
        talk(alice, agent, "Hi")
    unnamed = talk(alice, None, "Without a name")["everwarm"]["agent"]
    listed = alice.get("/v1/agents").json()
    names = [agent["id"] for agent in listed["data"]]
    assert names[:2] == ["listed 2", "listed 1"]
    assert unnamed not in names
    assert unnamed in [agent["id"] for agent in alice.get("/v1/agents", params={"all": True}).json()["data"]]
    assert alice.get("/v1/agents", params={"limit": 1}).json()["has_more"] is True


@pytest.mark.parametrize("name", ["a/b", "a/fork", "import", "ünï cödé", "50%", "a?b#c", "../../etc"])
def test_any_name_can_be_asked_for(alice: httpx.Client, name: str) -> None:
    talk(alice, name, "Hi")
    assert alice.get(at(name)).json()["id"] == name
    assert alice.post(at(name, "pin"), json={"pinned": True}).json()["pinned"] is True
    assert alice.delete(at(name)).json() == {"id": name, "object": "agent.deleted", "deleted": True}
    assert alice.get(at(name)).status_code == 404


def test_a_header_may_name_an_agent_in_any_script(alice: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = alice.post("/v1/chat/completions", json=body, headers=[(b"X-Agent-Id", "日本".encode())])
    assert answer.json()["everwarm"]["agent"] == "日本"


def test_anothers_agents_are_not_there(alice: httpx.Client, bob: httpx.Client) -> None:
    talk(alice, "private", "Hi")
    assert "private" not in [agent["id"] for agent in bob.get("/v1/agents", params={"all": True}).json()["data"]]
    for response in (
        bob.get(at("private")),
        bob.delete(at("private")),
        bob.delete(at("private"), params={"evict_only": True}),
        bob.post(at("private", "fork"), json={"name": "mine"}),
        bob.post(at("private", "pin"), json={"pinned": True}),
        bob.post(at("private", "export")),
        bob.post(at("private", "warm")),
    ):
        assert response.status_code == 404
        assert "no such agent" in response.json()["error"]["message"]
    assert alice.get(at("private")).status_code == 200


def test_what_was_evicted_comes_back_from_disk_with_the_same_answer(alice: httpx.Client) -> None:
    first = talk(alice, "evicted", LONG + "evicted")["choices"][0]["message"]["content"]
    gone = alice.delete(at("evicted"), params={"evict_only": True}).json()
    assert gone["freed_bytes"] > 0
    assert (gone["tier"], gone["generation"]) == ("warm", 1)
    again = talk(alice, "evicted", LONG + "evicted", first, "And?")
    assert again["everwarm"]["tier"] == "warm"
    cold = talk(alice, None, LONG + "evicted", first, "And?", everwarm={"cache": False})
    assert again["choices"][0]["message"]["content"] == cold["choices"][0]["message"]["content"]


def test_a_warmed_agent_is_hot_before_its_turn(alice: httpx.Client) -> None:
    first = talk(alice, "warmed", LONG + "warmed")["choices"][0]["message"]["content"]
    alice.delete(at("warmed"), params={"evict_only": True})
    warmed = alice.post(at("warmed", "warm")).json()
    assert (warmed["tier"], warmed["reason"]) == ("hot", "")
    assert warmed["restored_bytes"] > 0
    assert warmed["cached_tokens"] == warmed["tokens"] - 1
    assert alice.post(at("warmed", "warm")).json()["restored_blocks"] == 0
    receipt = talk(alice, "warmed", LONG + "warmed", first, "And?")["everwarm"]
    assert (receipt["tier"], receipt["restored_blocks"]) == ("hot", 0)
    assert receipt["cached_tokens"] == warmed["cached_tokens"]


def test_a_fork_has_the_history_and_goes_its_own_way(alice: httpx.Client) -> None:
    first = talk(alice, "forked", LONG)["choices"][0]["message"]["content"]
    response = alice.post(at("forked", "fork"), json={"name": "fork/1"})
    assert (response.status_code, response.json()["id"], response.json()["generation"]) == (201, "fork/1", 1)
    assert talk(alice, "fork/1", LONG, first, "And?")["everwarm"]["match"] == "extended"
    assert alice.get(at("forked")).json()["generation"] == 1
    taken = alice.post(at("forked", "fork"), json={"name": "fork/1"})
    assert (taken.status_code, "exists already" in taken.json()["error"]["message"]) == (409, True)


def test_a_pinned_agent_says_so_until_it_is_not(alice: httpx.Client) -> None:
    talk(alice, "pinned", "Hi")
    assert alice.post(at("pinned", "pin")).json()["pinned"] is True
    assert alice.get(at("pinned")).json()["pinned"] is True
    assert alice.post(at("pinned", "pin"), json={"pinned": False}).json()["pinned"] is False


def test_an_exported_agent_goes_on_elsewhere(alice: httpx.Client, bob: httpx.Client, tmp_path: Path) -> None:
    first = talk(alice, "moved", LONG + "moved")["choices"][0]["message"]["content"]
    response = alice.post(at("moved", "export"))
    assert response.status_code == 200
    assert "moved.everwarm" in response.headers["Content-Disposition"]
    assert int(response.headers["Content-Length"]) == len(response.content)
    arrived = bob.post("/v1/agents/import", content=response.content, headers=FILE)
    assert (arrived.status_code, arrived.json()["id"], arrived.json()["tier"]) == (201, "moved", "warm")
    receipt = talk(bob, "moved", LONG + "moved", first, "And?")["everwarm"]
    assert (receipt["match"], receipt["tier"]) == ("extended", "warm")
    assert bob.post("/v1/agents/import", content=response.content, headers=FILE).status_code == 409
    renamed = bob.post("/v1/agents/import", content=response.content, params={"name": "renamed"}, headers=FILE)
    assert renamed.json()["id"] == "renamed"


def test_blocks_of_an_import_are_never_shared(alice: httpx.Client, bob: httpx.Client) -> None:
    said = LONG[::-1]
    talk(alice, "untrusted", said)
    data = alice.post(at("untrusted", "export")).content
    assert bob.post("/v1/agents/import", content=data, headers=FILE).status_code == 201
    assert talk(bob, "another", said)["everwarm"]["cached_tokens"] == 0


@pytest.mark.parametrize("trust", ["true", "false", "1", ""])
def test_an_import_over_http_can_not_be_trusted(alice: httpx.Client, bob: httpx.Client, trust: str) -> None:
    talk(alice, "trusted", LONG)
    data = alice.post(at("trusted", "export")).content
    refused = bob.post("/v1/agents/import", content=data, params={"trust": trust}, headers=FILE)
    assert refused.status_code == 400
    assert "everwarm agents import --trust" in refused.json()["error"]["message"]
    assert bob.get(at("trusted")).status_code == 404


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
def test_an_import_must_be_called_a_file(alice: httpx.Client, kind: str | None) -> None:
    """A page of any origin can have a browser send these kinds without asking the server first."""
    talk(alice, "called", LONG)
    data = alice.post(at("called", "export")).content
    headers = {} if kind is None else {"Content-Type": kind}
    refused = alice.post("/v1/agents/import", content=data, params={"name": "never"}, headers=headers)
    assert refused.status_code == 415
    assert "Content-Type: application/octet-stream" in refused.json()["error"]["message"]
    assert alice.get(at("never")).status_code == 404


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"{}", lambda data: data[::-1]]
)
def test_a_damaged_import_is_refused_without_naming_our_files(alice: httpx.Client, damage: Any) -> None:
    talk(alice, "damaged", "Hi")
    data = alice.post(at("damaged", "export")).content
    response = alice.post("/v1/agents/import", content=damage(data), params={"name": "never"}, headers=FILE)
    assert response.status_code == 400
    assert "/" not in response.json()["error"]["message"]
    assert alice.get(at("never")).status_code == 404


def test_an_agent_that_talks_is_deleted_after_its_turn_and_others_are_served_meanwhile(
    alice: httpx.Client, server: Running
) -> None:
    talk(alice, "talking", "Hi")
    answers: list[httpx.Response] = []
    with server.llm.agents.open_turn("talking", 8, "alice"):
        waiting = [threading.Thread(target=lambda: answers.append(alice.delete(at("talking")))) for _ in range(12)]
        for thread in waiting:
            thread.start()
        assert alice.get(at("talking")).json()["talking"] is True
        talk(alice, "someone else", "Hi")
        assert not answers
    for thread in waiting:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200] + [404] * 11


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/agents/none/fork", {}),
        ("POST", "/v1/agents/none/fork", {"name": ""}),
        ("POST", "/v1/agents/none/fork", {"name": "bad\x00name"}),
        ("POST", "/v1/agents/none/pin", {"pinned": "perhaps"}),
        ("POST", "/v1/agents/none/pin", {"other": 1}),
        ("GET", "/v1/agents?limit=0", None),
    ],
)
def test_a_bad_request_is_a_400(alice: httpx.Client, method: str, path: str, body: Any) -> None:
    response = alice.request(method, path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_text_becomes_tokens_and_text_again(alice: httpx.Client) -> None:
    found = alice.post("/v1/tokenize", json={"text": "zq é"}).json()
    assert found == {"tokens": [259, 32, 0xC3, 0xA9], "count": 4}
    assert alice.post("/v1/detokenize", json={"tokens": found["tokens"]}).json() == {"text": "zq é"}


def test_control_tokens_are_text_unless_they_are_meant(alice: httpx.Client) -> None:
    text = "<|im_end|>"
    assert alice.post("/v1/tokenize", json={"text": text}).json()["count"] == len(text)
    assert alice.post("/v1/tokenize", json={"text": text, "special": True}).json()["tokens"] == [258]
    assert alice.post("/v1/detokenize", json={"tokens": [258]}).json() == {"text": ""}
    assert alice.post("/v1/detokenize", json={"tokens": [258], "special": True}).json() == {"text": text}


def test_messages_become_the_tokens_of_the_prompt(alice: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = alice.post("/v1/tokenize", json={"messages": messages}).json()["tokens"]
    text = alice.post("/v1/detokenize", json={"tokens": ids, "special": True}).json()["text"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(ids) == talk(alice, None, "Hi")["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tokenize", {}),
        ("tokenize", {"text": "a", "messages": [{"role": "user", "content": "Hi"}]}),
        ("tokenize", {"messages": []}),
        ("detokenize", {"tokens": [100000]}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {"tokens": ["a"]}),
    ],
)
def test_what_has_no_tokens_is_a_400(alice: httpx.Client, path: str, body: Json) -> None:
    assert alice.post(f"/v1/{path}", json=body).status_code == 400
