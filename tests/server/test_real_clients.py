"""Every feature of both APIs through the official clients, on a real model in a server process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import FILE, process

pytestmark = [pytest.mark.model, pytest.mark.slow]

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a dog and a cat."}]
COUNT: list[Any] = [{"role": "user", "content": "Count from one to nine in words, separated by commas."}]


@pytest.fixture(scope="module")
def url(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with process(smollm2_path, "--context", "1024", home=tmp_path_factory.mktemp("home")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: list[Any] = CAPITAL, **options: Any) -> Any:
    given = {"model": "any", "temperature": 0, "max_tokens": 24} | options
    return client.chat.completions.create(messages=messages, **given)


def said(answer: Any, choice: int = 0) -> str:
    return str(answer.choices[choice].message.content)


def receipt(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["everwarm"]
    return found


# OpenAI ---------------------------------------------------------------------------------------------------------------


def test_answers_streams_and_usage(client: OpenAI) -> None:
    answer = ask(client)
    assert "Paris" in said(answer)
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said(answer)
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert receipt(chunks[-1])["match"] == "exact"


def test_limits_and_stops(client: OpenAI) -> None:
    whole = said(ask(client, COUNT, max_tokens=60))
    for name in ("max_tokens", "max_completion_tokens"):
        short = ask(client, COUNT, **{"max_tokens": None} | {name: 5})
        assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (5, "length")
        assert whole.startswith(said(short))
    stop = whole[len(whole) // 2 :][:5]  # it spans tokens
    stopped = ask(client, COUNT, max_tokens=60, stop=["never to be seen", stop])
    assert said(stopped) == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_sampling(client: OpenAI) -> None:
    draw = {"temperature": 1.5, "max_tokens": 16}
    assert said(ask(client, COUNT, seed=1, **draw)) == said(ask(client, COUNT, seed=1, **draw))
    assert said(ask(client, COUNT, seed=1, **draw)) != said(ask(client, COUNT, seed=2, **draw))
    greedy = said(ask(client, COUNT, max_tokens=16))
    for narrow in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert said(ask(client, COUNT, seed=3, **draw | narrow)) == greedy
    story = said(ask(client, STORY, max_tokens=40))
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 1.5}}):
        assert said(ask(client, STORY, **{"max_tokens": 40} | penalty)) != story
    first = ask(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].token
    forbidden = httpx.post(f"{client.base_url}tokenize", json={"text": first}).json()["tokens"][0]
    assert not said(ask(client, logit_bias={str(forbidden): -100})).startswith(first)


def test_several_choices_and_logprobs(client: OpenAI) -> None:
    several = ask(client, COUNT, n=3, temperature=1.5, seed=5, max_tokens=12)
    assert len({said(several, number) for number in range(3)}) == 3
    logged = ask(client, COUNT, logprobs=True, top_logprobs=3, max_tokens=8).choices[0].logprobs.content
    assert len(logged) == 8
    assert all(entry.top_logprobs[0].token == entry.token for entry in logged)  # greedy


def test_roles_parts_and_what_is_refused(client: OpenAI) -> None:
    developer = {
        "role": "developer",
        "content": [{"type": "text", "text": "Answer with"}, {"type": "text", "text": " OK"}],
    }
    assert said(ask(client, [developer, *CAPITAL]))
    result = {"role": "tool", "content": "21 degrees", "tool_call_id": "1"}
    assert said(ask(client, [*CAPITAL, {"role": "assistant", "content": "I look it up."}, result]))
    tool: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    assert said(ask(client, tools=[tool]))
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}})
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, [{"role": "user", "content": "far too long " * 1000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="any", input="Hi")


def test_plain_completions_models_and_the_end_of_the_context(client: OpenAI) -> None:
    whole = client.completions.create(model="any", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in whole.choices[0].text
    parts = client.completions.create(
        model="any", prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(client.models.list().data) == 1
    long = "one two three four " * 250
    answer = client.completions.create(model="any", prompt=long, max_tokens=1000, temperature=0)
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (1024, "length")


def test_agents_groups_and_the_agents_api(client: OpenAI, url: str) -> None:
    who = {"extra_headers": {"X-Agent-Id": "geographer"}}
    first = ask(client, **who)
    talk = [*CAPITAL, {"role": "assistant", "content": said(first)}, {"role": "user", "content": "And of Italy?"}]
    second = ask(client, talk, **who)
    assert receipt(second)["match"] == "extended"
    cold = ask(client, talk, extra_body={"everwarm": {"cache": False}})
    assert said(second) == said(cold)
    group = {"extra_body": {"prompt_cache_key": "key"}}
    branch = receipt(ask(client, **group))["agent"]
    assert branch.startswith("key-")
    assert receipt(ask(client, talk, **group))["cached_tokens"] > 0
    with httpx.Client(base_url=url, timeout=60) as http:
        agents = "/v1/agents/geographer"
        assert http.get(agents).json()["messages"][0] == CAPITAL[0]
        assert http.post(f"{agents}/fork", json={"name": "twin"}).status_code == 201
        assert http.delete(f"{agents}?evict_only=true").json()["tier"] in ("warm", "hot")  # the twin shares its blocks
        assert http.post(f"{agents}/warm").json()["tier"] in ("warm", "hot")
        assert http.post(f"{agents}/pin").json()["pinned"] is True
        exported = http.post(f"{agents}/export").content
        assert http.post("/v1/agents/import?name=copy", content=exported, headers=FILE).json()["id"] == "copy"
        copy = ask(client, talk, extra_headers={"X-Agent-Id": "copy"})
        assert (said(copy), receipt(copy)["match"]) == (said(second), "exact")
        for name in ("geographer", "twin", "copy"):
            assert http.delete(f"/v1/agents/{name}").json()["deleted"] is True
        assert http.get(agents).status_code == 404


GREEDY: Any = {"extra_body": {"temperature": 0}}

# Anthropic ------------------------------------------------------------------------------------------------------------


def test_messages_and_their_events(claude: Anthropic) -> None:
    options: Any = {"model": "any", "max_tokens": 24, "system": "You are a geographer."} | GREEDY
    answer = claude.messages.create(messages=CAPITAL, metadata={"user_id": "me"}, **options)
    assert isinstance(answer.content[0], anthropic.types.TextBlock)
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    counted = claude.messages.count_tokens(model="any", messages=CAPITAL, system=options["system"]).input_tokens
    assert (answer.usage.cache_read_input_tokens or 0) + answer.usage.input_tokens == counted
    with claude.messages.stream(messages=CAPITAL, metadata={"user_id": "me"}, **options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert isinstance(final.content[0], anthropic.types.TextBlock)
    assert final.content[0].text == answer.content[0].text
    assert final.usage.cache_read_input_tokens == counted - 1


def test_messages_stop_and_limit(claude: Anthropic) -> None:
    options: Any = {"model": "any", "messages": STORY} | GREEDY
    whole = claude.messages.create(max_tokens=40, **options).content[0]
    assert isinstance(whole, anthropic.types.TextBlock)
    stop = whole.text[20:26]
    stopped = claude.messages.create(max_tokens=40, stop_sequences=[stop], **options)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert claude.messages.create(max_tokens=3, **options).stop_reason == "max_tokens"
    # A model that does not think answers all the same.
    asked = claude.messages.create(max_tokens=40, thinking={"type": "enabled", "budget_tokens": 1024}, **options)
    assert asked.content[0] == whole


def test_one_weight_cache_serves_all_of_it(client: OpenAI, url: str) -> None:
    def metrics() -> list[str]:
        shown = httpx.get(url + "/metrics").text.splitlines()
        wanted = ("everwarm_weight_cache_info", "everwarm_weight_cache_misses_total")
        return [line for line in shown if line.startswith(wanted)]

    before = metrics()
    for number in range(20):  # a hundred of them: see test_ops.py
        ask(client, [{"role": "user", "content": f"Say {number}"}], max_tokens=2)
    assert metrics() == before
    assert json.dumps(before).count(" 0.0") == 1  # no miss at all
