"""No client learns where the server's files are."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import FILE, Running, running

from everwarm import config
from everwarm.errors import PackError
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.disk.lock import StoreLock
from everwarm.server.errors import as_api_error
from everwarm.server.redact import HIDDEN, without_paths
from tiny import Tiny

LONG = "A long beginning that fills more than one block of keys and values. " * 6
HELLO = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "everwarm": {"agent": "ada"}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    Tiny(context=1024).write(tmp_path / "tiny.gguf")
    with running(tmp_path / "tiny.gguf", tmp_path / "home", restore="always") as server:
        yield server


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[Errno 28] No space left: '/srv/my agents/ab/cd.part'", f"[Errno 28] No space left: {HIDDEN}"),
        ("[Errno 2] gone: '/srv/a' -> '/srv/b'", f"[Errno 2] gone: {HIDDEN} -> {HIDDEN}"),
        ("/srv/my agents: exists already", f"{HIDDEN}: exists already"),
        ("agent 'ada' was not saved: /srv/agents/x/y: checksum", f"agent 'ada' was not saved: {HIDDEN}: checksum"),
        ("/srv/agents: process 12 (everwarm serve /srv/m.gguf) is writing in it",
         f"{HIDDEN}: another process is writing in it"),
        ("agent 'team/ada' exists already", "agent 'team/ada' exists already"),
        ("1/2 of it, and/or more; https://a.example/b/c", "1/2 of it, and/or more; https://a.example/b/c"),
    ],
)  # fmt: skip
def test_a_text_without_its_paths(text: str, told: str) -> None:
    assert without_paths(text) == told


def test_our_own_folders_are_hidden_even_with_spaces_in_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.PREFIX + "HOME", "/srv/my models (old)/x")
    assert without_paths("lost /srv/my models (old)/x/agents/ab: gone") == f"lost {HIDDEN}: gone"


def test_a_damaged_model_file_is_nobodys_request() -> None:
    told = as_api_error(PackError("/srv/packs/ab/cd: truncated"))
    assert (told.status, "/srv" in str(told)) == (500, False)


def test_no_error_of_the_store_names_a_file(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation, while every file of the store fails."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/v1/chat/completions", json=HELLO).raise_for_status()
        exported = client.post("/v1/agents/ada/export").content
        store = server.llm.agents

        def fail(*arguments: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error", str(tmp_path / "home" / "agents" / "secret"))

        assert store.warm is not None
        disk = store.warm.blocks.store
        assert isinstance(disk, DirectoryStore)
        store.evict("ada")
        with monkeypatch.context() as reading:
            reading.setattr(disk, "get", fail)
            answers = [client.post("/v1/agents/ada/warm"), client.post("/v1/agents/ada/export")]
            again = client.post("/v1/chat/completions", json=HELLO)
        assert "Input/output error" in again.json()["everwarm"]["reason"]
        for name in ("create", "unlink", "rename"):
            monkeypatch.setattr(disk.files, name, fail)
        bob = client.post("/v1/chat/completions", json=HELLO | {"everwarm": {"agent": "bob"}})
        assert bob.json()["everwarm"]["committed"] is False
        assert "Input/output error" in bob.json()["everwarm"]["error"]
        answers += [
            again,
            bob,
            client.post("/v1/agents/ada/pin"),
            client.post("/v1/agents/ada/fork", json={"name": "copy"}),
            client.post("/v1/agents/import?name=other", content=exported, headers=FILE),
            client.post("/v1/messages", json={"max_tokens": 2, "messages": [{"role": "user", "content": "new words"}]}),
            client.get("/v1/agents?all=true"),
            client.get("/v1/agents/bob"),
            client.delete("/v1/agents/ada"),
            client.delete("/v1/agents/bob"),
        ]
        monkeypatch.undo()
    for answer in answers:
        assert str(tmp_path) not in answer.text + str(answer.headers), answer.request.url
        assert "secret" not in answer.text


def test_who_else_writes_in_the_store_is_not_told(tmp_path: Path) -> None:
    Tiny(context=1024).write(tmp_path / "tiny.gguf")
    (tmp_path / "home" / "agents").mkdir(parents=True)
    lock = StoreLock(tmp_path / "home" / "agents")
    try:
        with running(tmp_path / "tiny.gguf", tmp_path / "home") as server:
            answer = httpx.post(server.url + "/v1/chat/completions", json=HELLO, timeout=60)
            refused = httpx.post(server.url + "/v1/agents/import", content=b"x", headers=FILE)
    finally:
        lock.release()
    assert answer.json()["everwarm"]["committed"] is False
    for told in (answer, refused):
        assert str(tmp_path) not in told.text
        assert "pytest" not in told.text  # the command that holds it
    assert "another process is writing" in refused.json()["error"]["message"]
