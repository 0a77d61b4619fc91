"""Paths without /v1, other names of a model, another chat template."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import Running, process, running

import everwarm
from everwarm.errors import ConfigError
from tiny import Tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paths") / "tiny.gguf"
    Tiny(context=512).write(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, model.parent) as server:
        yield server


def test_head_is_answered_as_get_without_a_body(server: Running) -> None:
    for path in ("/", "/health", "/v1/models", "/models", "/v1/nothing", "/v1/models/nothing"):
        asked, found = httpx.head(server.url + path), httpx.get(server.url + path)
        assert (asked.status_code, asked.content) == (found.status_code, b""), path
        assert asked.headers["content-length"] == found.headers["content-length"]
    assert httpx.get(server.url).json()["model"] == "tiny"
    assert httpx.head(server.url + "/v1/chat/completions").status_code == 405


def test_paths_without_the_version_are_served(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    for path, body in (
        ("/chat/completions", chat),
        ("/completions", {"prompt": "Hi", "max_tokens": 3}),
        ("/responses", {"input": "Hi", "max_output_tokens": 3}),
        ("/messages", chat),
        ("/messages/count_tokens", {"messages": chat["messages"]}),
    ):
        assert httpx.post(server.url + path, json=body).status_code == 200, path
    assert httpx.get(server.url + "/models").json() == httpx.get(server.url + "/v1/models").json()
    for path in ("/agents", "/chatter", "/modelsx", "/v2/models"):
        assert httpx.get(server.url + path).status_code == 404, path


def test_a_path_without_the_version_needs_a_key_as_well(model: Path) -> None:
    with running(model, model.parent, keys={"secret": "ada"}) as server:
        assert httpx.get(server.url + "/models").status_code == 401
        assert httpx.get(server.url + "/models", headers={"X-Api-Key": "secret"}).status_code == 200


def test_aliases_are_listed_and_the_first_is_told(model: Path, tmp_path: Path) -> None:
    with process(model, "--alias", "gpt-local", "--alias", "small", home=tmp_path) as url:
        listed = httpx.get(url + "/v1/models").json()
        assert [one["id"] for one in listed["data"]] == ["gpt-local", "small"]
        assert httpx.get(url + "/v1/models/small").status_code == 200
        assert httpx.get(url + "/v1/models/tiny").status_code == 404
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert httpx.post(url + "/v1/chat/completions", json=body).json()["model"] == "gpt-local"


def test_another_chat_template(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    with everwarm.load(model, chat_template=file.read_text()) as llm:
        assert llm.encode_prompt(messages=[{"role": "user", "content": "Hi"}]) == llm.tokenize("[Hi]")
    for both in ({"chat_template": "{{ x }}", "chat_template_file": str(file)}, {"chat_template": "chatml"}):
        with pytest.raises(ConfigError, match="chat_template"):
            everwarm.load(model, **both)
    with everwarm.load(model, chat_template_file=str(file)) as llm:
        segments, _ = llm.segments(messages=[{"role": "user", "content": "Hi"}])
        assert "".join(segment.text for segment in segments) == "[Hi]"
    for path, reason in ((tmp_path / "missing", "No such file"), (model, "limit|UTF-8")):
        with pytest.raises(ConfigError, match=reason):
            everwarm.load(model, chat_template_file=str(path))
