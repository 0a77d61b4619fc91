"""How requests are sampled that don't say so: request, server, file, built in, in this order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, process, running

import everwarm
from everwarm.engine.sampling import file_sampling
from everwarm.server.sampling import BUILT_IN, sampling_of
from everwarm.settings import ServeSettings
from tiny import Tiny

FILE = {"temp": 0.0, "top_k": 3, "top_p": 0.6, "min_p": 0.1, "penalty_repeat": 1.5, "penalty_last_n": 64}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("defaults")
    Tiny(context=512, sampling=FILE).write(home / "tiny.gguf")
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Running]:
    with running(home / "tiny.gguf", home) as server:
        yield server


def asked(server: Running, route: str = "chat/completions", **more: Any) -> Any:
    kind = "input" if route == "responses" else "prompt" if route == "completions" else "messages"
    most = "max_output_tokens" if route == "responses" else "max_tokens"
    body = {kind: HI if kind == "messages" else "Hi", most: 12} | more
    reply = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    if "output" in found:
        return found["output"][0]["content"]
    return found["choices"] if "choices" in found else found["content"]


def test_what_the_file_recommends_is_what_the_gguf_package_wrote(home: Path) -> None:
    with everwarm.load(home / "tiny.gguf", warm="off") as llm:
        wanted = {"temperature": 0.0, "top_k": 3, "top_p": 0.6, "min_p": 0.1, "repetition_penalty": 1.5}
        assert llm.file_sampling == wanted
        greedy = llm.generate("Hi", max_tokens=12, cache=False).tokens  # of the library the defaults stay as they are
        same = llm.generate("Hi", max_tokens=12, cache=False, temperature=0.0, repetition_penalty=1.0).tokens
    assert greedy == same


def test_values_that_can_not_be_used_are_left_out() -> None:
    wrong = {"temp": -1.0, "top_p": "much", "min_p": float("nan"), "penalty_repeat": 0.0, "top_k": -1}
    assert file_sampling({f"general.sampling.{name}": value for name, value in wrong.items()}) == {"top_k": 0}


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
def test_the_file_counts_where_a_request_says_nothing(server: Running, route: str) -> None:
    said = asked(server, route)
    assert said == asked(server, route)
    extra = {"repetition_penalty": 1.5} if "completions" in route else {}
    assert said == asked(server, route, temperature=0, **extra)
    others = [asked(server, route, temperature=90, top_k=200, top_p=1) for _ in range(3)]
    assert any(other != said for other in others)


def test_a_setting_of_the_server_wins_over_the_file(home: Path) -> None:
    hot = {"temperature": 90.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    with running(home / "tiny.gguf", home, sampling=hot) as server:
        said = asked(server)
        assert said == asked(server)  # it has a seed
        assert said == asked(server, temperature=90, seed=5, top_k=-1)
        assert said != asked(server, seed=6)
        assert said != asked(server, temperature=0)
        two = asked(server, n=2)
        assert two[0] == said[0]
        assert two[1]["message"] != said[0]["message"]  # choices of one request differ all the same


def test_settings_have_the_names_of_llama_cpp(home: Path) -> None:
    settings = ServeSettings(temp=0.5, repeat_penalty=1.1, seed=7, top_k=4)
    assert sampling_of(settings) == {"temperature": 0.5, "repetition_penalty": 1.1, "seed": 7, "top_k": 4}
    assert sampling_of(ServeSettings()) == {}
    flags = ("--temp", "90", "--seed", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--n-predict", "7")
    with process(home / "tiny.gguf", *flags, home=home) as url:
        body = {"messages": HI, "logit_bias": {"258": -100, "256": -100}}
        first, second = (httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json() for _ in range(2))
    assert first["usage"]["completion_tokens"] == 7
    assert first["choices"] == second["choices"]


def test_built_in_defaults_are_those_of_openai(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    with running(tmp_path / "tiny.gguf", tmp_path) as server:
        built_in = {name: value for name, value in BUILT_IN.items() if name != "seed"}
        assert asked(server, seed=3) == asked(server, seed=3, **built_in)
        assert built_in["temperature"] == built_in["top_p"] == 1.0
