"""`timings` and `prompt_progress`, as clients of llama.cpp's server read them."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from running import LETTERS, Running, running

from everwarm.events import Usage
from everwarm.generation.generation import Progress
from everwarm.server.timings import PromptProgress, Timings
from tiny import Tiny

NAMES = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("timings")
    Tiny(context=4096).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


def whole(server: Running, route: str, **body: Any) -> Any:
    body = {"max_tokens": 6, "logit_bias": LETTERS} | body
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60).json()


def chunks(server: Running, route: str, **body: Any) -> list[Any]:
    body = {"max_tokens": 6, "logit_bias": LETTERS, "stream": True} | body
    with httpx.stream("POST", f"{server.url}/v1/{route}", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("route", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_every_answer_has_timings(server: Running, route: str, body: Any) -> None:
    first = whole(server, route, **body, everwarm={"cache": False})
    timings, usage = first["timings"], first["usage"]
    assert set(timings) == NAMES
    assert (timings["cache_n"], timings["prompt_n"]) == (0, usage["prompt_tokens"])
    assert timings["predicted_n"] == usage["completion_tokens"] == 6
    assert all(timings[name] > 0 for name in NAMES - {"cache_n"})
    streamed = chunks(server, route, **body)
    assert [name for chunk in streamed for name in chunk if name == "timings"] == ["timings"]
    assert streamed[-1]["timings"]["predicted_n"] == 6


@pytest.mark.parametrize(("route", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_timings_per_token(server: Running, route: str, body: Any) -> None:
    found = chunks(server, route, **body, timings_per_token=True, stream_options={"include_usage": True})
    timed = [chunk["timings"] for chunk in found if "timings" in chunk]
    assert [one["predicted_n"] for one in timed] == [1, 2, 3, 4, 5, 6, 6]
    assert len({one["prompt_n"] + one["cache_n"] for one in timed}) == 1
    assert found[-1]["choices"] == []
    if route == "chat/completions":
        assert "timings" not in found[0]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "once " * 500}]}),
        ("completions", {"prompt": "twice " * 500}),
    ],
)
def test_progress_goes_from_what_is_cached_to_the_whole_prompt(server: Running, route: str, body: Any) -> None:
    plain = chunks(server, route, **body)
    for turn in range(2):
        found = chunks(server, route, **body, return_progress=True)
        reports = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
        total, cached = reports[0]["total"], reports[0]["cache"]
        assert total > 2500
        assert cached > 2000, turn  # the first request has computed it
        processed = [report["processed"] for report in reports]
        assert processed == sorted(set(processed))
        assert (processed[0], processed[-1]) == (cached, total)
        assert {(report["total"], report["cache"]) for report in reports} == {(total, cached)}
        first_token = next(at for at, chunk in enumerate(found) if _text(chunk))
        assert all("prompt_progress" not in chunk for chunk in found[first_token:])
        assert "".join(map(_text, found)) != ""
    assert not any("prompt_progress" in chunk for chunk in plain)


def _text(chunk: Any) -> str:
    choices = chunk["choices"]
    return (choices[0].get("text") or choices[0].get("delta", {}).get("content") or "") if choices else ""


def test_progress_is_told_when_there_is_some() -> None:
    active: Any = SimpleNamespace(progress=None, receipt=None)
    progress = PromptProgress(active)
    assert not progress.is_known
    assert progress.news(begun=False) == []
    active.receipt = SimpleNamespace(cached_tokens=10)
    seen = []
    for computed, begun in ((10, False), (10, False), (50, False), (50, False), (99, False), (100, True), (100, True)):
        active.progress = Progress(100, computed)
        seen.append([report["processed"] for report in progress.news(begun)])
    assert seen == [[10], [], [50], [], [99], [100], []]
    assert progress.complete


def test_one_token_has_no_speed() -> None:
    timings = Timings()
    timings.token()
    told = timings.told(Usage(5, 5, 1))
    assert (told["predicted_n"], told["predicted_per_second"], told["prompt_per_second"]) == (1, 0.0, 0.0)


def test_null_and_wrong_values(server: Running) -> None:
    assert chunks(server, "completions", **TEXT, return_progress=None, timings_per_token=None)
    reply = httpx.post(server.url + "/v1/completions", json=TEXT | {"return_progress": "often"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_progress")
