"""Prompts that are too long, or long: refused before they are tokenised, and never in the way of short ones."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from running import LETTERS, Running, running

from everwarm import llm as facade
from everwarm.errors import ContextError
from everwarm.generation import generation
from everwarm.server import texts
from everwarm.text.template import output
from everwarm.text.template.output import collected
from tiny import Tiny

CONTEXT = 2048
LONG = 1000
"""Bytes or characters that count as long here."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=CONTEXT).write(path)
    with running(path, tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture(autouse=True)
def little_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "LONG_TEXT", LONG)
    monkeypatch.setattr(generation, "LONG_TEXT", LONG)
    monkeypatch.setattr(texts, "LONG_BYTES", LONG)
    monkeypatch.setattr(output, "FIRST_LOOK", LONG)


def chat(server: Running, *contents: str, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content} for content in contents]
    body = {"messages": messages, "max_tokens": 2, "logit_bias": LETTERS} | more
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)


def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Gate:
    """Holds up whoever brings a long text, and remembers them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.came: list[int] = []
        self.open = threading.Event()
        real = getattr(owner, name)

        def pass_through(*arguments: Any, **more: Any) -> Any:
            size = len(str(arguments) + str(more))
            if size >= LONG:
                self.came.append(size)
                assert self.open.wait(60)
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, pass_through)


@contextmanager
def asking(*questions: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
    """Ask all of them at once; the answers are there afterwards."""
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda ask=ask: answers.append(ask())) for ask in questions]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join()


# Too long -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("contents", [("x" * 500_000,), ("y" * 300,) * 500, ("",) * CONTEXT])
def test_a_prompt_that_can_not_fit_is_refused_before_it_is_tokenised(
    server: Running, monkeypatch: pytest.MonkeyPatch, contents: tuple[str, ...], cache: bool
) -> None:
    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(server.llm.tokenizer, "encode", never)
    refused = chat(server, *contents, everwarm={"cache": cache})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"the context is {CONTEXT:,}" in refused.json()["error"]["message"]


def test_more_messages_than_tokens_fit_are_refused_before_they_are_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(server.llm, "start", never)
    refused = chat(server, *("x",) * (CONTEXT + 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    messages = [{"role": "user", "content": "x"}] * (CONTEXT + 1)
    refused = httpx.post(server.url + "/v1/messages", json={"max_tokens": 1, "messages": messages})
    assert refused.status_code == 400


def test_a_template_is_stopped_when_its_prompt_can_not_fit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "LONGEST_NAME", 100)
    written: list[int] = []

    def counted(pieces: Any, watch: Any) -> str:
        return collected((written.append(len(piece)) or piece for piece in pieces), watch)

    monkeypatch.setattr("everwarm.text.template.sandbox.collected", counted)
    with pytest.raises(ContextError, match=f"the context is {CONTEXT:,}"):
        server.llm.start(messages=[{"role": "user", "content": "z" * 100}] * 2000)
    assert CONTEXT < sum(written) < 16 * CONTEXT  # and not 200,000


def test_a_long_prompt_is_tokenised_no_further_than_the_context(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the least number of tokens says too little: `zq` is one token, so each letter weighs half of one."""
    counted: list[int] = []
    encode = server.llm.tokenizer.encode

    def counting(*arguments: Any, **more: Any) -> Any:
        ids = encode(*arguments, **more)
        counted.append(len(ids))
        return ids

    monkeypatch.setattr(server.llm.tokenizer, "encode", counting)
    monkeypatch.setattr("everwarm.text.pace.SLICE", 16)
    refused = chat(server, "zz " * 1000)
    assert "more than 2,048 tokens" in refused.json()["error"]["message"]
    assert CONTEXT < max(counted) < CONTEXT + 100


def test_a_long_prompt_that_fits_is_answered(server: Running) -> None:
    assert chat(server, "z" * 1500).json()["usage"]["prompt_tokens"] > 1500


def test_what_is_written_is_watched_as_it_grows() -> None:
    seen: list[int] = []
    text = collected(iter(["x" * 100] * 200), lambda text: seen.append(len(text)))
    assert len(text) == 20_000
    assert seen == [1000, 2000, 4000, 8000, 16000]


# In the way -----------------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_not_rendered_after_long_ones(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, server.llm, "start")
    with asking(*[lambda: chat(server, "r" * 1200)] * 3) as answers:
        until(lambda: gate.came)
        assert chat(server, "short").status_code == 200
        assert len(gate.came) == 1  # one at a time
        gate.open.set()
    assert [answer.status_code for answer in answers] == [200] * 3


def test_a_short_prompt_is_not_tokenised_after_long_ones(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, server.llm.tokenizer, "encode")
    with asking(*[lambda: chat(server, "t" * 1200, everwarm={"cache": False})] * 3) as answers:
        until(lambda: gate.came)
        assert chat(server, "short").status_code == 200
        assert len(gate.came) == 1
        gate.open.set()
    assert [answer.status_code for answer in answers] == [200] * 3


def test_whoever_leaves_before_its_turn_is_not_rendered(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, server.llm, "start")
    body = json.dumps({"messages": [{"role": "user", "content": "u" * 1200}]}).encode()
    address = httpx.URL(server.url)
    with asking(lambda: chat(server, "s" * 1200)):
        until(lambda: gate.came)
        with socket.create_connection((address.host, address.port or 80), timeout=60) as leaving:
            leaving.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            until(lambda: "everwarm_requests_active 2.0" in httpx.get(server.url + "/metrics").text)
        until(lambda: "everwarm_requests_active 1.0" in httpx.get(server.url + "/metrics").text)
        gate.open.set()
    assert chat(server, "v" * 1200).status_code == 200
    assert len(gate.came) == 2


def test_several_choices_are_rendered_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    render = server.llm.template.render
    monkeypatch.setattr(server.llm.template, "render", lambda *a, **k: (rendered.append(a), render(*a, **k))[1])
    answer = chat(server, "choose", n=4, seed=7, temperature=1.5)
    assert len(answer.json()["choices"]) == 4
    assert len(rendered) == 1
