"""Agents on their way in and out as files: uploads that stall, are too many, are too large or end early."""

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import FILE, Running, running

from everwarm.server import transfers
from tiny import Tiny

QUOTA = 4 << 20
LONG = "A long beginning that fills more than one block of keys and values. " * 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("transfers")
    Tiny(context=1024).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home, warm_quota=QUOTA) as server:
        body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "everwarm": {"agent": "ada"}}
        httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).raise_for_status()
        yield server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files lie meanwhile."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("everwarm-*/*"))


def upload(server: Running, announced: int | None, sent: bytes) -> socket.socket:
    """The beginning of an upload."""
    address = httpx.URL(server.url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=60)
    length = b"Transfer-Encoding: chunked" if announced is None else b"Content-Length: %d" % announced
    connection.sendall(
        b"POST /v1/agents/import HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n%b\r\n\r\n"
        % length
    )
    connection.sendall(sent if announced is not None else b"%x\r\n%b\r\n" % (len(sent), sent))
    return connection


def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def status(connection: socket.socket) -> int:
    return int(connection.recv(1 << 16).split()[1])


def import_(server: Running, data: bytes, **params: str) -> httpx.Response:
    return httpx.post(server.url + "/v1/agents/import", content=data, params=params, headers=FILE, timeout=60)


def export(server: Running) -> bytes:
    return httpx.post(server.url + "/v1/agents/ada/export", timeout=60).content


def test_an_upload_that_stalls_is_not_waited_for(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALL_S", 0.3)
    with upload(server, 1 << 20, b"x" * 1000) as connection:
        assert status(connection) == 408
    until(lambda: not list(folder.iterdir()))


def test_an_upload_that_trickles_has_stalled(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "STALL_S", 0.5)
    with upload(server, 1 << 20, b"x") as connection:
        connection.setblocking(False)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            connection.send(b"x")
            time.sleep(0.02)
            try:
                answer = connection.recv(1 << 16)
                break
            except BlockingIOError:
                pass
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"stalled" in answer


@pytest.mark.parametrize("announced", [QUOTA + 1, None])
def test_an_upload_beyond_the_quota_is_refused(server: Running, folder: Path, announced: int | None) -> None:
    with upload(server, announced, b"x" * (1 if announced else QUOTA + 1)) as connection:
        assert status(connection) == 413
    until(lambda: not list(folder.iterdir()))


def test_all_uploads_together_have_one_budget(server: Running, folder: Path) -> None:
    part = QUOTA // 4
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(upload(server, None, b"x" * part))
        until(lambda: held_bytes(folder) > QUOTA - (64 << 10))  # what is buffered is written soon
        refused = import_(server, b"x" * part)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert f"more than {QUOTA:,} bytes" in refused.json()["error"]["message"]
    until(lambda: not list(folder.iterdir()))
    assert import_(server, export(server), name="after").status_code == 201
    assert httpx.delete(server.url + "/v1/agents/after").status_code == 200


def test_uploads_at_once_are_counted(server: Running, folder: Path) -> None:
    with ExitStack() as stack:
        for _ in range(transfers.MOST_AT_ONCE):
            stack.enter_context(upload(server, 1000, b"x"))
        until(lambda: len(list(folder.iterdir())) == transfers.MOST_AT_ONCE)
        refused = import_(server, b"x")
        assert (refused.status_code, "uploads are under way" in refused.text) == (503, True)
    until(lambda: not list(folder.iterdir()))


def test_a_disk_that_is_full_is_told_in_words(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/secret/place")

    monkeypatch.setattr(transfers, "_receive_some", full)
    refused = import_(server, b"x")
    assert refused.status_code == 503
    assert "No space left on device" in refused.json()["error"]["message"]
    assert "/" not in refused.json()["error"]["message"]


def test_an_import_whose_client_goes_away_is_a_499_in_the_log(
    server: Running, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[Any]:
        return [record.fields for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]

    with caplog.at_level(logging.INFO):
        with upload(server, 1 << 20, b"x" * 100_000):
            until(lambda: held_bytes(folder) > 0)
        until(lines)
    assert [(line["route"], line["status"]) for line in lines()] == [("/v1/agents/import", 499)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    until(lambda: not list(folder.iterdir()))


def test_an_export_that_nobody_reads_leaves_no_file_open(server: Running, folder: Path) -> None:
    def held() -> int:
        names = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _exists(number)]
        return sum(str(folder) in name for name in names)

    address = httpx.URL(server.url)
    for _ in range(20):
        with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
            connection.sendall(b"POST /v1/agents/ada/export HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
    until(lambda: held() == 0)
    assert len(export(server)) > 1000
    until(lambda: held() == 0)


def _exists(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")
