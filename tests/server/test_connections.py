"""Connections that only sit there: how many there may be, how long, and who leaves for whom."""

import json
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, process, running

from everwarm.cli.serve import connection_limits
from everwarm.server import descriptors
from everwarm.server.connections import ConnectionLimits, Place, Places, Silence
from tiny import Tiny

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 4}
QUICK = ConnectionLimits(head_s=0.3, idle_s=0.3, stalled_s=0.3, closing_s=0.3, sweep_s=0.05)
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=512).write(path)
    return path


@pytest.fixture(scope="module")
def quick(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(model, tmp_path_factory.mktemp("home"), connections=QUICK) as server:
        yield server


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port or 80), timeout=60)


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; waits for something to come."""
    try:
        return connection.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


def is_open(connection: socket.socket) -> bool:
    """Whether it is open and nothing has come."""
    connection.setblocking(False)
    try:
        return connection.recv(1) is None
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.settimeout(60)


def is_refused(connection: socket.socket, sent: bytes) -> bool:
    """Whether the other side takes nothing more."""
    try:
        connection.sendall(sent)
    except ConnectionError:
        return True
    return False


def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def busy(server: Running) -> Iterator[socket.socket]:
    """A connection whose request is being answered, and is not before this ends."""
    holding, go = threading.Event(), threading.Event()
    submit = server.llm.engine.submit

    def wait(sequence: Any) -> None:
        holding.set()
        go.wait(60)
        submit(sequence)

    body = json.dumps(HELLO | {"user": str(uuid.uuid4())}).encode()  # an equal one would join
    with connect(server.url) as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.llm.engine, "submit", wait)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert holding.wait(60)
        try:
            yield connection
        finally:
            go.set()


# Who leaves for whom --------------------------------------------------------------------------------------------------


def places(**limits: Any) -> Places:
    return Places(ConnectionLimits(**limits))


def taken(places: Places, peer: str = "10.0.0.1", silence: Silence | None = None) -> Place:
    place = places.take(peer)
    assert place is not None
    place.silent(silence)
    return place


def test_whoever_has_been_silent_for_longest_leaves_first() -> None:
    some, left = places(in_all=6, per_address=6), list[str]()
    silences = [Silence.NOT_READING, Silence.NO_BODY, Silence.NO_NEXT_REQUEST, Silence.NO_REQUEST, Silence.NO_REQUEST]
    for number, silence in enumerate(silences):
        place = taken(some, silence=silence)
        place.close = lambda number=number: left.append(number)
    taken(some)  # being answered
    for _ in range(5):
        taken(some)
    assert left == [3, 4, 2, 1, 0]
    assert some.take("10.0.0.1") is None
    assert (len(some), some.pushed_out, some.refused) == (6, 5, 1)


def test_whoever_falls_silent_again_goes_to_the_end() -> None:
    some, left = places(in_all=2, per_address=2), list[str]()
    first, second = (taken(some, silence=Silence.NO_BODY) for _ in range(2))
    first.close, second.close = (lambda: left.append("first")), (lambda: left.append("second"))
    first.silent(Silence.NO_BODY)  # it has sent something meanwhile
    taken(some)
    assert left == ["second"]


def test_an_address_makes_room_for_itself_only() -> None:
    some, left = places(in_all=100, per_address=2), list[str]()
    other = taken(some, "10.0.0.2", Silence.NO_REQUEST)
    other.close = lambda: left.append("other")
    for number in range(2):
        taken(some, silence=Silence.NO_REQUEST).close = lambda number=number: left.append(number)
    taken(some)
    taken(some)
    assert left == [0, 1]
    assert some.take("10.0.0.1") is None
    assert some.take("10.0.0.2") is not None


def test_a_proxy_speaks_for_many() -> None:
    some = places(in_all=10, per_address=2, proxies=(ip_network("10.0.0.0/30"),))
    assert all(some.take("10.0.0.1") for _ in range(10))
    assert some.take("10.0.0.1") is None
    assert some.take("10.0.0.9") is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::1%eth1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    some = places(in_all=10, per_address=1)
    taken(some, one)
    assert (some.take(other) is None) is same


def test_places_come_back() -> None:
    some = places(in_all=3, per_address=3)
    for _ in range(10):
        place = taken(some, silence=Silence.NO_REQUEST)
        place.leave()
        place.leave()
        place.silent(Silence.NO_BODY)  # said too late
    assert len(some) == 0
    assert all(some.take("10.0.0.1") for _ in range(3))


# How long -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET", HALF, get("/health") + HALF])
def test_a_connection_without_a_request_is_closed(quick: Running, sent: bytes) -> None:
    with connect(quick.url) as connection:
        connection.sendall(sent)
        if sent.startswith(get("/health")):
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert is_closed(connection)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(quick: Running) -> None:
    with connect(quick.url) as connection:
        until(lambda: is_refused(connection, b"x"))


def test_a_connection_between_two_requests_is_closed(quick: Running) -> None:
    with connect(quick.url) as connection:
        for _ in range(2):
            connection.sendall(get("/health"))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert is_closed(connection)


def test_a_request_that_takes_longer_is_answered(quick: Running) -> None:
    with busy(quick) as connection:
        with connect(quick.url) as silent:
            assert is_closed(silent)  # so the times are over
        assert is_open(connection)


def test_a_client_that_does_not_read_is_let_go(quick: Running) -> None:
    """It asks for so much that it does not fit into the buffers of both sides."""
    with connect(quick.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.2)
        try:
            while True:
                connection.sendall(get("/openapi.json") * 10)
        except TimeoutError:
            pass  # nothing more fits: the server does not read, because it can't write
        except ConnectionError:
            return
        connection.settimeout(60)
        until(lambda: is_refused(connection, b" "))


# How many -------------------------------------------------------------------------------------------------------------


def test_silent_connections_keep_nobody_out(model: Path, tmp_path: Path) -> None:
    limits = ConnectionLimits(in_all=20, per_address=10, head_s=600)
    with running(model, tmp_path, connections=limits) as server, ExitStack() as stack:
        silent = [stack.enter_context(connect(server.url)) for _ in range(50)]
        for connection in silent[::2]:
            with suppress(ConnectionError):  # closed already
                connection.sendall(HALF)
        until(lambda: sum(is_open(connection) for connection in silent) <= 10)
        for number in range(5):
            body = HELLO | {"everwarm": {"agent": f"agent {number}"}}
            answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
            assert answer["everwarm"]["committed"] is True
        until(lambda: sum(is_open(connection) for connection in silent) <= 10)


def test_one_that_is_accepted_before_its_request_is_read_can_make_room(model: Path, tmp_path: Path) -> None:
    """More than there are places are accepted together, before the first byte of any of them is read."""
    limits = ConnectionLimits(in_all=4, per_address=2, head_s=600)
    with running(model, tmp_path, connections=limits) as server, ExitStack() as stack:
        address = httpx.URL(server.url).host, httpx.URL(server.url).port
        for _ in range(10):
            together = [stack.enter_context(socket.socket()) for _ in range(20)]
            for connection in together:
                connection.setblocking(False)
                connection.connect_ex(address)
            together[-1].settimeout(60)
            together[-1].sendall(get("/health"))
            assert together[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            for connection in together:
                connection.close()


def test_a_connection_that_is_answered_is_never_closed_for_another(model: Path, tmp_path: Path) -> None:
    limits = ConnectionLimits(in_all=3, per_address=3)
    with running(model, tmp_path, connections=limits) as server, ExitStack() as stack:
        talking = [stack.enter_context(busy(server)) for _ in range(3)]
        with connect(server.url) as another:
            refused = another.recv(1 << 16)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["type"] == "overloaded_error"
        assert all(is_open(connection) for connection in talking)


def test_many_that_connect_at_once_are_all_accepted(model: Path, tmp_path: Path) -> None:
    """More than the system holds by default before it has clients try again, a second later."""
    with running(model, tmp_path) as server, ExitStack() as stack:
        together = [stack.enter_context(socket.socket()) for _ in range(500)]
        for connection in together:
            connection.setblocking(False)
            connection.connect_ex((httpx.URL(server.url).host, httpx.URL(server.url).port))
        for connection in together:
            connection.settimeout(60)
            connection.sendall(get("/health"))
        assert all(connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ") for connection in together)


# Descriptors ----------------------------------------------------------------------------------------------------------


def test_some_descriptors_are_kept_from_connections() -> None:
    assert 60_000 <= descriptors.for_connections(65_536, 256) < 65_536 - 256
    assert descriptors.for_connections(1024, 256) < 1024 - 256
    assert descriptors.for_connections(100, 256) == 50


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: raised.append(limits))
    assert descriptors.raise_limit() == 4096
    assert raised == [(4096, 4096)]
    limits = connection_limits(10_000, None, ["10.0.0.0/8", "::1"], 256)
    assert limits.in_all < 4096 - 256
    assert limits.per_address == limits.in_all // 2
    assert len(limits.proxies) == 2


def test_a_turn_is_saved_whatever_the_number_of_silent_connections(model: Path, tmp_path: Path) -> None:
    """Before, each took a descriptor for good, and the store found none for its files."""
    with process(model, home=tmp_path, descriptors=160) as url, ExitStack() as stack:
        for number in range(6):
            for _ in range(60):
                stack.enter_context(connect(url)).sendall(HALF)
            body = HELLO | {"everwarm": {"agent": f"agent {number}"}}
            receipt = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()["everwarm"]
            assert (receipt["committed"], receipt["error"]) == (True, None)
