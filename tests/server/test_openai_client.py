"""OpenAI's own client against a real server: what it sends is understood, what it gets is what it expects."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from running import LETTERS, TOOLS_TEMPLATE, Running, process, running

from everwarm.kv.chain import token_bytes
from everwarm.server.serving import Limits
from tiny import Tiny

Json = dict[str, Any]

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look it up", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("openai")
    Tiny(context=512, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: Sequence[Any] = HI, **options: Any) -> ChatCompletion:
    """Greedy letters, unless told otherwise; the response must be exactly of the client's types."""
    given = {"model": "tiny", "temperature": 0, "max_tokens": 8, "logit_bias": LETTERS} | options
    raw = client.chat.completions.with_raw_response.create(messages=list(messages), **given)
    return ChatCompletion.model_validate_json(raw.http_response.text, strict=True)


def stream(client: OpenAI, messages: Sequence[Any] = HI, **options: Any) -> list[ChatCompletionChunk]:
    given = {"model": "tiny", "temperature": 0, "max_tokens": 8, "logit_bias": LETTERS} | options
    chunks = list(client.chat.completions.create(messages=list(messages), stream=True, **given))
    return [ChatCompletionChunk.model_validate_json(chunk.to_json(), strict=True) for chunk in chunks]


def text_of(answer: ChatCompletion, choice: int = 0) -> str:
    text = answer.choices[choice].message.content
    assert text is not None
    return text


def receipt(answer: Any) -> Json:
    found: Json = answer.model_extra["everwarm"]
    return found


def spells(server: Running, answer: Any, prompt: str) -> bool:
    """Whether the prompt had the tokens of this text."""
    ids = server.llm.tokenize(prompt, special=True)
    return bool(receipt(answer)["tokens_digest"] == hashlib.blake2b(token_bytes(ids), digest_size=16).hexdigest())


# Answers --------------------------------------------------------------------------------------------------------------


def test_an_answer_has_the_clients_types_and_counts_its_tokens(client: OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].finish_reason == "length"
    assert len(text_of(answer)) == 8
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.system_fingerprint


def test_a_stream_begins_with_the_role_and_spells_the_same_answer(client: OpenAI) -> None:
    chunks = stream(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(ask(client))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream_comes_last_and_only_if_asked_for(client: OpenAI) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    whole, last = ask(client).usage, chunks[-1].usage
    assert whole is not None
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_plain_completions_continue_a_text_or_tokens(client: OpenAI, server: Running) -> None:
    options: Json = {"model": "tiny", "temperature": 0, "max_tokens": 6, "logit_bias": LETTERS}
    raw = client.completions.with_raw_response.create(prompt="Once", **options)
    answer = Completion.model_validate_json(raw.http_response.text, strict=True)
    assert len(answer.choices[0].text) == 6
    assert spells(server, answer, "Once")
    for prompt in (["Once"], [79, 110, 99, 101], [[79, 110, 99, 101]]):
        assert client.completions.create(prompt=prompt, **options).choices[0].text == answer.choices[0].text
    streamed = list(client.completions.create(prompt="Once", stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "length"


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "everwarm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# Messages -------------------------------------------------------------------------------------------------------------


def test_a_developer_speaks_as_the_system_does(client: OpenAI, server: Running) -> None:
    rendered = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for role in ("system", "developer"):
        assert spells(server, ask(client, [{"role": role, "content": "Be brief"}, *HI]), rendered)


def test_parts_of_text_are_read_in_their_order(client: OpenAI, server: Running) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    rendered = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert spells(server, ask(client, [{"role": "user", "content": parts[:1]}]), rendered.format("One"))
    assert spells(server, ask(client, [{"role": "user", "content": parts}]), rendered.format("One\nTwo"))


def test_tools_their_calls_and_their_results_are_rendered_by_the_template(client: OpenAI, server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"term": "x"}'}}
    talk = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Found"},
    ]
    assert spells(
        server,
        ask(client, talk, tools=[TOOL]),
        '<|im_start|>tools\nlook_up: Look it up {"type": "object", "properties": {}}\n<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n[look_up {"term": "x"}]<|im_end|>\n'
        "<|im_start|>tool\nFound<|im_end|>\n<|im_start|>assistant\n",
    )


def test_tools_are_not_shown_to_the_model_if_it_shall_not_call_any(client: OpenAI) -> None:
    assert (
        receipt(ask(client, tools=[TOOL], tool_choice="none"))["tokens_digest"]
        == (receipt(ask(client))["tokens_digest"])
    )


def test_control_tokens_in_a_message_are_only_text(client: OpenAI, server: Running) -> None:
    answer = ask(client, [{"role": "user", "content": "<|im_end|>"}])
    assert not spells(server, answer, "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n")


# Sampling -------------------------------------------------------------------------------------------------------------


def test_an_answer_ends_before_a_stop_string_that_spans_tokens(client: OpenAI) -> None:
    text = text_of(ask(client, max_tokens=20))
    stop = text[5:8]
    for wanted in (stop, ["never to be seen", stop]):
        answer = ask(client, max_tokens=20, stop=wanted)
        assert text_of(answer) == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        spelt = [chunk.choices[0].delta.content or "" for chunk in stream(client, max_tokens=20, stop=wanted)]
        assert "".join(spelt) == text[: text.index(stop)]


def test_what_only_looks_like_a_stop_string_is_let_through(client: OpenAI) -> None:
    text = text_of(ask(client))
    assert text_of(ask(client, stop=text[-2:] + "!")) == text


def test_the_models_end_token_ends_an_answer(client: OpenAI) -> None:
    answer = ask(client, logit_bias={"258": 100})
    assert (text_of(answer), answer.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_answer(client: OpenAI, name: str) -> None:
    answer = ask(client, **{"max_tokens": openai.omit, name: 3})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_seed_decides_the_answer(client: OpenAI) -> None:
    said = {seed: text_of(ask(client, temperature=2, seed=seed, max_tokens=16)) for seed in (1, 2, -1)}
    assert len(set(said.values())) == 3
    assert all(text_of(ask(client, temperature=2, seed=seed, max_tokens=16)) == text for seed, text in said.items())


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}])
def test_the_narrowest_choice_is_the_greedy_one(client: OpenAI, narrow: Json) -> None:
    assert text_of(ask(client, temperature=1, **narrow)) == text_of(ask(client))


@pytest.mark.parametrize(
    ("name", "value"), [("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("repetition_penalty", 1.5)]
)
def test_penalties_reach_the_sampler(client: OpenAI, server: Running, name: str, value: float) -> None:
    options: Json = {"extra_body": {name: value}, "max_tokens": 24}
    bias = {int(token): bias for token, bias in LETTERS.items()}
    direct = server.llm.generate(messages=HI, max_tokens=24, logit_bias=bias, cache=False, **{name: value})
    assert text_of(ask(client, **options)) == direct.text


def test_logprobs_tell_each_token_of_the_answer_and_its_rivals(client: OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=5)
    logged = answer.choices[0].logprobs
    assert logged is not None
    assert logged.content is not None
    assert "".join(entry.token for entry in logged.content) == text_of(answer)
    for entry in logged.content:
        assert len(entry.top_logprobs) == 5
        assert entry.bytes == list(entry.token.encode())
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    streamed = [chunk.choices[0].logprobs for chunk in stream(client, logprobs=True, top_logprobs=5)]
    assert [entry for part in streamed if part for entry in part.content or []] == logged.content


def test_logprobs_leave_out_the_end_token_and_stop_strings(client: OpenAI) -> None:
    text = text_of(ask(client, max_tokens=20))
    answer = ask(client, max_tokens=20, stop=text[5:8], logprobs=True)
    logged = answer.choices[0].logprobs
    assert logged is not None
    assert "".join(entry.token for entry in logged.content or []) == text_of(answer)
    ended = ask(client, logit_bias={"258": 100}, logprobs=True).choices[0].logprobs
    assert ended is not None
    assert ended.content == []


def test_legacy_logprobs_give_offsets_from_the_prompt_on(client: OpenAI) -> None:
    options: Json = {"model": "tiny", "temperature": 0, "max_tokens": 6, "logit_bias": LETTERS | {"259": 60}}
    choice = client.completions.create(prompt="Once", logprobs=2, **options).choices[0]
    logged = choice.logprobs
    assert logged is not None
    assert "".join(logged.tokens or []) == choice.text
    for offset, token, top in zip(
        logged.text_offset or [], logged.tokens or [], logged.top_logprobs or [], strict=True
    ):
        assert ("Once" + choice.text)[offset:].startswith(token)
        assert token in top
    alone = client.completions.create(prompt="Once", logprobs=0, **options).choices[0].logprobs
    assert alone is not None
    assert alone.token_logprobs == logged.token_logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(
        prompt="Once", logprobs=2, stream=True, **options
    )]  # fmt: skip
    assert [offset for part in parts if part for offset in part.text_offset or []] == logged.text_offset


def test_several_answers_differ_and_the_first_is_the_agents(client: OpenAI) -> None:
    who = {"extra_headers": {"X-Agent-Id": "several"}, "temperature": 2, "seed": 5, "max_tokens": 16}
    answer = ask(client, n=3, **who)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({text_of(answer, number) for number in range(3)}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48
    said = {"role": "assistant", "content": text_of(answer)}
    second = ask(client, [*HI, said, {"role": "user", "content": "And?"}], **who)
    assert receipt(second)["match"] == "extended"
    assert receipt(second)["cached_tokens"] >= answer.usage.prompt_tokens + 15


def test_a_stream_of_several_answers_tells_them_apart(client: OpenAI) -> None:
    chunks = stream(client, n=2, temperature=2, seed=7)
    said = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    whole = ask(client, n=2, temperature=2, seed=7)
    assert said == [text_of(whole, 0), text_of(whole, 1)]
    assert sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 2


# Agents ---------------------------------------------------------------------------------------------------------------


def test_a_header_or_the_body_names_an_agent_and_the_header_wins(client: OpenAI) -> None:
    body = {"everwarm": {"agent": "of the body"}}
    assert receipt(ask(client, extra_body=body))["agent"] == "of the body"
    header = {"X-Agent-Id": "of the header"}
    assert receipt(ask(client, extra_body=body, extra_headers=header))["agent"] == "of the header"


def test_a_returning_agent_is_told_what_was_reused(client: OpenAI) -> None:
    who = {"X-Agent-Id": "returning"}
    hello = {"role": "user", "content": "What nobody else has said"}
    first = ask(client, [hello], extra_headers=who)
    talk: list[Any] = [hello, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "And?"}]
    given: Json = {"model": "tiny", "temperature": 0, "max_tokens": 4, "logit_bias": LETTERS}
    raw = client.chat.completions.with_raw_response.create(messages=talk, extra_headers=who, **given)
    answer = ChatCompletion.model_validate_json(raw.http_response.text)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == receipt(answer)["cached_tokens"] == int(raw.headers["X-Everwarm-Cached-Tokens"])
    assert first.usage is not None
    assert cached == first.usage.total_tokens - 1  # the last token was said, not yet read
    assert (receipt(answer)["tier"], raw.headers["X-Everwarm-Tier"]) == ("hot", "hot")
    assert receipt(answer)["committed"] is True
    cold = ask(client, talk, max_tokens=4, extra_body={"everwarm": {"cache": False}})
    assert text_of(cold) == text_of(answer)


def test_the_last_chunk_of_a_stream_carries_the_receipt(client: OpenAI) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = stream(client, extra_headers={"X-Agent-Id": "streaming"}, **options)
        assert receipt(chunks[-1])["agent"] == "streaming"
        assert receipt(chunks[-1])["committed"] is True


def test_a_second_turn_of_an_agent_waits_for_the_first(client: OpenAI, server: Running) -> None:
    who = {"extra_headers": {"X-Agent-Id": "busy"}}
    ask(client, **who)
    with ThreadPoolExecutor() as threads:
        with server.llm.agents.open_turn("busy", 8):
            waiting = threads.submit(ask, client, **who)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            assert receipt(ask(client))["agent"] != "busy"  # others go on
        assert receipt(waiting.result(30))["agent"] == "busy"


def test_conversations_of_one_key_fork_where_they_differ_and_never_wait(client: OpenAI, server: Running) -> None:
    key = {"prompt_cache_key": "key"}
    begun = [{"role": "system", "content": "Begin " * 8}, *HI]
    first = ask(client, begun, **key)
    went_on = [*begun, {"role": "assistant", "content": text_of(first)}]
    branch = receipt(first)["agent"]
    continued = ask(client, [*went_on, {"role": "user", "content": "A"}], **key)
    assert receipt(continued)["agent"] == branch
    other = ask(client, [*went_on, {"role": "user", "content": "B"}], **key)
    assert receipt(other)["agent"] != branch
    assert first.usage is not None
    assert receipt(other)["cached_tokens"] >= first.usage.prompt_tokens
    with server.llm.agents.open_turn(branch, 8):
        again = [*went_on, {"role": "user", "content": "A"}, {"role": "assistant", "content": text_of(continued)}]
        at_once = ask(client, [*again, {"role": "user", "content": "Go on"}], **key)
    assert receipt(at_once)["agent"] not in (branch, receipt(other)["agent"])
    assert receipt(at_once)["cached_tokens"] > receipt(other)["cached_tokens"]


# Limits and errors ----------------------------------------------------------------------------------------------------


def test_a_full_context_ends_the_answer_as_length(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    with (
        running(tmp_path / "tiny.gguf", tmp_path, limits=Limits(context=64)) as server,
        OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        answer = ask(client, max_tokens=1000)
        assert answer.usage is not None
        assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (64, "length")
        with pytest.raises(openai.BadRequestError, match="the context is 64") as refused:
            ask(client, [{"role": "user", "content": "x" * 100}])
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages.0.role"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "gone"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "100000"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"extra_headers": {"X-Agent-Id": "x" * 300}}, "256"),
    ],
)
def test_what_is_not_supported_is_a_bad_request(client: OpenAI, change: Json, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **change)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "invalid_request_error"
    assert named in refused.value.body["message"]


def test_embeddings_are_refused_in_words(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not made for embeddings"):
        client.embeddings.create(model="tiny", input="Hi", encoding_format="float")


def test_keys_decide_who_may_ask_and_what_is_shared(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    talk = [{"role": "user", "content": "The same long question. " * 4}]
    with running(tmp_path / "tiny.gguf", tmp_path, keys={"k1": "a", "k2": "a", "k3": "b"}) as server:

        def cached(key: str) -> int:
            with OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
                found: int = receipt(ask(client, talk))["cached_tokens"]
                return found

        with pytest.raises(openai.AuthenticationError):
            cached("k4")
        assert cached("k1") == 0
        assert cached("k3") == 0
        assert cached("k2") > 0


# A process ------------------------------------------------------------------------------------------------------------


def test_a_process_serves_and_its_agents_outlive_it(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    talk: list[Any] = list(HI)
    tiers = []
    for _ in range(2):
        with (
            process(tmp_path / "tiny.gguf", home=tmp_path / "home") as url,
            OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client,
        ):
            answer = ask(client, talk, extra_headers={"X-Agent-Id": "survivor"})
            tiers.append(receipt(answer)["tier"])
            talk += [{"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": "And?"}]
    assert tiers == ["cold", "warm"]


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_answers_and_goes_on(smollm2_path: Path, tmp_path: Path) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
    with (
        process(smollm2_path, "--weight-budget", "100%", home=tmp_path) as url,
        OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client,
    ):
        options: Json = {"logit_bias": {}, "max_tokens": 24, "extra_headers": {"X-Agent-Id": "geographer"}}
        first = ask(client, question, **options)
        assert "Paris" in text_of(first)
        talk = [*question, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Of Italy?"}]
        chunks = stream(client, talk, **options)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert receipt(chunks[-1])["match"] == "extended"
        cold = ask(client, talk, **options | {"extra_headers": {}, "extra_body": {"everwarm": {"cache": False}}})
        assert text == text_of(cold)
        logged = ask(client, question, logit_bias={}, logprobs=True, top_logprobs=3).choices[0].logprobs
        assert logged is not None
        assert json.dumps([entry.token for entry in logged.content or []])


def test_unknown_fields_are_ignored_and_named(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=3,
        extra_body={"speak": True, "num_ctx": 4096, "quiet": None},
    )  # fmt: skip
    assert raw.headers["x-everwarm-ignored"] == "num_ctx, speak"
    assert "x-everwarm-ignored" not in client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, user="ada"
    ).headers  # fmt: skip


def test_fields_of_other_servers_are_understood(client: OpenAI) -> None:
    def ask(**extra: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Dialects"}], temperature=0, extra_body=extra
        )

    assert ask(n_predict=3, ignore_eos=True).usage.completion_tokens == 3
    assert ask(max_tokens=2, n_predict=9, ignore_eos=True).usage.completion_tokens == 2
    for extra in (
        {"top_k": -1},
        {"top_k": None},
        {"min_p": None},
        {"repeat_penalty": 1.5},
        {"max_completion_tokens": -1},
    ):
        assert ask(max_tokens=2, **extra).choices[0].finish_reason in ("length", "stop")
    assert ask(max_tokens=2, cache_prompt=False).model_extra["everwarm"]["cause"] == "off"
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    called = ask(max_tokens=60, functions=[function], function_call={"name": "look"})
    assert called.choices[0].message.tool_calls[0].function.name == "look"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]}, "modalities"),
    ],
)
def test_errors_name_the_field_as_openai_does(server: Running, body: Json, param: str) -> None:
    error = httpx.post(server.url + "/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "Value error" not in error["message"]
