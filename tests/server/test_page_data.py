"""The page without a browser: its files, its data, who may see what, and that nothing is sampled while nobody looks."""

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, running

from everwarm.cli.serve import open_browser, parse_reader_keys
from everwarm.errors import ConfigError
from everwarm.server.page import ended, live, static
from everwarm.server.page.routes import PageOptions
from everwarm.server.process import page_file
from tiny import Tiny
from waiting_until import wait_until

HTML = {"Accept": "text/html,application/xhtml+xml", "Accept-Encoding": "gzip"}
KEYS = {"key-a": "anna", "key-b": "bert"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=512).write(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(model, tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    with running(model, home, keys=KEYS, readers={"look-a": "anna"}, operators=["key-o"]) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def talk(server: Running, agent: str, text: str = "Hello there, " * 20, key: str = "", **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "everwarm": {"agent": agent}} | more
    response = httpx.post(server.url + "/v1/chat/completions", json=body, headers=bearer(key) if key else {})
    assert response.status_code == 200, response.text
    return response.json()


def watched(server: Running, until: str, key: str = "", most: int = 40) -> dict[str, list[Any]]:
    """Live events by name, until one of a name has come."""
    found: dict[str, list[Any]] = {}
    headers = bearer(key) if key else {}
    with httpx.stream("GET", server.url + "/v1/page/live", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.setdefault(name, []).append(json.loads(line[6:]))
                if name == until or sum(map(len, found.values())) > most:
                    return found
    return found


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_browser_gets_the_page_and_a_program_gets_the_name_of_the_server(server: Running) -> None:
    page = httpx.get(server.url + "/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module" src="/page/app.js">' in page.text
    assert httpx.get(server.url + "/").json()["server"] == "everwarm"


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/app.css", "/page/icon.svg"])
def test_files_have_a_strict_policy_and_are_compressed(server: Running, path: str) -> None:
    found = httpx.get(server.url + path, headers=HTML)
    assert found.status_code == 200
    policy = dict(part.strip().partition(" ")[::2] for part in found.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["content-encoding"] == "gzip"
    again = httpx.get(server.url + path, headers={**HTML, "If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = httpx.get(server.url + path, headers={"Accept": "text/html", "Accept-Encoding": "identity"})
    assert plain.content == found.content


def test_the_page_refers_to_no_other_host() -> None:
    for name in ("index.html", "app.css"):
        text = (static.FOLDER / name).read_text(encoding="utf-8")
        assert "http:" not in text
        assert "https:" not in text
        assert "//" not in text


def test_the_page_weighs_less_than_300_kilobytes() -> None:
    assert static.weight() < 300_000
    script = (static.FOLDER / "app.js").read_bytes()
    assert len(gzip.compress(script, 9)) < static.weight()


@pytest.mark.parametrize("path", ["/page/../keys.py", "/page/%2e%2e/keys.py", "/page/nothing.js", "/page/__init__.py"])
def test_no_other_file_is_served(server: Running, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 404


def test_the_page_is_there_while_the_model_is_loaded() -> None:
    headers = [(b"accept", b"text/html")]
    assert page_file({"method": "GET", "path": "/", "headers": headers}) is not None
    assert page_file({"method": "GET", "path": "/page/app.js", "headers": []}) is not None
    assert page_file({"method": "GET", "path": "/", "headers": []}) is None  # a program is told to come again
    assert page_file({"method": "GET", "path": "/v1/models", "headers": headers}) is None


def test_the_page_can_be_switched_off(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, page=PageOptions("off")) as server:
        assert httpx.get(server.url + "/", headers=HTML).json()["server"] == "everwarm"
        assert httpx.get(server.url + "/page/app.js").status_code == 404
        assert httpx.get(server.url + "/v1/page/session").status_code == 404


def test_a_page_that_only_looks_is_told_so(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, page=PageOptions("read-only")) as server:
        assert httpx.get(server.url + "/v1/page/session").json()["read_only"]
        assert httpx.get(server.url + "/", headers=HTML).status_code == 200


# Live -----------------------------------------------------------------------------------------------------------------


def test_hello_has_agents_and_what_ended(server: Running) -> None:
    talk(server, "ada")
    hello = watched(server, "hello")["hello"][0]
    row = dict(zip(hello["agent_fields"], next(row for row in hello["agents"] if row[0] == "ada"), strict=True))
    assert row["tokens"] > 0
    assert (row["pinned"], row["anonymous"], row["talking"]) == (False, False, False)
    last = [one for one in hello["ended"] if one["agent"] == "ada"][-1]
    assert (last["status"], last["completion_tokens"], last["tier"]) == (200, 3, "cold")
    assert last["ttft_s"] > 0
    assert hello["machine"]
    assert len(hello["layers"]) >= 2
    assert all(layer["resident_bytes"] == layer["bytes"] for layer in hello["layers"])


def test_ticks_follow_and_agents_that_change_are_told(server: Running) -> None:
    found: dict[str, list[Any]] = {}
    with httpx.stream("GET", server.url + "/v1/page/live") as response:
        name, sent = "", False
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.setdefault(name, []).append(json.loads(line[6:]))
                if name == "hello":
                    talk(server, "newcomer")
                    sent = True
                if name == "agents" and sent and any(row[0] == "newcomer" for row in found["agents"][-1]["changed"]):
                    break
    told = [one for tick in found["tick"] for one in tick.get("ended", [])]
    assert [one["agent"] for one in told] == ["newcomer"]
    assert found["tick"][-1]["counted"][0] >= 3
    samples = [dict(zip(found["hello"][0]["fields"], tick["sample"], strict=True)) for tick in found["tick"]]
    assert samples[-1]["written"] - samples[0]["written"] in (0, 3)
    assert samples[-1]["written"] >= 3


def test_an_agent_that_is_removed_is_told(server: Running) -> None:
    talk(server, "leaver")
    with httpx.stream("GET", server.url + "/v1/page/live") as response:
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                said = json.loads(line[6:])
                if name == "hello":
                    assert httpx.delete(server.url + "/v1/agents/leaver").status_code == 200
                if name == "agents" and "leaver" in said["gone"]:
                    break


def test_nothing_is_sampled_while_nobody_looks(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(server, "tick")
    taken: list[float] = []
    original = live.take
    monkeypatch.setattr(live, "take", lambda serving: (taken.append(time.monotonic()), original(serving))[1])
    time.sleep(2 * live.EVERY_S)  # the last look of the page that was closed
    taken.clear()
    time.sleep(3 * live.EVERY_S)
    assert taken == []
    watched(server, "tick")
    assert taken


def test_a_page_that_does_not_read_is_let_go() -> None:
    watcher = live.Watcher("default")
    assert all(watcher.put("x") for _ in range(live.MOST_BEHIND))
    assert not watcher.put("x")


def test_only_the_last_hour_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(ended.time, "time", lambda: now[0])
    kept = ended.EndedRequests()
    line = _line("ada")
    kept.observe(line)
    now[0] += ended.KEPT_S - 1
    kept.observe(line)
    assert len(kept.of("default")) == 2
    now[0] += 2
    assert len(kept.of("default")) == 1
    assert kept.of("another") == []
    for _ in range(ended.MOST_KEPT + 5):
        kept.observe(line)
    assert len(kept.of("default")) == ended.MOST_KEPT
    assert len(kept.of("default", since=kept.number - 3)) == 3


def _line(agent: str) -> Any:
    from everwarm.server.log import Line
    from everwarm.server.serving import Outcome

    outcome = Outcome("id", "/v1/chat/completions", agent, "default", inter_token_s=[0.1, 0.2, 0.3], ttft_s=0.5)
    return Line("id", "POST", "/v1/chat/completions", outcome=outcome)


# Pictures -------------------------------------------------------------------------------------------------------------


def test_blocks_are_hot_then_warm_then_hot_again(server: Running) -> None:
    talk(server, "strip")

    def blocks() -> Any:
        return httpx.post(server.url + "/v1/page/blocks", json={"names": ["strip", "nobody"]}).json()["agents"]

    assert set(blocks()) == {"strip"}
    before = blocks()["strip"]
    assert {kind.split("-")[0] for kind, _ in before["runs"]} == {"hot"}
    assert sum(count for _, count in before["runs"]) == -(-before["cached_tokens"] // before["block_tokens"])
    httpx.delete(server.url + "/v1/agents/strip?evict_only=true")
    after = blocks()["strip"]
    assert "warm" in {kind.split("-")[0] for kind, _ in after["runs"]}
    httpx.post(server.url + "/v1/agents/strip/warm")
    assert blocks()["strip"]["tier"] == "hot"


def test_a_fork_shares_its_blocks_and_the_tree_shows_it(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as server:
        talk(server, "first")
        httpx.post(server.url + "/v1/agents/first/fork", json={"name": "second"})
        runs = httpx.post(server.url + "/v1/page/blocks", json={"names": ["second"]}).json()["agents"]["second"]["runs"]
        assert {kind for kind, _ in runs} == {"hot-shared"}
        tree = httpx.get(server.url + "/v1/page/tree").json()
        assert tree["agents"] == 2
        (root,) = tree["roots"]
        assert root["owners"] == 2
        assert root["begin"] == 0
        assert "Hello there" in root["text"]
        ends = [root]
        while ends[-1]["children"]:
            ends.append(ends[-1]["children"][0])
        assert sorted(ends[-1]["agents"]) == ["first", "second"]


def test_histories_that_part_are_drawn_as_branches(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as server:
        common = "the same beginning of both histories " * 8
        talk(server, "left", common + "and then to the left " * 8)
        talk(server, "right", common + "and then to the right " * 8)
        (root,) = httpx.get(server.url + "/v1/page/tree").json()["roots"]
        assert root["owners"] == 2
        assert sorted(name for child in root["children"] for name in child["agents"]) == ["left", "right"]
        assert all(child["begin"] == root["end"] for child in root["children"])


def test_words_are_found_in_messages(server: Running) -> None:
    talk(server, "finder", "somewhere in here a Xylophone is hidden")
    said = httpx.get(server.url + "/v1/page/search", params={"q": "xyloPHONE"}).json()
    assert [(one["agent"], one["text"]) for one in said["found"]] == [("finder", "Xylophone")]
    assert httpx.get(server.url + "/v1/page/search", params={"q": ""}).status_code == 400


def test_the_model_is_described_with_commands_that_name_this_server(server: Running) -> None:
    said = httpx.get(server.url + "/v1/page/model").json()
    assert said["inspect"]["architecture"] == "llama"
    assert {one["name"] for one in said["connect"]} >= {
        "claude",
        "codex",
        "opencode",
        "qwen",
        "aider",
        "python",
        "curl",
    }
    assert all(server.url in one["command"] for one in said["connect"])
    memory = said["machine"]["memory"]
    assert memory["weight_bytes"] <= memory["process_bytes"]
    assert "/" not in said["inspect"]["path"]


def test_a_receipt_says_what_computing_would_take(server: Running) -> None:
    text = "a prompt that is long enough to be measured " * 6
    first = talk(server, "measured", text)
    more = [{"role": "user", "content": text}, first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    again = talk(server, "measured", messages=more)["everwarm"]
    assert again["cached_tokens"] > 64
    assert again["computing_s"] > 0


# Who may see what -----------------------------------------------------------------------------------------------------


def test_files_need_no_key_and_data_does(keyed: Running) -> None:
    assert httpx.get(keyed.url + "/", headers=HTML).status_code == 200
    assert httpx.get(keyed.url + "/page/app.js").status_code == 200
    assert httpx.get(keyed.url + "/").status_code == 401  # what programs are told
    for path in ("session", "live", "tree", "model", "search?q=a"):
        assert httpx.get(f"{keyed.url}/v1/page/{path}").status_code == 401
    assert httpx.post(keyed.url + "/v1/page/blocks", json={"names": []}).status_code == 401
    assert httpx.get(keyed.url + "/v1/page/session", headers=bearer("key-o")).status_code == 403


def test_a_tenant_sees_its_own_only(keyed: Running) -> None:
    talk(keyed, "annas", "the secret of anna", key="key-a")
    talk(keyed, "berts", "the secret of bert", key="key-b")
    for key, own, others in (("key-a", "annas", "berts"), ("key-b", "berts", "annas")):
        hello = watched(keyed, "tick", key)
        text = json.dumps(hello)
        assert own in text
        assert others not in text
        assert "samples" not in hello["hello"][0]
        assert "sample" not in hello["tick"][0]
        found = httpx.get(keyed.url + "/v1/page/search?q=secret", headers=bearer(key)).json()["found"]
        assert [one["agent"] for one in found] == [own]
        asked = httpx.post(keyed.url + "/v1/page/blocks", json={"names": [own, others]}, headers=bearer(key)).json()
        assert set(asked["agents"]) == {own}
        tree = httpx.get(keyed.url + "/v1/page/tree", headers=bearer(key)).text
        assert others not in tree
        model = httpx.get(keyed.url + "/v1/page/model", headers=bearer(key)).json()
        assert "machine" not in model
        assert "YOUR_KEY" in json.dumps(model["connect"])
        assert key not in json.dumps(model)


def test_a_key_that_only_looks_changes_nothing(keyed: Running) -> None:
    talk(keyed, "looked-at", key="key-a")
    look = bearer("look-a")
    assert httpx.get(keyed.url + "/v1/page/session", headers=look).json()["read_only"]
    assert httpx.get(keyed.url + "/v1/agents/looked-at", headers=look).status_code == 200
    assert httpx.post(keyed.url + "/v1/page/blocks", json={"names": ["looked-at"]}, headers=look).json()["agents"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for method, path, more in (
        ("POST", "/v1/chat/completions", {"json": body}),
        ("DELETE", "/v1/agents/looked-at", {}),
        ("POST", "/v1/agents/looked-at/pin", {}),
        ("POST", "/v1/agents/looked-at/fork", {"json": {"name": "x"}}),
    ):
        refused = httpx.request(method, keyed.url + path, headers=look, **more)
        assert refused.status_code == 403
        assert "may only look" in refused.text
    assert httpx.get(keyed.url + "/v1/agents/looked-at", headers=look).status_code == 200


def test_a_reader_s_key_opens_nothing_else() -> None:
    assert parse_reader_keys(["anna:look"], ["key-a"], ["key-o"]) == {"look": "anna"}
    for taken in ("key-a", "key-o"):
        with pytest.raises(ConfigError, match="opens more"):
            parse_reader_keys([f"anna:{taken}"], ["key-a"], ["key-o"])


def test_a_stranger_s_name_gets_no_page(server: Running) -> None:
    refused = httpx.get(server.url + "/", headers={**HTML, "Host": "evil.example"})
    assert refused.status_code == 403


def test_pages_of_other_origins_can_t_watch(server: Running) -> None:
    refused = httpx.get(server.url + "/v1/page/live", headers={"Origin": "http://evil.example"})
    assert refused.status_code == 403


def test_too_many_pages_are_told_to_come_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 0)
    refused = httpx.get(server.url + "/v1/page/live")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


def test_without_a_screen_no_browser_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert not open_browser("http://127.0.0.1:8080/")


def test_a_page_that_is_closed_is_forgotten(server: Running) -> None:
    watched(server, "tick")
    wait_until(lambda: httpx.get(server.url + "/health").status_code == 200)
    talk(server, "after")  # nobody is told, and nothing breaks
