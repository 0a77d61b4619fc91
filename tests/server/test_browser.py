"""Attacks by a stranger's web page, from a real browser: what `test_origin.py` shows by hand is shown here by Chromium.

Each attack is made twice: on a server as it is, and on one whose door was taken out, to see that the page can do harm.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, WITHIN_S, Stranger, chromium, stranger, visit
from running import Running, running

from everwarm.server.origin import Origins, parse_origins
from tiny import Tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install chromium, or set EVERWARM_CHROMIUM"),
]

SECRET = "the password is swordfish"
HELLO = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "everwarm": {"agent": "ada"}}
NO_DOOR = Origins(frozenset("*"), any_host=True)

ATTACKS = """
  const agent = "/v1/agents/ada", plain = {method: "POST", mode: "no-cors", body: '{"name": "copy", "pinned": true}'};
  const said = {
    history: await read(agent),
    list: await read("/v1/agents?all=true"),
    metrics: await read("/metrics"),
    models: await read("/v1/models", {method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"}),
    pin: await send(agent + "/pin", {method: "POST", mode: "no-cors"}),
    warm: await send(agent + "/warm", {method: "POST", mode: "no-cors"}),
    export: await send(agent + "/export", {method: "POST", mode: "no-cors"}),
    fork: await send(agent + "/fork", plain),
    poison: await send("/v1/agents/import?name=evil&trust=true", plain),
    untyped: await send("/v1/agents/import?name=evil", {method: "POST", mode: "no-cors", body: new Blob(["x"])}),
    beacon: navigator.sendBeacon(target + "/v1/agents/import?name=evil&trust=true", "x"),
    chat: await send("/v1/chat/completions", {method: "POST", mode: "no-cors", body: '{"messages": []}'}),
    remove: await send(agent, {method: "DELETE"}),
  };
  const put = (tag, more) => new Promise((done) => {
    const made = Object.assign(document.createElement(tag), more);
    made.onload = () => done("loaded"); made.onerror = () => done("refused"); setTimeout(() => done("silent"), 3000);
    document.body.append(made);
  });
  said.picture = await put("img", {src: target + agent});
  said.script = await put("script", {src: target + "/openapi.json"});
  document.body.insertAdjacentHTML("beforeend", `<iframe name="frame"></iframe><form method="post" target="frame"
    enctype="text/plain" action="${target}/v1/agents/import?name=evil&trust=true"><input name="a" value="b"></form>`);
  document.forms[0].submit();
  await new Promise((done) => setTimeout(done, 500));
  await tell(said);
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=512).write(path)
    return path


@pytest.fixture
def evil() -> Iterator[Stranger]:
    with stranger() as server:
        yield server


def remember(server: Running) -> Any:
    httpx.post(server.url + "/v1/chat/completions", json=HELLO, timeout=60).raise_for_status()
    return httpx.get(server.url + "/v1/agents/ada").json()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "evil.example"])
def test_a_page_of_another_origin_reads_and_changes_nothing(
    model: Path, tmp_path: Path, evil: Stranger, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    with running(model, tmp_path) as server:
        before = remember(server)
        evil.page("/", server.url, ATTACKS)
        with caplog.at_level(logging.INFO):
            caplog.clear()
            names = {"evil.example": "127.0.0.1"}
            said = visit(f"http://{host}:{evil.port}/", lambda: evil.heard.get(timeout=WITHIN_S), names=names)
            statuses = {line["status"] for line in lines(caplog)}
        assert httpx.get(server.url + "/v1/agents/ada").json() == before
        assert [agent["id"] for agent in httpx.get(server.url + "/v1/agents?all=true").json()["data"]] == ["ada"]
    assert SECRET not in json.dumps(said)
    for what in ("history", "list", "metrics", "models", "remove"):
        assert said[what].startswith("refused: TypeError"), (what, said)
    assert statuses == {403}  # it was the server that refused, not only the browser
    assert (said["picture"], said["script"]) != ("loaded", "loaded")


def test_the_same_page_reads_and_changes_everything_where_there_is_no_door(
    model: Path, tmp_path: Path, evil: Stranger
) -> None:
    with running(model, tmp_path, origins=NO_DOOR) as server:
        remember(server)
        evil.page("/", server.url, ATTACKS)
        said = visit(f"http://127.0.0.1:{evil.port}/", lambda: evil.heard.get(timeout=WITHIN_S))
        assert httpx.get(server.url + "/v1/agents/ada").status_code == 404  # removed
    assert SECRET in said["history"]


REBINDING = """
  await tell("loaded");
  const answered = async () => {  // until the other server is there and remembers someone
    while (true) {
      const status = await attempt(async () => (await fetch("/v1/agents/ada")).status);
      if (status == 200 || status == 403) return;
      await new Promise((done) => setTimeout(done, 100));
    }
  };
  await answered();
  const body = JSON.stringify({messages: [{role: "user", content: "x"}], max_tokens: 1});
  const json = {method: "POST", headers: {"Content-Type": "application/json"}, body};
  await tell({history: await read("/v1/agents/ada"), chat: await read("/v1/chat/completions", json)});
"""


@pytest.mark.parametrize("origins", [None, NO_DOOR], ids=["as it is", "no door"])
def test_a_page_whose_name_is_pointed_to_this_machine_reads_nothing(
    model: Path, tmp_path: Path, evil: Stranger, origins: Origins | None
) -> None:
    """The page comes from evil.example on some port. Then another server has that name and port: this one."""
    with stranger() as first:
        first.page("/", "", REBINDING, report=evil.report)
        with chromium(f"http://evil.example:{first.port}/", names={"evil.example": "127.0.0.1"}):
            assert evil.heard.get(timeout=WITHIN_S) == "loaded"
            first.close()
            with running(model, tmp_path, origins=origins, port=first.port) as server:
                remember(server)
                said = evil.heard.get(timeout=WITHIN_S)
    if origins is NO_DOOR:
        assert SECRET in said["history"]
    else:
        assert SECRET not in json.dumps(said)
        for got in said.values():
            assert "--allowed-host" in json.loads(got)["error"]["message"]


def test_a_link_from_another_site_opens_the_page(
    model: Path, tmp_path: Path, evil: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    with running(model, tmp_path) as server, caplog.at_level(logging.INFO):
        evil.page("/", server.url, 'await tell("loaded"); location = target + "/v1/models";')
        with chromium(f"http://localhost:{evil.port}/"):
            assert evil.heard.get(timeout=WITHIN_S) == "loaded"
            wait_for(lambda: any(line["route"] == "/v1/models" for line in lines(caplog)))
        found = [line for line in lines(caplog) if line["route"] == "/v1/models"]
    assert found[0]["status"] == 200


def test_a_page_that_cors_allows_talks(model: Path, tmp_path: Path, evil: Stranger) -> None:
    allowed = parse_origins([f"http://localhost:{evil.port}/"], (), has_keys=False)
    asked: dict[str, Any] = {"method": "POST", "headers": {"Content-Type": "application/json", "X-Agent-Id": "page"}}
    asked["body"] = json.dumps(HELLO)
    script = f'await tell(await read("/v1/chat/completions", {json.dumps(asked)}));'
    with running(model, tmp_path, origins=allowed) as server:
        evil.page("/", server.url, script)
        said = visit(f"http://localhost:{evil.port}/", lambda: evil.heard.get(timeout=WITHIN_S))
        assert json.loads(said)["everwarm"]["agent"] == "page"
        said = visit(f"http://127.0.0.1:{evil.port}/", lambda: evil.heard.get(timeout=WITHIN_S))
        assert said.startswith("refused: TypeError")


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
