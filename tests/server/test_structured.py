"""Structured output over HTTP, with the official clients: every dialect's fields, and schemas that are refused."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest
from running import Running, running

from tiny import Tiny

Json = dict[str, Any]

HI: list[Any] = [{"role": "user", "content": "Hi"}]
POINT: Json = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["near", "far"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
NO_BLANKS = {str(byte): -50 for byte in b" \t\r\n"}
HOSTILE: Json = {"allOf": [{"pattern": f".*{number}.*"} for number in range(20)]}
"""So small, and it would compile for hours."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("structured")
    Tiny(context=512).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def chat(server: Running, **body: Any) -> httpx.Response:
    given = {"messages": HI, "max_tokens": 200, "logit_bias": NO_BLANKS, "seed": 1} | body
    return httpx.post(server.url + "/v1/chat/completions", json=given, timeout=60)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def error(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.parametrize("strict", [True, False, None])
def test_openais_json_schema(server: Running, strict: bool | None) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": strict}}
    jsonschema.validate(json.loads(text(chat(server, response_format=format_))), POINT)


def test_openais_client_parses_into_a_class(client: openai.OpenAI) -> None:
    class Point(pydantic.BaseModel):
        x: int
        near: bool
        kind: str | None = None

    answer = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Point, logit_bias=NO_BLANKS, seed=3, max_tokens=400,
        stop=['"kind": "'],
    )  # fmt: skip
    parsed = answer.choices[0].message.parsed
    assert parsed is None or isinstance(parsed, Point)
    assert re.match(r'\{"x":-?\d+(,"near":(true|false))?', answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object", "schema": POINT}}, r'\{"x":\d+,"kind":"(near|far)"\}'),
        ({"guided_json": POINT}, r'\{"x":\d+,"kind":"(near|far)"\}'),
        ({"guided_json": json.dumps(POINT)}, r'\{"x":\d+,"kind":"(near|far)"\}'),
        ({"json_schema": POINT}, r'\{"x":\d+,"kind":"(near|far)"\}'),
        ({"guided_regex": "a{3}[bc]"}, "a{3}[bc]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "(" /[a-c]{2}/ ")"'}, r"\([a-c]{2}\)"),
        ({"grammar": 'root ::= "<" [x-z] [x-z] ">"'}, "<[x-z]{2}>"),
    ],
)
def test_other_dialects(server: Running, fields: Json, pattern: str) -> None:
    assert re.fullmatch(pattern, text(chat(server, **fields)))
    completion = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": "x", "max_tokens": 200, "logit_bias": NO_BLANKS, "seed": 1} | fields,
        timeout=60,
    ).json()
    assert re.fullmatch(pattern, completion["choices"][0]["text"])
    assert completion["choices"][0]["finish_reason"] == "stop"


def test_a_json_object(server: Running) -> None:
    answer = chat(server, response_format={"type": "json_object"}, max_tokens=100).json()["choices"][0]
    assert answer["message"]["content"].startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)


def test_plain_text_is_no_grammar(server: Running) -> None:
    assert text(chat(server, response_format={"type": "text"})) == text(chat(server))


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_anthropics_format(server: Running, field: str) -> None:
    format_ = {"type": "json_schema", "schema": POINT}
    body = {"output_config": {"format": format_}} if field == "output_config" else {"output_format": format_}
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        answer = client.messages.create(
            model="tiny", max_tokens=300, messages=[{"role": "user", "content": "Hi"}], extra_body=body
        )
        jsonschema.validate(json.loads(answer.content[0].text), POINT)  # type: ignore[union-attr]
        assert answer.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="not: not supported"):
            client.messages.create(
                model="tiny",
                max_tokens=9,
                messages=[{"role": "user", "content": "Hi"}],
                extra_body={"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            )


def test_several_choices_streamed_with_log_probabilities(client: openai.OpenAI) -> None:
    format_: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    options: Any = {
        "model": "tiny", "messages": HI, "response_format": format_, "n": 3, "seed": 5, "logprobs": True,
        "top_logprobs": 2, "logit_bias": NO_BLANKS, "max_tokens": 200,
    }  # fmt: skip
    texts, tokens = ["", "", ""], [0, 0, 0]
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or [])
    for one, count in zip(texts, tokens, strict=True):
        jsonschema.validate(json.loads(one), POINT)
        assert count == len(one)  # a byte is a token here
    whole = client.chat.completions.create(**options)
    assert [choice.message.content for choice in whole.choices] == texts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format: type 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"contains": {}}}}},
            "contains: not supported",
        ),
        ({"guided_json": {"uniqueItems": True}}, "guided_json: uniqueItems: not supported"),
        ({"guided_json": POINT, "guided_regex": "a"}, "guided_json and guided_regex: an answer can follow only one"),
        ({"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"}, "response_format and grammar"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex: not a regular expression"),
        ({"grammar": "nonsense"}, "grammar: neither GBNF nor Lark"),
        ({"guided_choice": []}, "guided_choice: expected a list"),
    ],
)
def test_what_cannot_be_followed_is_a_400_that_names_it(server: Running, fields: Json, message: str) -> None:
    assert message in error(chat(server, **fields))


def test_a_hostile_schema_is_a_400_and_disturbs_nobody(server: Running) -> None:
    expected = text(chat(server, max_tokens=300))
    with ThreadPoolExecutor(6) as threads:
        hostile = [threads.submit(chat, server, guided_json=HOSTILE | {"title": str(number)}) for number in range(2)]
        others = [threads.submit(chat, server, max_tokens=300) for _ in range(3)]
        quick = threads.submit(chat, server, guided_json={"const": "quick"})
        assert text(quick.result()) == '"quick"'
        assert [text(one.result()) for one in others] == [expected] * 3
        for one in hostile:
            assert "takes more than 3 s" in error(one.result())
    assert text(chat(server, guided_regex="still (here|there)")).startswith("still ")
