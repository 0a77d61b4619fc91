"""The Responses API, with the official client against a real server."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from running import TOOLS_TEMPLATE, Running, running

from everwarm.server.openai.responses.items import messages_of, tools_of
from output_parsers import ANSWER, Says, TagParser
from tiny import Tiny

Json = dict[str, Any]
TOOL: Any = {
    "type": "function", "name": "add", "description": "Adds.", "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("responses")
    Tiny(context=2048, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Running]:
    with running(home / "tiny.gguf", home) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def speaking(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The model says `ANSWER`, and a parser reads it."""
    llm = server.llm
    ids = [*llm.tokenize(ANSWER), 258]
    constraint = partial(Says, ids, llm.config.vocab_size)
    monkeypatch.setattr(llm, "start", partial(llm.start, constraint=constraint, parser=TagParser))
    return server


def ask(client: OpenAI, text: Any, **more: Any) -> Any:
    return client.responses.create(model="tiny", input=text, temperature=0, max_output_tokens=6, **more)


def receipt(response: Any) -> Json:
    found: Json = response.model_extra["everwarm"]
    return found


def test_a_plain_answer(client: OpenAI) -> None:
    response = ask(client, "Hello", instructions="Be brief.", metadata={"a": "b"})
    assert (response.object, response.status) == ("response", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == response.output[0].content[0].text
    assert response.usage.output_tokens == 6
    assert response.usage.total_tokens == response.usage.input_tokens + 6


def test_reasoning_text_and_calls(speaking: Running, client: OpenAI) -> None:
    found = client.responses.create(model="tiny", input="Hi", max_output_tokens=200, tools=[TOOL])
    with client.responses.stream(model="tiny", input="Hi", max_output_tokens=200, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for response in (found, final):
        assert response.status == "completed"
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
        assert response.output[0].content[0].text == "hm, ä?"  # type: ignore[union-attr,index]
        call = response.output[2]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": [2]})  # type: ignore[union-attr]
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 5
    for kind in ("reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"):
        assert f"response.{kind}" in kinds


def test_what_is_streamed_is_what_is_kept(speaking: Running, client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hi", max_output_tokens=200) as stream:
        done = [event.item for event in stream if event.type == "response.output_item.done"]
        final = stream.get_final_response()
    kept = client.responses.retrieve(final.id)
    assert [item.to_dict() for item in kept.output] == [item.to_dict() for item in done]
    assert kept.usage == final.usage


def test_a_custom_tool_gets_free_text(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = server.llm
    ids = [*llm.tokenize('<call>patch {"input": "line 1\\nline 2"}</call>'), 258]
    constraint = partial(Says, ids, llm.config.vocab_size)
    monkeypatch.setattr(llm, "start", partial(llm.start, constraint=constraint, parser=TagParser))
    tool: Any = {"type": "custom", "name": "patch", "description": "Applies a patch."}
    with client.responses.stream(model="tiny", input="Hi", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    (call,) = final.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "line 1\nline 2")  # type: ignore[union-attr]
    assert kinds.count("response.custom_tool_call_input.done") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\ud800b"}', "a\ufffdb"),  # half a character could not be sent
        ('{"input": ' + "[" * 1200, '{"input": ' + "[" * 1200),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_whatever_a_custom_tool_is_given_is_told_and_kept(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch, arguments: str, expected: str
) -> None:
    llm = server.llm
    ids = [*llm.tokenize(f"<call>patch {arguments}</call>"), 258]
    monkeypatch.setattr(
        llm, "start", partial(llm.start, constraint=partial(Says, ids, llm.config.vocab_size), parser=TagParser)
    )
    tool: Any = {"type": "custom", "name": "patch", "description": "Applies a patch."}
    whole = client.responses.create(model="tiny", input="Hi", tools=[tool])
    with client.responses.stream(model="tiny", input="Hi", tools=[tool]) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        streamed = stream.get_final_response()
    for response in (whole, streamed, client.responses.retrieve(streamed.id)):
        (call,) = response.output
        assert call.input == expected  # type: ignore[union-attr]


def test_reasoning_comes_back_sealed(speaking: Running, client: OpenAI) -> None:
    include: Any = ["reasoning.encrypted_content"]
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=200, store=False, include=include)
    thoughts: Any = first.output[0].to_dict()
    assert thoughts["encrypted_content"].startswith("ew1.")
    for sealed, expected in ((thoughts["encrypted_content"], "hm, ä?"), ("gAAAA-of-somebody-else", None)):
        items: Any = [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed},
            {"role": "assistant", "content": "Let me see."},
            {"role": "user", "content": "And?"},
        ]
        raw = client.responses.with_raw_response.create(model="tiny", input=items, max_output_tokens=200)
        agents = speaking.llm.agents
        messages = agents.history(agents.find(raw.parse().id)).messages or ()
        assert messages[1].get("reasoning_content") == expected
        assert ("encrypted reasoning" in raw.headers.get("x-everwarm-ignored", "")) == (expected is None)


# Points of a history --------------------------------------------------------------------------------------------------


def test_a_response_is_continued_without_computing_it_again(client: OpenAI) -> None:
    first = ask(client, "Remember the word lighthouse. " * 20)
    second = ask(client, "Which word?", previous_response_id=first.id)
    found = receipt(second)
    assert second.previous_response_id == first.id
    assert found["cached_tokens"] >= first.usage.input_tokens + 5
    assert (found["match"], found["committed"]) == ("extended", True)
    third = ask(client, "Again?", previous_response_id=second.id)
    assert receipt(third)["cached_tokens"] >= second.usage.input_tokens + 5


def test_an_answer_that_the_client_had_begun_is_one_message_of_the_history(server: Running, client: OpenAI) -> None:
    """The model has seen one answer, and sees it so when the response is continued."""
    items: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well, "}]
    first = ask(client, items)
    store = server.llm.agents
    messages = store.history(store.find(first.id)).messages or ()
    assert [(one["role"], one["content"]) for one in messages] == [
        ("user", "Hello"),
        ("assistant", "Well, " + first.output_text),
    ]
    second = ask(client, "And?", previous_response_id=first.id)
    assert receipt(second)["match"] == "extended"
    assert receipt(second)["cached_tokens"] >= first.usage.total_tokens - 1


def test_two_continuations_fork_and_the_point_stays(client: OpenAI) -> None:
    first = ask(client, "A fork in the road. " * 10)
    before = client.responses.retrieve(first.id)
    left = ask(client, "Go left.", previous_response_id=first.id)
    right = ask(client, "Go right.", previous_response_id=first.id)
    again = ask(client, "Go left.", previous_response_id=first.id)
    assert left.output_text == again.output_text
    assert receipt(right)["cached_tokens"] >= first.usage.input_tokens
    assert client.responses.retrieve(first.id) == before
    asked = client.responses.input_items.list(right.id).data
    assert [item.content[0].text for item in asked] == ["Go right."]  # type: ignore[union-attr]


def test_the_answer_is_the_one_without_a_cache(client: OpenAI) -> None:
    first = ask(client, "Say it once more. " * 8)
    warm = ask(client, "And now?", previous_response_id=first.id)
    said = [
        {"role": "user", "content": "Say it once more. " * 8},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    cold = ask(client, said, store=False, extra_body={"everwarm": {"cache": False}})
    assert cold.output_text == warm.output_text


def test_points_survive_a_restart(home: Path, tmp_path: Path) -> None:
    ids = []
    for number in range(3):
        with (
            running(home / "tiny.gguf", tmp_path) as server,
            OpenAI(base_url=server.url + "/v1", api_key="any") as client,
        ):
            previous = {"previous_response_id": ids[-1]} if ids else {}
            response = ask(client, f"Turn {number}. " * 10, **previous)
            if ids:
                assert receipt(response)["tier"] == "warm"
            ids.append(response.id)
            assert [client.responses.retrieve(one).id for one in ids] == ids


def test_instructions_are_not_carried_over(server: Running, client: OpenAI) -> None:
    first = ask(client, "Hello", instructions="Old instructions.")
    second = ask(client, "Hello again", previous_response_id=first.id, instructions="New instructions.")
    history = server.llm.agents.history(server.llm.agents.find(second.id))
    roles = [(message["role"], message["content"]) for message in history.messages or ()]
    assert roles[0] == ("system", "New instructions.")
    assert [role for role, _ in roles] == ["system", "user", "assistant", "user", "assistant"]


def test_what_is_not_stored_can_not_be_found(client: OpenAI) -> None:
    response = ask(client, "Secret", store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(NotFoundError):
        ask(client, "More", previous_response_id=response.id)


def test_deleted_is_gone_and_what_continues_it_stays(client: OpenAI) -> None:
    first = ask(client, "To be deleted")
    second = ask(client, "Goes on", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    assert ask(client, "And on", previous_response_id=second.id).previous_response_id == second.id


def test_nobody_talks_as_a_point(server: Running, client: OpenAI) -> None:
    first = ask(client, "A point")
    with pytest.raises(BadRequestError, match="X-Agent-Id"):
        ask(client, "x", previous_response_id=first.id, extra_headers={"X-Agent-Id": "ada"})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "everwarm": {"agent": first.id}}
    refused = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert refused.status_code in (400, 409)
    assert "never changes" in refused.json()["error"]["message"]


def test_a_chat_that_begins_alike_does_not_change_a_point(server: Running, client: OpenAI) -> None:
    first = ask(client, "The same beginning. " * 5)
    before = client.responses.retrieve(first.id)
    messages: Any = [
        {"role": "user", "content": "The same beginning. " * 5},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]
    found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert receipt(found)["cached_tokens"] > 0
    assert client.responses.retrieve(first.id) == before
    assert server.llm.agents.find(first.id).tokens == first.usage.input_tokens + 6


# Input ----------------------------------------------------------------------------------------------------------------


def test_items_of_a_session_become_messages(server: Running, client: OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I add."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "text"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:..."}, {"type": "input_text", "text": "?"}],
        },
    ]
    raw = client.responses.with_raw_response.create(
        model="tiny", input=items, max_output_tokens=4, tools=[TOOL, {"type": "web_search"}], extra_body={"odd": 1}
    )
    response = raw.parse()
    assert (
        raw.headers["x-everwarm-ignored"] == "odd, tools of type web_search, input web_search_call, input input_image"
    )
    messages = list(server.llm.agents.history(server.llm.agents.find(response.id)).messages or ())[:-1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert messages[2]["reasoning_content"] == "I add."
    assert messages[2]["content"] == "One moment."
    assert [call["function"]["name"] for call in messages[2]["tool_calls"]] == ["add", "patch"]
    assert [message["content"] for message in messages[3:5]] == ["1", "done"]
    assert messages[5]["content"] == "[image left out: this model reads text only]?"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "type": {"a": 1}}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"input": "x", "background": True}, "background"),
        ({"input": []}, "input"),
    ],
)
def test_what_makes_no_sense_is_a_400_that_says_where(server: Running, body: Json, where: str) -> None:
    response = httpx.post(server.url + "/v1/responses", json=body)
    assert response.status_code == 400
    assert where in response.json()["error"]["message"]


def test_many_kinds_of_items_and_tools_cost_bounded_time() -> None:
    """A body may have so many."""
    kinds = [{"type": f"kind {number}"} for number in range(200_000)]
    assert len(messages_of([*kinds, *kinds]).omitted) == len(kinds)
    assert len(tools_of([*kinds, *kinds]).omitted) == len(kinds)


@pytest.mark.parametrize("response_id", ["resp_unknown", "ada", "resp_", "x" * 300])
def test_unknown_ids_are_a_404(server: Running, response_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        found = httpx.request(method, f"{server.url}/v1/responses/{response_id}{path}")
        assert found.status_code == 404, (method, path)


def test_an_answer_that_follows_a_schema(client: OpenAI) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    response = client.responses.create(model="tiny", input="Choose", text=text, max_output_tokens=100)
    assert response.status == "completed"
    assert json.loads(response.output_text)["a"] in (1, 2)
