"""The server through real HTTP, as a client sees it."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

import everwarm
from everwarm.server.app import create_app
from everwarm.server.http import HttpServer
from tiny import Tiny

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("server") / "tiny.gguf"
    Tiny().write(path)
    with everwarm.load(path) as llm, socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(create_app(llm, "tiny"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            yield client
        server.should_exit = True
        thread.join()


def test_health_and_models(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok", "model": "tiny"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_an_answer_and_its_usage(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=HELLO).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 5
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("agent", ["alice ", " alice", "\u00e9 \u2028", " "])
@pytest.mark.parametrize("stream", [False, True])
def test_whatever_an_agent_is_called_it_is_named_in_a_header(client: httpx.Client, agent: str, stream: bool) -> None:
    """Spaces around it would be no header, and no answer could be sent."""
    answer = client.post("/v1/chat/completions", json=HELLO | {"everwarm": {"agent": agent}, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers["x-everwarm-agent"] == agent.encode("ascii", "replace").decode().strip()


def test_a_stream_spells_the_same_answer(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json=HELLO).json()["choices"][0]
    lines = client.post("/v1/chat/completions", json=HELLO | {"stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    assert [choice["finish_reason"] for choice in choices][-1] == whole["finish_reason"]


def test_a_client_that_goes_away_does_not_keep_others_waiting(client: httpx.Client) -> None:
    long = HELLO | {"stream": True, "max_tokens": 100, "messages": [{"role": "user", "content": "Go on"}]}
    for _ in range(3):
        with client.stream("POST", "/v1/chat/completions", json=long) as response:
            next(response.iter_lines())
    assert client.post("/v1/chat/completions", json=HELLO).status_code == 200


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "context"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1000}, "n:"),
    ],
)
def test_a_bad_request_is_a_400_in_openais_shape(client: httpx.Client, change: dict[str, object], named: str) -> None:
    response = client.post("/v1/chat/completions", json=HELLO | change)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_what_is_no_json_is_a_400(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "error" in response.json()
