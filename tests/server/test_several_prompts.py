"""Several prompts in one request of plain completions: each is answered as if it had been sent alone."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from running import LETTERS, Running, running

from everwarm.server.serving import Limits
from tiny import Tiny

PROMPTS = ["Once", "Twice upon a time", "Thrice", "zq"]
SETTINGS: Any = {"model": "tiny", "temperature": 1.5, "seed": 7, "max_tokens": 9, "logit_bias": LETTERS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("prompts")
    Tiny(context=512).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home, limits=Limits(most_choices=3, most_prompts=5)) as server:
        yield server


def alone(client: OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(prompt=prompt, **SETTINGS | more)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_choices_are_numbered_prompt_by_prompt(client: OpenAI, n: int) -> None:
    raw = client.completions.with_raw_response.create(prompt=PROMPTS, n=n, **SETTINGS)
    found = Completion.model_validate_json(raw.http_response.text, strict=True)
    singles = [alone(client, prompt, n=n) for prompt in PROMPTS]
    assert [choice.index for choice in found.choices] == list(range(len(PROMPTS) * n))
    assert [choice.text for choice in found.choices] == [one.text for single in singles for one in single.choices]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(single.usage.prompt_tokens for single in singles)
    assert found.usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)


def test_every_prompt_has_a_receipt(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(prompt=["Once more " * 20, "And again " * 30], **SETTINGS)
    again = client.completions.with_raw_response.create(prompt=["Once more " * 20, "And again " * 30], **SETTINGS)
    first, second = raw.http_response.json(), again.http_response.json()
    assert [one["prompt_tokens"] for one in first["everwarm"]["prompts"]] == [200, 300]
    assert [one["tier"] for one in second["everwarm"]["prompts"]] == ["hot", "hot"]
    cached = sum(one["cached_tokens"] for one in second["everwarm"]["prompts"])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == cached > 400
    assert "x-everwarm-tier" not in raw.headers


def test_a_stream_tells_them_apart(client: OpenAI) -> None:
    whole = alone(client, PROMPTS, n=2)
    texts, finishes, usage = [""] * 8, [None] * 8, None
    for chunk in alone(client, PROMPTS, n=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == ["length"] * 8
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_lists_of_token_ids(server: Running, client: OpenAI) -> None:
    ids = [server.llm.tokenize(prompt) for prompt in PROMPTS]
    assert [one.text for one in alone(client, ids).choices] == [one.text for one in alone(client, PROMPTS).choices]
    assert len(alone(client, ids[0]).choices) == 1


def test_offsets_count_from_the_beginning_of_their_own_prompt(client: OpenAI) -> None:
    found = alone(client, PROMPTS, logprobs=1)
    for prompt, choice in zip(PROMPTS, found.choices, strict=True):
        assert choice.logprobs.text_offset == list(range(len(prompt), len(prompt) + 9))


def test_what_can_not_be_answered_is_refused(server: Running, client: OpenAI) -> None:
    for prompt, why in ((["a"] * 6, "the limit is 5"), ([], "empty"), (["a", ""], "empty"), (["a", 5], "prompt")):
        with pytest.raises(openai.BadRequestError, match=why):
            alone(client, prompt)
    with pytest.raises(openai.BadRequestError, match="an agent has one turn"):
        alone(client, PROMPTS, extra_headers={"X-Agent-Id": "one"})
    with pytest.raises(openai.BadRequestError, match="context"):
        alone(client, ["fine", "far too long " * 100])
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_client_that_leaves_ends_all_of_them(server: Running) -> None:
    body = SETTINGS | {"prompt": PROMPTS, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    quick = SETTINGS | {"prompt": "Once", "max_tokens": 2}
    assert httpx.post(server.url + "/v1/completions", json=quick, timeout=60).status_code == 200
