"""A request that is sent again while the same one still runs, over real sockets."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running import TOOLS_TEMPLATE, Running, running

from everwarm.server.shared_answer import AnswerReader, SharedAnswer
from tiny import Tiny
from waiting_until import wait_until

Json = dict[str, Any]
KEYS = {"key-a": "a", "key-b": "b"}
ADA = {"Authorization": "Bearer key-a"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("joining")
    Tiny(context=4096, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home, keys=KEYS) as server:
        yield server


class Watch:
    """Counts those who read an answer and the sequences that are computed; holds the engine still."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readers = self.left = self.sequences = 0
        self.held = False
        self._engine, self._go = server.llm.engine, threading.Event()
        read, close, submit = SharedAnswer.read, AnswerReader.close, self._engine.submit

        def count_reader(answer: SharedAnswer) -> Any:
            self.readers += 1
            return read(answer)

        def count_leaving(reader: AnswerReader) -> None:
            self.left += 1
            close(reader)

        def count_sequence(sequence: Any) -> None:
            self.sequences += 1
            submit(sequence)

        server.llm.generate("a", max_tokens=1, cache=False)  # the engine runs
        monkeypatch.setattr(SharedAnswer, "read", count_reader)
        monkeypatch.setattr(AnswerReader, "close", count_leaving)
        monkeypatch.setattr(self._engine, "submit", count_sequence)

    def hold(self) -> None:
        self._go.clear()
        self._engine.call_soon(lambda: self._go.wait(60) and None)

    def hold_at(self, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hold the engine once so many tokens were sampled."""
        accept, count = self._engine._accept, 0

        def counting(part: Any, rows: Any) -> bool:
            nonlocal count
            over = accept(part, rows)
            count += len(rows)
            if count >= token and not self.held:  # several may come at once
                self.held = True
                self._go.wait(60)
            return over

        monkeypatch.setattr(self._engine, "_accept", counting)

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def watch(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch(server, monkeypatch)
    yield watch
    watch.go()
    wait_until(lambda: not server.llm.engine.running)


def body(text: str, path: str = "/v1/chat/completions", **more: Any) -> Json:
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": 6, "temperature": 0} | more
    if path == "/v1/completions":
        return {"prompt": text, "max_tokens": 6, "temperature": 0} | more
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0} | more


def post(server: Running, sent: Json, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    answer = httpx.post(server.url + path, json=sent, headers=ADA | headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def twice(
    server: Running,
    watch: Watch,
    sent: Json,
    path: str = "/v1/chat/completions",
    first: dict[str, str] | None = None,
    second: dict[str, str] | None = None,
    other: Json | None = None,
) -> tuple[httpx.Response, httpx.Response]:
    """Send a request, and again while the first runs."""
    with ThreadPoolExecutor(2) as threads:
        watch.hold()
        one = threads.submit(lambda: post(server, sent, path, **(first or {})))
        wait_until(lambda: watch.readers == 1)
        two = threads.submit(lambda: post(server, sent if other is None else other, path, **(second or {})))
        wait_until(lambda: watch.readers == 2)
        watch.go()
        return one.result(), two.result()


def events(answer: httpx.Response) -> list[Json]:
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def without_ids(found: Any) -> Any:
    """An answer without what differs from client to client."""
    if isinstance(found, dict):
        return {
            key: without_ids(value) for key, value in found.items() if key not in ("id", "created", "joined", "timings")
        }
    return [without_ids(one) for one in found] if isinstance(found, list) else found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_greedy_request_sent_again_joins_the_first(server: Running, watch: Watch, path: str, stream: bool) -> None:
    one, two = twice(server, watch, body(f"Join {path} {stream}", path, stream=stream), path)
    assert watch.sequences == 1
    assert ("x-everwarm-joined" in one.headers, two.headers["x-everwarm-joined"]) == (False, "true")
    if stream:
        assert without_ids(events(one)) == without_ids(events(two))
        assert len(events(two)) > 4
    else:
        assert (one.json()["everwarm"]["joined"], two.json()["everwarm"]["joined"]) == (False, True)
        assert without_ids(one.json()) == without_ids(two.json())


def test_a_joined_response_has_the_id_under_which_it_is_kept(server: Running, watch: Watch) -> None:
    one, two = twice(server, watch, body("Keep me", "/v1/responses"), "/v1/responses")
    assert one.json()["id"] == two.json()["id"]
    kept = httpx.get(f"{server.url}/v1/responses/{two.json()['id']}", headers=ADA).json()
    assert kept["output"] == two.json()["output"]


SAMPLED = {"temperature": 1.0}


@pytest.mark.parametrize(
    ("name", "options", "first", "second", "joins"),
    [
        ("seeded", {"temperature": 1.0, "seed": 3}, {}, {}, True),
        ("sampled", SAMPLED, {}, {}, False),
        ("counted", SAMPLED, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}, True),
        ("not counted", SAMPLED, {}, {"x-stainless-retry-count": "0"}, False),
        ("odd count", SAMPLED, {}, {"x-stainless-retry-count": "-1 or so"}, False),
        ("same key", SAMPLED, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}, True),
        ("a key, none before", SAMPLED, {}, {"Idempotency-Key": "k"}, False),
        ("other key", {}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "l"}, False),
        ("agents", {}, {"X-Agent-Id": "x"}, {"X-Agent-Id": "y"}, False),
        ("one agent", {}, {"X-Agent-Id": "z"}, {"X-Agent-Id": "z"}, True),
        ("tenants", {}, {}, {"Authorization": "Bearer key-b"}, False),
    ],
)
def test_which_requests_join(
    server: Running, watch: Watch, name: str, options: Json, first: Json, second: Json, joins: bool
) -> None:
    one, two = twice(server, watch, body(f"Rule: {name}", **options), first=first, second=second)
    assert watch.sequences == (1 if joins else 2)
    assert two.json()["everwarm"]["joined"] is joins
    if joins:
        assert without_ids(one.json()) == without_ids(two.json())


def test_another_body_or_group_does_not_join(server: Running, watch: Watch) -> None:
    one, two = twice(server, watch, body("Not this"), other=body("Not this", max_tokens=7))
    assert (watch.sequences, two.json()["everwarm"]["joined"]) == (2, False)
    assert one.json()["usage"]["completion_tokens"] == 6
    watch.readers = watch.sequences = 0
    sent = body("Nor this", prompt_cache_key="one")
    _, two = twice(server, watch, sent, other=body("Nor this", prompt_cache_key="two"))
    assert (watch.sequences, two.json()["everwarm"]["joined"]) == (2, False)


def test_after_its_end_an_answer_is_not_joined(server: Running, watch: Watch) -> None:
    one, two = post(server, body("Again, later")), post(server, body("Again, later"))
    assert (watch.sequences, two.json()["everwarm"]["joined"]) == (2, False)
    assert two.json()["everwarm"]["cached_tokens"] == one.json()["everwarm"]["prompt_tokens"] - 1


def test_one_that_joins_in_the_middle_gets_the_answer_from_its_first_token(
    server: Running, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = body("In the middle", stream=True, max_tokens=40, ignore_eos=True)
    watch.hold_at(token=10, monkeypatch=monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: post(server, sent))
        wait_until(lambda: watch.held)
        second = threads.submit(lambda: post(server, sent))
        wait_until(lambda: watch.readers == 2)
        watch.go()
        one, two = first.result(), second.result()
    assert (watch.sequences, two.headers["x-everwarm-joined"]) == (1, "true")
    assert without_ids(events(one)) == without_ids(events(two))
    assert len(events(two)) >= 40


def test_one_client_that_leaves_does_not_cancel_the_other(server: Running, watch: Watch) -> None:
    whole = post(server, body("Leave", max_tokens=30, ignore_eos=True, everwarm={"cache": False})).json()
    watch.readers = watch.left = watch.sequences = 0
    sent = body("Leave", max_tokens=30, ignore_eos=True)
    cancelled = sum(server.llm.engine.cancel_waits.values())
    leaving = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with ThreadPoolExecutor(1) as threads:
        watch.hold()
        written = httpx.Request("POST", server.url, json=sent).content  # the very bytes that the other client sends
        leaving.request("POST", "/v1/chat/completions", written, ADA | {"Content-Type": "application/json"})
        wait_until(lambda: watch.readers == 1)
        joined = threads.submit(lambda: post(server, sent))
        wait_until(lambda: watch.readers == 2)
        leaving.close()
        wait_until(lambda: watch.left == 1)
        watch.go()
        answer = joined.result()
    assert (answer.json()["everwarm"]["joined"], watch.sequences) == (True, 1)
    assert answer.json()["choices"] == whole["choices"]
    assert sum(server.llm.engine.cancel_waits.values()) == cancelled


def test_the_last_client_that_leaves_cancels(server: Running, watch: Watch) -> None:
    sent = body("Leave, both", max_tokens=3000, ignore_eos=True, stream=True)
    cancelled = sum(server.llm.engine.cancel_waits.values())

    def leave_early() -> None:
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=sent, headers=ADA, timeout=60) as answer:
            next(answer.iter_lines())

    with ThreadPoolExecutor(2) as threads:
        watch.hold()
        leaving = [threads.submit(leave_early)]
        wait_until(lambda: watch.readers == 1)
        leaving.append(threads.submit(leave_early))
        wait_until(lambda: watch.readers == 2)
        watch.go()
        for one in leaving:
            one.result()
    wait_until(lambda: not server.llm.engine.running)
    assert watch.sequences == 1
    assert sum(server.llm.engine.cancel_waits.values()) == cancelled + 1


def test_joined_requests_are_counted_and_their_tokens_are_not(server: Running, watch: Watch) -> None:
    def metric(name: str) -> float:
        text = httpx.get(server.url + "/metrics", headers=ADA).text
        found = [line.split()[-1] for line in text.splitlines() if line.startswith(f"everwarm_{name}")]
        return float(found[0])

    before = metric("joined_requests_total"), metric('tokens_total{kind="completion"}')
    twice(server, watch, body("Counted"))
    wait_until(lambda: metric("joined_requests_total") == before[0] + 1)
    wait_until(lambda: metric('tokens_total{kind="completion"}') == before[1] + 6)
