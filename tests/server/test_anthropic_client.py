"""Anthropic's own client against a real server."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from running import TOOLS_TEMPLATE, Running, process, running

from everwarm.kv.chain import token_bytes
from everwarm.server.serving import Limits
from tiny import Tiny

Json = dict[str, Any]

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "look_up", "description": "Look it up", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("anthropic")
    Tiny(context=512, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


def ask(client: Anthropic, messages: Any = HI, *, body: Json | None = None, **options: Any) -> Message:
    """Greedy; the response must be exactly of the client's types."""
    given = {"model": "tiny", "max_tokens": 8} | options
    raw = client.messages.with_raw_response.create(
        messages=messages, extra_body={"temperature": 0} | (body or {}), **given
    )
    return Message.model_validate_json(raw.http_response.text, strict=True)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def receipt(message: Any) -> Json:
    found: Json = message.model_extra["everwarm"]
    return found


def spells(server: Running, message: Message, prompt: str) -> bool:
    ids = server.llm.tokenize(prompt, special=True)
    return bool(receipt(message)["tokens_digest"] == hashlib.blake2b(token_bytes(ids), digest_size=16).hexdigest())


def same_as_openai(server: Running, **options: Any) -> str:
    """The answer of the same model to the same question over the other API."""
    body = {"messages": HI, "temperature": 0, "max_tokens": 8} | options
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


# Answers --------------------------------------------------------------------------------------------------------------


def test_an_answer_has_the_clients_types_and_is_the_models(client: Anthropic, server: Running) -> None:
    message = ask(client)
    assert text_of(message) == same_as_openai(server)
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "max_tokens")
    assert message.usage.output_tokens == 8


def test_a_stream_has_every_event_in_its_order(server: Running) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0, "stream": True}
    lines = httpx.post(server.url + "/v1/messages", json=body, timeout=60).text.split("\n\n")
    names = [line.split("\n")[0].removeprefix("event: ") for line in lines if line]
    deltas = names.count("content_block_delta")
    assert deltas >= 1
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_clients_stream_collects_the_same_message(client: Anthropic) -> None:
    whole = ask(client)
    events = []
    with client.messages.stream(model="tiny", max_tokens=8, messages=HI, extra_body={"temperature": 0}) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert text_of(message) == text_of(whole)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 8
    start = next(event for event in events if event.type == "message_start")
    usage = start.message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == 21
    delta = next(event for event in events if event.type == "message_delta")
    assert receipt(delta)["committed"] is True


def test_raw_events_are_exactly_of_the_clients_types(client: Anthropic) -> None:
    stream = client.messages.create(model="tiny", max_tokens=8, messages=HI, stream=True, extra_body={"temperature": 0})
    for event in stream:
        type(event).model_validate_json(event.to_json(), strict=True)


def test_an_empty_answer_has_no_content(client: Anthropic) -> None:
    first = text_of(ask(client))[0]
    message = ask(client, stop_sequences=[first])
    assert (message.content, message.stop_sequence) == ([], first)
    with client.messages.stream(
        model="tiny", max_tokens=8, messages=HI, stop_sequences=[first], extra_body={"temperature": 0}
    ) as stream:
        assert stream.get_final_message().content == []


# Prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Be brief", [{"type": "text", "text": "Be brief"}]])
def test_the_system_prompt_is_a_text_or_blocks(client: Anthropic, server: Running, system: Any) -> None:
    assert spells(
        server,
        ask(client, system=system),
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    )


def test_consecutive_turns_of_one_side_are_one_turn(client: Anthropic, server: Running) -> None:
    blocks = [
        {"type": "text", "text": "Two", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Three"},
    ]
    talk = [{"role": "user", "content": "One"}, {"role": "user", "content": blocks}]
    assert spells(server, ask(client, talk), "<|im_start|>user\nOne\nTwo\nThree<|im_end|>\n<|im_start|>assistant\n")


def test_tools_their_use_and_their_results_are_rendered_by_the_template(client: Anthropic, server: Running) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"term": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Found"}]}
    talk = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    assert spells(
        server,
        ask(client, talk, tools=[TOOL]),
        '<|im_start|>tools\nlook_up: Look it up {"type": "object", "properties": {}}\n<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\nLet me see[look_up {"term": "x"}]<|im_end|>\n'
        "<|im_start|>tool\nFound<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n",
    )


def test_tokens_are_counted_as_they_will_be_used(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HI, system="Be brief", tools=[TOOL])
    usage = ask(client, system="Be brief", tools=[TOOL]).usage
    used = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == used


# Ends and sampling ----------------------------------------------------------------------------------------------------


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    text = text_of(ask(client, max_tokens=20))
    stop = text[4:7]
    message = ask(client, max_tokens=20, stop_sequences=["never to be seen", stop])
    assert text_of(message) == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_full_context_is_told_from_max_tokens(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    with (
        running(tmp_path / "tiny.gguf", tmp_path, limits=Limits(context=48)) as server,
        Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        assert ask(client, max_tokens=500).stop_reason == "model_context_window_exceeded"
        assert ask(client, max_tokens=5).stop_reason == "max_tokens"


def test_top_k_of_one_is_greedy(client: Anthropic) -> None:
    assert text_of(ask(client, body={"temperature": 1, "top_k": 1})) == text_of(ask(client))
    assert text_of(ask(client, body={"temperature": 1, "top_p": 1e-6})) == text_of(ask(client))


# Agents and usage -----------------------------------------------------------------------------------------------------


def test_usage_divides_the_prompt_as_the_receipt_does(client: Anthropic) -> None:
    who = {"extra_headers": {"X-Agent-Id": "accountant"}}
    marked = {"type": "text", "text": "What nobody else has said", "cache_control": {"type": "ephemeral"}}
    hello = {"role": "user", "content": [marked]}
    first = ask(client, [hello], **who)
    prompt = receipt(first)["prompt_tokens"]
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (0, receipt(first)["cached_tokens"])
    assert first.usage.cache_creation_input_tokens == prompt - receipt(first)["cached_tokens"]
    said = {"role": "assistant", "content": first.content}  # as the client got it
    second = ask(client, [hello, said, {"role": "user", "content": "And?"}], **who)
    assert receipt(second)["agent"] == "accountant"
    assert second.usage.cache_read_input_tokens == receipt(second)["cached_tokens"] >= prompt
    assert second.usage.cache_creation_input_tokens == (
        receipt(second)["prompt_tokens"] - receipt(second)["cached_tokens"]
    )


def test_a_client_that_marks_nothing_for_the_cache_counts_input_plainly(client: Anthropic) -> None:
    hello = {"role": "user", "content": "Nobody has marked this"}
    usage, found = (answer := ask(client, [hello])).usage, receipt(answer)
    assert usage.input_tokens == found["prompt_tokens"] - found["cached_tokens"] > 0
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, found["cached_tokens"])


def test_what_a_text_model_can_not_read_is_replaced_by_a_note(client: Anthropic, server: Running) -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "One."},
    }
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": {}}]}
    messages = [
        {"role": "user", "content": [{"type": "image", "source": {}}, document, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, call],
        },
        {"role": "user", "content": [found]},
    ]
    answer = ask(client, messages, extra_headers={"X-Agent-Id": "seer"})
    told = server.llm.agents.history(server.llm.agents.find(receipt(answer)["agent"])).messages or ()
    parts = [part["text"] for part in told[0]["content"]]
    assert parts == ["[image left out: this model reads text only]", "Notes:\nOne.", "?"]
    assert [call["function"]["name"] for call in told[1]["tool_calls"]] == ["look"]
    assert told[2]["content"] == "[image left out: this model reads text only]"


def test_what_has_no_effect_is_named(client: Anthropic) -> None:
    raw = client.messages.with_raw_response.create(
        model="tiny", messages=HI, max_tokens=4, tools=[{"type": "web_search_20250305", "name": "web_search"}],
        extra_body={"mcp_servers": [{"url": "x"}], "context_management": {"edits": []}},
    )  # fmt: skip
    assert raw.headers["x-everwarm-ignored"] == "mcp_servers, tools of type web_search_20250305"
    odd: Any = [{"type": ["a"], "name": "x"}, {"type": ["a"], "name": "y"}]
    raw = client.messages.with_raw_response.create(model="tiny", messages=HI, max_tokens=4, tools=odd)
    assert raw.headers["x-everwarm-ignored"] == "tools of type ['a']"
    for more, named in (({"\tx ": 1}, "?x"), ({" ": 1}, None), ({"a" * 499 + " b": 1}, "a" * 499)):
        raw = client.messages.with_raw_response.create(model="tiny", messages=HI, max_tokens=4, extra_body=more)
        assert raw.headers.get("x-everwarm-ignored") == named  # spaces around it would be no header


def test_an_answer_that_was_begun_is_continued(client: Anthropic, server: Running) -> None:
    begun = ask(client, [*HI, {"role": "assistant", "content": "Well, let"}], body={"temperature": 0})
    assert receipt(begun)["prompt_tokens"] == receipt(ask(client, HI))["prompt_tokens"] + len("Well, let")
    segments, _ = server.llm.segments(messages=[*HI, {"role": "assistant", "content": "Well, let"}])
    assert segments[-1].text == "Well, let"


def test_a_line_for_billing_does_not_make_every_prompt_a_new_one(client: Anthropic) -> None:
    rules = {"type": "text", "text": "Rules that are the same in each session. " * 3}
    answers = []
    for number in range(2):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1.2.3.{number}; cch={number * 77};"}
        answers.append(ask(client, [{"role": "user", "content": f"Session {number}"}], system=[header, rules]))
    assert receipt(answers[1])["cached_tokens"] > len(rules["text"])


def test_the_session_in_a_user_id_names_the_group(client: Anthropic, server: Running) -> None:
    user_id = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "0b5e-session"})
    answer = ask(client, [{"role": "user", "content": "In a session"}], metadata={"user_id": user_id})
    assert server.llm.agents.find(receipt(answer)["agent"]).group == "0b5e-session"


def test_without_a_cache_all_input_is_plain_input(client: Anthropic) -> None:
    usage = ask(client, body={"everwarm": {"cache": False}}).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (21, 0, 0)


def test_a_user_id_names_a_group_that_never_waits(client: Anthropic, server: Running) -> None:
    group = {"metadata": {"user_id": "someone"}}
    first = ask(client, [{"role": "user", "content": "In a group"}], **group)
    branch = receipt(first)["agent"]
    assert server.llm.agents.find(branch).group == "someone"
    with server.llm.agents.open_turn(branch, 8):
        assert receipt(ask(client, [{"role": "user", "content": "In a group"}], **group))["agent"] != branch


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "'thinking'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]},
            "no tool_use block",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": []}]}],
                    },
                ]
            },
            "messages.1.content.0.content.0",
        ),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"system": [{"type": "image"}]}, "system.0"),
    ],
)
def test_what_is_not_supported_is_a_bad_request_in_anthropics_shape(
    client: Anthropic, change: Json, named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, **change)
    body = refused.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]


def test_a_key_is_asked_for_in_anthropics_header(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    with running(tmp_path / "tiny.gguf", tmp_path, keys={"secret": "a"}) as server:
        with Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            assert ask(client).usage.output_tokens == 8
            assert [model.id for model in client.models.list()] == ["tiny"]
        with Anthropic(base_url=server.url, api_key="guessed", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                ask(client)
            assert isinstance(refused.value.body, dict)
            assert refused.value.body["error"]["type"] == "authentication_error"


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_answers_and_goes_on(smollm2_path: Path, tmp_path: Path) -> None:
    with (
        process(smollm2_path, home=tmp_path) as url,
        Anthropic(base_url=url, api_key="any", max_retries=0) as client,
    ):
        question = {"role": "user", "content": "What is the capital of France? One word."}
        options: Json = {"model": "smollm2", "max_tokens": 24, "metadata": {"user_id": "geographer"}}
        first = ask(client, [question], **options)
        assert "Paris" in text_of(first)
        assert first.stop_reason == "end_turn"
        talk: list[Any] = [
            question,
            {"role": "assistant", "content": text_of(first)},
            {"role": "user", "content": "Why?"},
        ]
        with client.messages.stream(messages=talk, extra_body={"temperature": 0}, **options) as stream:
            second = stream.get_final_message()
        assert (second.usage.cache_read_input_tokens or 0) >= receipt(first)["prompt_tokens"]
        cold = ask(client, talk, body={"everwarm": {"cache": False}}, **options)
        assert text_of(second) == text_of(cold)
