"""What those who run the server see: health, metrics, the log line, keys, the command's refusals."""

import asyncio
import hmac
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from prometheus_client.parser import text_string_to_metric_families
from running import Running, running

from everwarm.cli import app as cli
from everwarm.cli.serve import parse_keys
from everwarm.errors import ConfigError
from everwarm.kv.receipt import Cause
from everwarm.server import limits, response
from everwarm.server.active_request import ActiveRequest
from everwarm.server.app import create_app
from everwarm.server.loading import preload
from everwarm.server.log import JsonFormatter
from everwarm.server.openai.wire import TextWire
from everwarm.server.process import Front, Progress
from everwarm.server.serving import Limits
from everwarm.server.shared_answer import SharedAnswer
from everwarm.weights.cache.cache import Problem
from tiny import Tiny
from waiting_until import wait_until

SECRET = "a very secret sentence"
HELLO = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0, "max_tokens": 4}
KEYS = {"key-a": "anna", "key-a2": "anna", "key-b": "bert"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny().write(path)
    return path


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(path, tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(path, tmp_path_factory.mktemp("home"), keys=KEYS, operators=["key-o"]) as server:
        yield server


def ask(server: Running, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(server.url + "/v1/chat/completions", json=HELLO | body, headers=headers)


def metrics(server: Running, key: str = "") -> dict[str, float]:
    text = httpx.get(server.url + "/metrics", headers={"X-Api-Key": key} if key else {}).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.name + "".join(f"|{value}" for value in one.labels.values()): one.value for one in samples}


# Health ---------------------------------------------------------------------------------------------------------------


def call(front: Front, path: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """What an application answers, without a server around it."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    asyncio.run(front({"type": "http", "path": path, "method": "GET", "headers": []}, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(sent[1]["body"])


def test_health_says_what_is_being_done_until_the_model_is_ready() -> None:
    progress = Progress()
    progress.say("packing the weights, once", 30, 40)
    status, headers, body = call(Front(progress), "/health")
    assert (status, body) == (503, {"status": "loading", "doing": "packing the weights, once", "done": 0.75})
    assert headers["retry-after"] == "1"


def test_all_else_is_asked_to_come_again_until_the_model_is_ready() -> None:
    status, headers, body = call(Front(Progress()), "/v1/chat/completions")
    assert (status, headers["retry-after"]) == (503, "1")
    assert body["error"]["type"] == "overloaded_error"


def test_health_is_200_when_it_is_ready(server: Running) -> None:
    response = httpx.get(server.url + "/health")
    assert (response.status_code, response.json()["status"]) == (200, "ok")


def test_a_model_is_ready_only_when_its_weights_are_verified(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [[Problem("blk.0.attn_q.weight", "has 50% of its pages in RAM")], []]
    monkeypatch.setattr(server.llm.weights, "verify", lambda: found.pop(0))
    progress = Progress()
    preload(server.llm, progress, again_s=0.01)
    assert not found
    assert "blk.0.attn_q.weight has 50% of its pages in RAM" in caplog.text


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_count_what_a_request_took(server: Running) -> None:
    before = metrics(server)
    asked = {"everwarm": {"agent": "counted"}, "messages": [{"role": "system", "content": "count"}]}
    body = ask(server, **asked).json()
    ask(server, **asked)
    counted = "everwarm_requests_total|/v1/chat/completions|200"  # which is when it is over
    wait_until(lambda: metrics(server).get(counted, 0.0) == before.get(counted, 0.0) + 2)
    after = metrics(server)
    changed = {name: after[name] - before.get(name, 0.0) for name in after}
    assert changed["everwarm_tokens_total|prompt"] == 2 * body["usage"]["prompt_tokens"]
    assert changed["everwarm_tokens_total|completion"] == 2 * body["usage"]["completion_tokens"]
    assert changed["everwarm_tokens_total|cached"] == body["usage"]["prompt_tokens"] - 1
    assert changed["everwarm_time_to_first_token_seconds_count|cold"] == 1
    assert changed["everwarm_time_to_first_token_seconds_count|hot"] == 1
    assert changed["everwarm_inter_token_seconds_count"] == 2 * (body["usage"]["completion_tokens"] - 1)
    assert changed["everwarm_lookups_total|new|cold"] == 1
    assert changed["everwarm_lookups_total|exact|hot"] == 1
    assert changed["everwarm_requests_total|/v1/chat/completions|200"] == 2
    assert changed["everwarm_batch_size_bucket|1.0"] >= 2
    drafted = changed["everwarm_drafted_tokens_total"], changed["everwarm_accepted_draft_tokens_total"]
    assert drafted[0] >= drafted[1] >= 0
    assert changed["everwarm_decode_passes_total"] + drafted[1] >= 2 * body["usage"]["completion_tokens"]
    assert after["everwarm_draft_memory_bytes"] > 0
    assert changed["everwarm_commits_total"] == 2
    assert changed["everwarm_weight_cache_misses_total"] == 0
    assert changed["everwarm_weight_cache_hits_total"] > 0
    assert after["everwarm_blocks_in_use"] >= after["everwarm_blocks_kept"] > 0
    assert after["everwarm_tier_bytes|warm"] > 0
    assert after["everwarm_tier_budget_bytes|hot"] > after["everwarm_tier_bytes|hot"] > 0
    assert after["everwarm_sequences_running"] == after["everwarm_sequences_waiting"] == 0


def test_metrics_hold_no_name_that_a_client_has_chosen(server: Running) -> None:
    ask(server, everwarm={"agent": "chosen-name"})
    httpx.get(server.url + "/chosen-name")
    httpx.get(server.url + "/v1/agents/chosen-name")
    text = httpx.get(server.url + "/metrics").text
    assert "chosen-name" not in text
    assert SECRET not in text


def test_every_metric_has_our_prefix_and_a_help_text(server: Running) -> None:
    families = list(text_string_to_metric_families(httpx.get(server.url + "/metrics").text))
    assert [family.name for family in families if not family.name.startswith("everwarm_")] == []
    assert [family.name for family in families if not family.documentation] == []


def test_the_labels_of_lookups_are_causes(server: Running) -> None:
    ask(server, everwarm={"agent": "labelled"})
    ask(server, everwarm={"agent": "labelled"})
    found = re.findall(
        r'^everwarm_lookups_total\{reason="([^"]*)",tier="[^"]*"\}', httpx.get(server.url + "/metrics").text, re.M
    )
    assert found
    assert set(found) <= set(Cause)


# The log line ---------------------------------------------------------------------------------------------------------


def records(caplog: pytest.LogCaptureFixture, count: int) -> list[logging.LogRecord]:
    """A line is written when its request is over, which may be a moment after the client has read the answer."""

    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "everwarm.request"]

    wait_until(lambda: len(found()) >= count)
    assert len(found()) == count
    return found()


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(record)) for record in records(caplog, count)]


def test_the_line_of_a_refused_request_says_why(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        httpx.post(server.url + "/v1/chat/completions", json={"messages": []})
        httpx.get(server.url + "/api/tags")
        first, second = lines(caplog, 2)
    assert (first["status"], first["error"].startswith("messages: ")) == (400, True)
    assert (second["status"], second["route"], second["path"]) == (404, "unmatched", "/api/tags")


def test_each_request_has_one_line_with_its_receipt(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        asked = {"everwarm": {"agent": "logged"}, "messages": [{"role": "system", "content": "log"}]}
        response = ask(server, **asked)
        again = ask(server, stream=True, **asked)
        first, second = lines(caplog, 2)
    assert (first["id"], second["id"]) == (response.headers["x-request-id"], again.headers["x-request-id"])
    receipt = response.json()["everwarm"]
    assert {
        name: first[name] for name in ("tier", "reason", "cached_tokens", "prompt_tokens")
    }.items() <= receipt.items()
    assert (second["tier"], second["reason"], second["cached_tokens"]) == ("hot", "exact", first["prompt_tokens"] - 1)
    assert (first["agent"], first["tenant"], first["status"]) == ("logged", "default", 200)
    assert (first["weight_hit_rate"], first["weight_misses"]) == (1.0, 0)
    assert first["finish"] in ("stop", "length")
    assert first["ttft_s"] > 0


def test_a_hundred_requests_never_miss_a_weight(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    server.llm.weights.preload()
    with caplog.at_level(logging.INFO):
        instances = set()
        for _ in range(100):
            ask(server, max_tokens=2)
            instances.add(server.llm.weights.stats().instance)
        told = lines(caplog, 100)
    assert len(instances) == 1
    assert f'instance="{instances.pop()}"' in httpx.get(server.url + "/metrics").text
    assert {(line["weight_misses"], line["weight_hit_rate"]) for line in told} == {(0, 1.0)}
    assert all(line["tier"] and line["reason"] for line in told)


def test_no_line_holds_what_was_said(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "everwarm.server"), caplog.at_level(logging.DEBUG, "everwarm.request"):
        ask(server)
        ask(server, n=-1)
        ask(server, messages=[{"role": "user", "content": {"text": SECRET}}])
        ask(server, prompt=SECRET)
        told = lines(caplog, 4)
    assert SECRET not in caplog.text + json.dumps(told)


def test_a_refused_request_has_a_line_with_its_status(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask(server, temperature=-1)
        ask(server, stream=True, messages=[{"role": "user", "content": "x" * 500}])
        httpx.get(server.url + "/nowhere")
        told = lines(caplog, 3)
    assert [(line["route"], line["status"]) for line in told] == [
        ("/v1/chat/completions", 400),
        ("/v1/chat/completions", 400),
        ("unmatched", 404),
    ]


def test_a_name_can_not_forge_a_line(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask(server, everwarm={"agent": 'a b status=500 "q"'})
        record = records(caplog, 1)[0]
    assert 'agent="a b status=500 \\"q\\""' in record.getMessage()


# Keys -----------------------------------------------------------------------------------------------------------------

PATHS = ("/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/agents", "/nowhere", "/v1/messages", "/")


@pytest.mark.parametrize("asked", PATHS)
def test_without_a_key_nothing_answers(keyed: Running, asked: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"X-Api-Key": "key-"},
        {"Authorization": "Bearer é".encode()},
    ):
        assert httpx.get(keyed.url + asked, headers=headers).status_code == 401


def test_without_a_key_health_answers(keyed: Running) -> None:
    assert httpx.get(keyed.url + "/health").status_code == 200


@pytest.mark.parametrize("asked", ["/metrics", "/docs", "/openapi.json", "/v1/models"])
def test_with_a_key_it_does(keyed: Running, asked: str) -> None:
    for headers in ({"Authorization": "Bearer key-a"}, {"X-Api-Key": "key-b"}):
        assert httpx.get(keyed.url + asked, headers=headers).status_code == 200


def test_a_body_is_not_read_before_the_key_is_known(keyed: Running) -> None:
    response = httpx.post(
        keyed.url + "/v1/chat/completions", content=b" " * (20 << 20), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 401


def test_all_keys_are_compared_in_constant_time(keyed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(key: bytes, given: bytes) -> bool:
        compared.append(key)
        return real(key, given)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    httpx.get(keyed.url + "/nowhere", headers={"X-Api-Key": "key-a"})
    assert sorted(set(compared)) == sorted(key.encode() for key in (*KEYS, "key-o"))
    assert len(compared) % (len(KEYS) + 1) == 0


def test_keys_of_a_tenant_share_and_others_see_nothing(keyed: Running) -> None:
    first = ask(keyed, "key-a", everwarm={"agent": "mine"}).json()["everwarm"]
    same = ask(keyed, "key-a2", everwarm={"agent": "mine"}).json()["everwarm"]
    other = ask(keyed, "key-b", everwarm={"agent": "mine"}).json()["everwarm"]
    assert (first["tier"], same["tier"], other["tier"]) == ("cold", "hot", "cold")
    assert other["cached_tokens"] == 0


def test_a_tenant_sees_its_own_figures_only(keyed: Running) -> None:
    def counted(key: str) -> dict[str, float]:
        return {name: value for name, value in metrics(keyed, key).items() if value}

    before = counted("key-a"), counted("key-b"), counted("key-o")
    said = [{"role": "user", "content": "figures"}]
    answer = ask(keyed, "key-a", everwarm={"agent": "figured"}, messages=said).json()
    ask(keyed, "")  # nobody's
    prompt, requests = "everwarm_tokens_total|prompt", "everwarm_requests_total|/v1/chat/completions|200"

    def grown() -> list[tuple[float, float]]:
        after = counted("key-a"), counted("key-b"), counted("key-o")
        return [
            tuple(new.get(name, 0) - old.get(name, 0) for name in (prompt, requests))
            for old, new in zip(before, after, strict=True)
        ]

    end = time.monotonic() + 60
    while grown()[2][1] < 1:  # a request is counted when it is over
        assert time.monotonic() < end
    used = answer["usage"]["prompt_tokens"]
    assert grown() == [(used, 1), (0, 0), (used, 1)]
    assert not any("|401" in name for name in counted("key-a"))
    assert any("|401" in name for name in counted("key-o"))
    own, everything = set(metrics(keyed, "key-a")), set(metrics(keyed, "key-o"))
    others = (
        "weight_cache",
        "tier_bytes",
        "sequences",
        "process",
        "batch_size",
        "blocks",
        "commits",
        "requests_active",
    )
    for name in others:
        assert not any(name in one for one in own)
        assert any(name in one for one in everything)
    assert metrics(keyed, "key-a")["everwarm_agents"] >= 1


def test_without_any_key_everyone_sees_everything(server: Running) -> None:
    assert "everwarm_weight_cache_hits_total" in metrics(server)


def test_an_operators_key_opens_nothing_else(keyed: Running) -> None:
    operator = {"X-Api-Key": "key-o"}
    assert httpx.get(keyed.url + "/metrics", headers=operator).status_code == 200
    for path in PATHS:
        if path != "/metrics":
            assert httpx.get(keyed.url + path, headers=operator).status_code == 403
    refused = ask(keyed, "key-o")
    assert (refused.status_code, "/metrics only" in refused.json()["error"]["message"]) == (403, True)


def test_with_an_operators_key_alone_everyone_may_ask_and_sees_its_own(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, operators=["key-o"]) as server:
        assert ask(server).status_code == 200
        assert "everwarm_weight_cache_hits_total" not in metrics(server)
        assert "everwarm_weight_cache_hits_total" in metrics(server, "key-o")


# Limits ---------------------------------------------------------------------------------------------------------------


@contextmanager
def busy(server: Running) -> Iterator[None]:
    """A request runs, and does not end before this does."""
    holding, go = threading.Event(), threading.Event()
    start = server.llm.engine.submit

    def wait(sequence: Any) -> None:
        holding.set()
        go.wait(60)
        start(sequence)

    server.llm.engine.submit = wait  # type: ignore[method-assign]
    thread = threading.Thread(target=ask, args=(server,))
    thread.start()
    try:
        assert holding.wait(60)
        yield
    finally:
        go.set()
        thread.join()


def test_a_full_queue_is_429_with_retry_after(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, limits=Limits(most_queued=1)) as server, busy(server):
        refused = ask(server)
        for other in ("/v1/completions", "/v1/responses", "/v1/messages", "/completion", "/responses"):
            assert httpx.post(server.url + other, json={}).status_code == 429, other
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_full_queue_is_told_before_the_body_is_read(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, limits=Limits(most_queued=1)) as server, busy(server):
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 80), timeout=30) as second:
            second.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
            assert second.recv(65536).startswith(b"HTTP/1.1 429 ")


def test_bodies_of_all_requests_together_are_bounded(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_HELD", 5000)
    with running(path, tmp_path, limits=Limits(most_body_bytes=6000)) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 80), timeout=30) as slow:
            slow.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n" + b" " * 4000)
            end = time.monotonic() + 30
            while (refused := ask(server, metadata={"much": "x" * 3000})).status_code == 200:
                assert time.monotonic() < end  # until what was sent has arrived
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert httpx.get(server.url + "/health").status_code == 200
        while ask(server, metadata={"much": "x" * 3000}).status_code != 200:
            assert time.monotonic() < end  # until it is noticed that the slow one has gone
        for _ in range(20):
            assert ask(server, metadata={"much": "x" * 5000}).status_code == 200


def test_a_body_that_is_not_called_json_is_refused_in_words(server: Running) -> None:
    """As `curl -d` sends it; or a page that asks from a browser, of any origin."""
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        headers = {"Content-Type": kind}
        refused = httpx.post(server.url + "/v1/chat/completions", content=json.dumps(HELLO), headers=headers)
        assert refused.status_code == 415
        assert "Content-Type: application/json" in refused.json()["error"]["message"]
    twice = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    deep = "[" * 300 + "]" * 300
    assert httpx.post(server.url + "/v1/chat/completions", content=deep, headers=twice).status_code == 400


def test_tenants_can_not_push_each_other_aside(server: Running, keyed: Running) -> None:
    assert ask(server, everwarm={"priority": 5}).status_code == 200
    assert ask(keyed, "key-a", everwarm={"priority": -5}).status_code == 200
    refused = ask(keyed, "key-a", everwarm={"priority": 5})
    assert refused.status_code == 400
    assert "everwarm.priority" in refused.json()["error"]["message"]


def test_a_client_that_does_not_read_counts_as_gone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "STALLED_S", 0.2)
    with running(path, tmp_path) as server:
        serving = create_app(server.llm, "tiny").state.serving
        generation = server.llm.start("Hello", max_tokens=100_000, ignore_eos=True)
        outcomes = []

        async def respond() -> None:
            async def receive() -> Any:
                await asyncio.sleep(3600)

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body":
                    await asyncio.sleep(3600)

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
            wire = TextWire(serving, 1, logprobs=False, usage=False, prompt_chars=[0])
            request = Request(scope, receive)
            active = ActiveRequest(serving, request, SharedAnswer(serving, [generation], lambda: wire), "", "default")
            outcomes.append(active.outcome)
            answer = await response.respond(request, active, wire, True)
            await answer(scope, receive, send)

        asyncio.run(asyncio.wait_for(respond(), 30))
        serving.close()
        assert (outcomes[0].status, server.llm.engine.running) == (499, 0)


def test_a_request_that_takes_too_long_is_408(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, limits=Limits(timeout_s=0.2)) as server:
        answered = threading.Event()

        def end_later(sequence: Any) -> None:
            threading.Thread(target=lambda: (answered.wait(), sequence.output.end(None))).start()

        server.llm.engine.submit = end_later  # type: ignore[method-assign]
        response = ask(server)
        answered.set()
        assert (response.status_code, response.json()["error"]["type"]) == (408, "timeout_error")
        assert "0.2 s" in response.json()["error"]["message"]


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--host", "::"], "--insecure"),
        (["--log-format", "xml"], "expected text or json"),
        (["--max-body", "75%"], "expected a number of bytes"),
        (["--max-body", "lots"], "can't understand"),
        (["--api-key", "tenant:"], "TENANT:KEY"),
        (["--api-key", "a:same", "--api-key", "b:same"], "tenants 'a' and 'b'"),
        (["--api-key", "a:same", "--operator-key", "same"], "given to a tenant"),
        (["--operator-key", "a\nb"], "printable"),
        (["--proxy", "everyone"], "expected an address or a network"),
        (["--cors", "a.example"], "expected an origin"),
        (["--allowed-host", "a.example:80"], "without a port"),
        (["--host", "no-such-host.invalid"], "no-such-host.invalid"),
    ],
)
def test_the_command_refuses(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("sys.argv", ["everwarm"])
    assert cli.run(["serve", "smollm2", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_keys_name_tenants() -> None:
    assert parse_keys(["plain", "anna:one", "anna:two:three"]) == {
        "plain": "default", "one": "anna", "two:three": "anna",
    }  # fmt: skip
    with pytest.raises(ConfigError):
        parse_keys(["a b\n"])
