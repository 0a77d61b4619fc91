"""Web pages of strangers: DNS rebinding, cross-site requests, `--cors` and `--allowed-host`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import FILE, Running, running

from everwarm.cli import app as cli
from everwarm.errors import ConfigError
from everwarm.server.origin import Origins, RequestHeaders, parse_name, parse_origin, parse_origins
from tiny import Tiny

EVIL = "http://evil.example:8080"
CROSS = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
HELLO = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2, "everwarm": {"agent": "ada"}}


http = httpx.Client(timeout=60)  # one for all: each of its own would take a while to make


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=512).write(path)
    return path


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(path, tmp_path_factory.mktemp("home")) as server:
        http.post(server.url + "/v1/chat/completions", json=HELLO).raise_for_status()
        yield server


def routes(server: Running) -> list[tuple[str, str]]:
    """Every operation of the schema, and what is not in it."""
    paths = http.get(server.url + "/openapi.json").json()["paths"]
    found = [(method.upper(), path.replace("{name}", "ada")) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("OPTIONS", "/v1/models")]


# Rebinding: the name is the attacker's, the address is ours -----------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example",
     "1.2.3", "2130706433", "", "[::1", "a b"],
)  # fmt: skip
def test_no_route_but_health_answers_under_a_strangers_name(server: Running, host: str) -> None:
    for method, path in routes(server):
        response = http.request(method, server.url + path, headers={"Host": host})
        if path == "/health":
            assert response.status_code == 200
            continue
        assert response.status_code == 403, (method, path)
        assert "--allowed-host" in response.json()["error"]["message"]
        assert "secret" not in response.text


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:1", "192.168.1.7:8080", "[::1]:8080", "0.0.0.0"]
)
def test_localhost_and_addresses_are_served(server: Running, host: str) -> None:
    assert http.get(server.url + "/v1/agents/ada", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-Host", "Forwarded", "X-Original-Host", "X-Host"])
def test_what_a_proxy_would_say_about_the_host_is_not_believed(server: Running, header: str) -> None:
    value = "host=localhost" if header == "Forwarded" else "localhost"
    headers = {"Host": "evil.example", header: value}
    assert http.get(server.url + "/v1/agents", headers=headers).status_code == 403
    assert http.get(server.url + "/v1/agents", headers={header: "evil.example"}).status_code == 200


def test_two_hosts_are_none() -> None:
    twice = RequestHeaders([(b"host", b"localhost"), (b"host", b"evil.example")])
    assert Origins().why_not("GET", twice)


def test_names_that_were_allowed_are_served(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, origins=parse_origins((), ["LLM.example."], has_keys=False)) as server:
        for host, status in (
            ("llm.example", 200),
            ("llm.example:8080", 200),
            ("evil.example", 403),
            ("localhost", 200),
        ):
            assert http.get(server.url + "/v1/models", headers={"Host": host}).status_code == status


def test_with_keys_any_name_will_do_unless_names_are_given(path: Path, tmp_path: Path) -> None:
    key, evil = {"X-Api-Key": "key"}, {"Host": "evil.example"}
    with running(path, tmp_path / "a", keys={"key": "a"}) as server:
        assert http.get(server.url + "/v1/models", headers=key | evil).status_code == 200
        assert http.get(server.url + "/v1/models", headers=evil).status_code == 401
    named = parse_origins((), ["llm.example"], has_keys=True)
    with running(path, tmp_path / "b", keys={"key": "a"}, origins=named) as server:
        assert http.get(server.url + "/v1/models", headers=key | evil).status_code == 403
        assert http.get(server.url + "/v1/models", headers=key | {"Host": "llm.example"}).status_code == 200


# Cross-site: the name is ours, the page is the attacker's -------------------------------------------------------------


def test_no_route_but_health_answers_a_page_of_another_origin(server: Running) -> None:
    for method, path in routes(server):
        response = http.request(method, server.url + path, headers=CROSS)
        assert response.status_code == (200 if path == "/health" else 403), (method, path)
        if path != "/health":
            assert f"--cors {EVIL}" in response.json()["error"]["message"]
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("method", "route", "more"),
    [
        ("POST", "/v1/agents/ada/pin", {}),
        ("POST", "/v1/agents/ada/warm", {}),
        ("POST", "/v1/agents/ada/export", {}),
        ("POST", "/v1/agents/ada/fork", {"json": {"name": "copy"}}),
        ("DELETE", "/v1/agents/ada", {}),
        ("DELETE", "/v1/agents/ada?evict_only=true", {}),
        ("POST", "/v1/agents/import", {"content": b"x", "headers": FILE}),
        ("POST", "/v1/chat/completions", {"json": HELLO}),
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        CROSS,
        {"Origin": "null"},  # a sandboxed frame, a file
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},  # a form or a picture
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},  # a form
    ],
)
def test_nothing_changes_for_a_page_of_another_origin(
    server: Running, method: str, route: str, more: dict[str, Any], headers: dict[str, str]
) -> None:
    before = http.get(server.url + "/v1/agents/ada").json()
    asked = more | {"headers": more.get("headers", {}) | headers}
    assert http.request(method, server.url + route, **asked).status_code == 403
    assert http.get(server.url + "/v1/agents/ada").json() == before
    assert http.get(server.url + "/v1/agents/copy").status_code == 404


@pytest.mark.parametrize(
    ("headers", "served"),
    [
        ({}, True),  # no browser
        ({"Origin": "http://HOST"}, True),
        ({"Origin": "http://HOST", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "https://HOST", "Sec-Fetch-Site": "same-origin"}, True),  # behind a proxy that speaks TLS
        ({"Origin": "https://HOST", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://localhost:3000"}, False),
        ({"Origin": "http://127.0.0.1"}, False),
        ({"Origin": "http://HOST.evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": ""}, False),
        ({"Sec-Fetch-Site": "none"}, True),  # typed into the address bar
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "same-site"}, False),  # localhost on another port
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, True),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, False),
    ],
)
def test_who_may_read(server: Running, headers: dict[str, str], served: bool) -> None:
    own = server.url.removeprefix("http://")
    headers = {name: value.replace("HOST", own) for name, value in headers.items()}
    response = http.get(server.url + "/v1/agents/ada", headers=headers)
    assert response.status_code == (200 if served else 403)


def test_ports_that_go_without_saying_are_the_same_origin() -> None:
    for host, origin in (("llm", "http://llm"), ("llm:80", "http://llm"), ("llm:443", "https://llm")):
        headers = RequestHeaders([(b"host", host.encode()), (b"origin", origin.encode())])
        assert Origins(any_host=True).why_not("POST", headers) is None
    wrong = RequestHeaders([(b"host", b"llm:443"), (b"origin", b"http://llm")])
    assert Origins(any_host=True).why_not("POST", wrong)


def test_with_keys_pages_of_other_origins_are_refused_as_well(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, keys={"key": "a"}) as server:
        response = http.get(server.url + "/v1/models", headers=CROSS | {"X-Api-Key": "key"})
        assert response.status_code == 403


def test_a_refusal_has_anthropics_shape_on_its_routes(server: Running) -> None:
    refused = http.post(server.url + "/v1/messages", json={}, headers=CROSS).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "permission_error")


def test_the_page_to_try_the_api_can_send_nothing_elsewhere(server: Running) -> None:
    page = http.get(server.url + "/docs")
    assert "swagger-ui" in page.text
    policy = page.headers["Content-Security-Policy"]
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))


# --cors ---------------------------------------------------------------------------------------------------------------

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-agent-id"}


@pytest.mark.parametrize(
    ("given", "origin", "allowed"),
    [
        (["*"], "https://a.example", True),
        (["*"], "null", True),
        (["*", "https://a.example"], "https://b.example", True),
        (["https://a.example"], "https://a.example", True),
        (["https://a.example/"], "https://a.example", True),
        (["HTTPS://A.Example"], "https://a.example", True),
        (["https://a.example:443"], "https://a.example", True),
        (["http://localhost:3000", "https://a.example"], "http://localhost:3000", True),
        (["http://[::1]:3000"], "http://[::1]:3000", True),
        (["chrome-extension://abcdefgh"], "chrome-extension://abcdefgh", True),
        (["https://a.example"], "http://a.example", False),
        (["https://a.example"], "https://a.example:444", False),
        (["https://a.example"], "https://b.a.example", False),
        (["https://a.example"], "https://a.example.evil.example", False),
        (["https://a.example"], "null", False),
        ([], "https://a.example", False),
    ],
)
def test_pages_that_cors_allows_may_ask(
    path: Path, tmp_path: Path, given: list[str], origin: str, allowed: bool
) -> None:
    with running(path, tmp_path, origins=parse_origins(given, (), has_keys=False)) as server:
        asked = http.options(server.url + "/v1/chat/completions", headers={"Origin": origin} | PREFLIGHT)
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        answer = http.post(server.url + "/v1/chat/completions", json=HELLO, headers=headers)
        refused = http.post(server.url + "/v1/chat/completions", json={}, headers=headers)
    if not allowed:
        assert (asked.status_code, answer.status_code, refused.status_code) == (403, 403, 403)
        assert not any(name.startswith("access-control-allow") for name in (*asked.headers, *answer.headers))
        return
    assert (asked.status_code, answer.status_code, refused.status_code) == (200, 200, 400)
    shown = "*" if "*" in given else origin
    for response in (asked, answer, refused):  # a page can read why it was refused
        assert response.headers["access-control-allow-origin"] == shown
    assert "x-agent-id" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("given", ["null", "NULL", "a.example", "https://", "https://a.example/app", "https://*.example",
                                   "https://u@a.example", "https://a.example:99999", "", "https://a b"])  # fmt: skip
def test_a_cors_that_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--cors"):
        parse_origin(given)


@pytest.mark.parametrize("given", ["", "*", "llm.example:8080", "http://llm.example", "a b", "-a", "é.example"])
def test_a_name_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host"):
        parse_name(given)


def test_any_page_without_a_key_must_be_meant(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["everwarm"])
    assert cli.run(["serve", "smollm2", "--cors", "*"]) == 2
    assert "--insecure" in capsys.readouterr().err
