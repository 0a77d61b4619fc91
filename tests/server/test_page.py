"""The page in a real Chromium, against a real server with SmolLM2: what people do, and what a stranger might try."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium import WHY_NOT, findings, launched, look, look_until, opened
from running import running

from everwarm import config
from tiny import Tiny
from waiting_until import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

EVIL = '<img src=x onerror="window.hacked=1">'
MARKUP = f"""# Title {EVIL}

<script>window.hacked = 1</script>

{EVIL} **bold** `code` [click](javascript:window.hacked=1) [data](data:text/html,x) [fine](https://example.com/a)

![picture](https://evil.example/track.png)

<iframe src="https://evil.example"></iframe> &lt;b&gt; <svg onload="window.hacked=1">

| a | b |
|---|---|
| {EVIL} | 2 |

```html
<script>window.hacked = 1</script>
```
"""


CODE = "It is fine.\n\n```python\ndef f(x):\n    return x\n```\n"


class Server:
    """`everwarm serve` on one port, which can be killed and started again."""

    def __init__(self, model: Path, home: Path, most_tokens: int = 24) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(config.PREFIX)}
        self._environment |= {config.PREFIX + "HOME": str(home), config.PREFIX + "THREADS": "1"}
        options = ["--port", str(self.port), "--n-predict", str(most_tokens), "--temp", "0", "--alias", "smollm2"]
        self._command = [sys.executable, "-m", "everwarm", "serve", str(model), *options]
        self._log = home / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=log)

    def wait(self) -> None:
        wait_until(self._is_well, pause_s=0.1)

    def _is_well(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the server has ended"
        try:
            return httpx.get(self.url + "health").status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(smollm2_path, tmp_path_factory.mktemp("home"))
    server.start()
    server.wait()
    try:
        yield server
    finally:
        server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = opened(browser, server.url)
    page.wait_for_selector(".foot .dot.live")
    yield page
    assert page.troubles == []
    assert look(page, "window.hacked") is None
    assert {url.split("/")[2] for url in page.requested if url.startswith("http")} == {f"127.0.0.1:{server.port}"}
    page.context.close()


def goto(page: Any, view: str, name: str = "") -> None:
    look(page, "location.hash = " + json.dumps(f"#/{view}" + (f"/{name}" if name else "")))


def answered(page: Any, number: int) -> Any:
    """The receipt below the answer with this number, counted from 1."""
    look_until(page, f"document.querySelectorAll('.message.assistant .receipt').length >= {number}")
    page.wait_for_selector(".composer button[type=submit]")
    return page.locator(".message.assistant .receipt").nth(number - 1)


def talk(page: Any, agent: str, text: str) -> Any:
    goto(page, "chat", agent)
    page.wait_for_selector(f"textarea[aria-label='Message to {agent}']")
    look_until(page, "!document.querySelector('.column > .quiet')")  # the conversation has been read
    before = page.locator(".message.assistant .receipt").count()
    page.fill("#say", text)
    page.press("#say", "Enter")
    return answered(page, before + 1)


def test_the_page_loads_and_every_view_opens(page: Any) -> None:
    assert page.title() == "Chat · everwarm"
    for view, title in (("agents", "Agents"), ("live", "Live"), ("model", "smollm2"), ("chat", "")):
        page.click(f".rail nav a[href='#/{view}']")
        if title:
            page.wait_for_selector(f"h1:text-is('{title}')")
    assert page.locator(".foot small").inner_text() == "connected"


def test_two_agents_talk_and_each_answer_says_what_was_reused(page: Any) -> None:
    page.click("text=New conversation >> nth=0")
    page.fill("#say", "Please name three rivers of Europe.")
    page.press("#say", "Enter")
    first = answered(page, 1)
    name = page.locator("h1").inner_text()
    assert first.get_attribute("data-tier") == "cold"
    assert "computed" in first.inner_text()
    other = talk(page, "bob", "Please name three mountains of Asia, and how high they are.")
    assert page.locator("h1").inner_text() == "bob"
    assert other.is_visible()
    again = talk(page, name, "Which one is the longest?")
    assert again.get_attribute("data-tier") == "hot"
    assert "tokens were in memory" in again.inner_text()
    again.locator("summary").click()
    assert "bit for bit" in again.inner_text()
    page.wait_for_selector(f".conversations .list >> text={name}")


def test_editing_makes_a_branch_and_the_first_one_stays(page: Any) -> None:
    talk(page, "edited", "What is the capital of France?")
    page.locator(".message.user").hover()
    page.click("button[aria-label='Edit, and go on in a branch']")
    page.fill(".edit textarea", "What is the capital of Spain?")
    page.click("text=Send as a branch")
    page.wait_for_selector("h1:text-is('edited~2')")
    answered(page, 1)
    assert "2 / 2" in page.locator(".message.user .ways").inner_text()
    page.click(".message.user button[aria-label='Previous branch']")
    page.wait_for_selector("h1:text-is('edited')")
    page.wait_for_selector("text=What is the capital of France?")
    page.locator(".message.assistant").hover()
    page.click("button[aria-label='Regenerate in a branch']")
    page.wait_for_selector("h1:text-is('edited~3')")
    answered(page, 1)
    assert {one["id"] for one in httpx.get(page.url.split("#")[0] + "v1/agents").json()["data"]} >= {
        "edited", "edited~2", "edited~3",
    }  # fmt: skip


def test_an_answer_can_be_stopped_and_settings_count(page: Any) -> None:
    goto(page, "chat", "stopped")
    page.wait_for_selector("#say")
    page.click("text=Settings")
    page.get_by_label("Longest answer").fill("3000")
    page.get_by_label("System prompt").fill("You tell very long stories.")
    page.keyboard.press("Escape")
    page.fill("#say", "Tell me a story of a hundred pages.")
    page.press("#say", "Enter")
    look_until(page, "document.querySelector('.message.assistant .markdown')?.textContent.length > 40")
    page.click("button[aria-label=Stop]")
    page.wait_for_selector("text=You stopped this answer.")
    page.wait_for_selector("text=System prompt")


def test_evicting_an_agent_shows_its_blocks_on_disk(page: Any) -> None:
    talk(page, "evicted", "Something to remember: " + "the sea is wide and blue. " * 12)
    goto(page, "agents")
    row = page.locator("[data-agent='evicted']")
    row.locator(".tier.hot").wait_for()
    row.locator("button[aria-haspopup=menu]").click()
    page.click("[role=menuitem]:has-text('Evict from memory')")
    row.locator(".tier.warm").wait_for()
    assert row.locator("rect.block-warm").count() > 0
    row.locator("button[aria-haspopup=menu]").click()
    page.click("[role=menuitem]:has-text('Warm up')")
    row.locator(".tier.hot").wait_for()
    row.locator("button[aria-haspopup=menu]").click()
    page.click("[role=menuitem]:has-text('Pin')")
    row.locator("text=pinned").wait_for()


def test_agents_are_forked_exported_imported_and_deleted(page: Any, tmp_path: Path) -> None:
    talk(page, "moved", "A history that travels: " + "over the hills and far away. " * 10)
    goto(page, "agents", "moved")
    row = page.locator("[data-agent='moved']")
    row.locator("button[aria-haspopup=menu]").click()
    with page.expect_download() as download:
        page.click("[role=menuitem]:has-text('Export')")
    file = tmp_path / "moved.everwarm"
    download.value.save_as(file)
    with page.expect_file_chooser() as chooser:
        page.click("text=Import an agent")
    chooser.value.set_files(file)
    page.get_by_label("Name", exact=True).fill("moved-here")
    page.click("dialog button[type=submit]")
    page.locator("[data-agent='moved-here']").wait_for()
    row.locator("button[aria-haspopup=menu]").click()
    page.click("[role=menuitem]:has-text('Fork')")
    page.get_by_label("Name", exact=True).fill("moved-fork")
    page.click("dialog button[type=submit]")
    fork = page.locator("[data-agent='moved-fork']")
    fork.locator("rect.block-shared >> nth=0").wait_for()
    page.click("[role=tab]:has-text('Shared prefixes')")
    page.wait_for_selector(".tree-picture >> text=moved-fork")
    page.click("[role=tab]:has-text('List')")
    fork.locator("button[aria-haspopup=menu]").click()
    page.click("[role=menuitem]:has-text('Delete')")
    page.click("dialog button[type=submit]")
    fork.wait_for(state="detached")


def test_a_change_of_the_beginning_is_explained(page: Any) -> None:
    goto(page, "chat", "why")
    page.wait_for_selector("#say")
    page.click("text=Settings")
    page.get_by_label("System prompt").fill(
        "Today is Monday. " + "You are a careful librarian who answers briefly. " * 8
    )
    page.keyboard.press("Escape")
    talk(page, "why", "Who are you?")
    page.click("text=Settings")
    page.get_by_label("System prompt").fill(
        "Today is Tuesday. " + "You are a careful librarian who answers briefly. " * 8
    )
    page.keyboard.press("Escape")
    talk(page, "why", "And what do you do?")
    why = page.locator(".why")
    why.wait_for()
    assert "Monday" in why.locator(".excerpt.before mark").inner_text()
    assert "Tuesday" in why.locator(".excerpt.now mark").inner_text()
    assert "What to do:" in why.inner_text()


def test_a_conversation_is_exported_and_imported_again(page: Any, tmp_path: Path) -> None:
    talk(page, "letter", "Keep this sentence, please.")
    page.click("button[aria-label=More]")
    with page.expect_download() as download:
        page.click("text=Export as JSON")
    file = tmp_path / "letter.json"
    download.value.save_as(file)
    said = json.loads(file.read_text())
    assert [message["role"] for message in said["messages"]] == ["user", "assistant"]
    said["agent"] = "letter-again"
    file.write_text(json.dumps(said))
    with page.expect_file_chooser() as chooser:
        page.click("button[aria-label='Import a conversation']")
    chooser.value.set_files(file)
    page.wait_for_selector("h1:text-is('letter-again')")
    assert "Keep this sentence, please." in page.locator(".message.user").inner_text()
    page.fill("#say", "And go on.")
    page.press("#say", "Enter")
    answered(page, 1)


def test_text_files_are_dropped_in_and_found_again(page: Any) -> None:
    goto(page, "chat", "files")
    page.wait_for_selector("#say")
    look(
        page,
        """(() => {
          const files = new DataTransfer();
          files.items.add(new File(["a line about a Zeppelin"], "notes.txt", {type: "text/plain"}));
          files.items.add(new File(["\\u0000\\u0001"], "picture.bin"));
          document.querySelector("main").dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true}));
        })()""",
    )
    page.wait_for_selector(".files >> text=notes.txt")
    page.wait_for_selector("text=picture.bin is not a text file.")
    page.fill("#say", "What is it about?")
    page.press("#say", "Enter")
    answered(page, 1)
    assert "Zeppelin" in page.locator(".message.user").inner_text()
    page.fill("input[type=search]", "zeppelin")
    page.wait_for_selector(".hits mark:text-is('Zeppelin')")


def imported(page: Any, tmp_path: Path, name: str, messages: list[dict[str, Any]]) -> None:
    file = tmp_path / "conversation.json"
    file.write_text(json.dumps({"agent": name, "messages": messages}))
    with page.expect_file_chooser() as chooser:
        page.click("button[aria-label='Import a conversation']")
    chooser.value.set_files(file)
    page.wait_for_selector(".message")


def test_reasoning_is_folded_and_tool_calls_are_shown(page: Any, tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    imported(page, tmp_path, "thinker", [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "A tool knows.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": CODE},
    ])  # fmt: skip
    assert not page.locator(".reasoning .markdown").is_visible()
    page.click(".reasoning summary")
    page.wait_for_selector("text=A tool knows.")
    assert "weather" in page.locator("section.tool").inner_text()
    assert '"city": "Oslo"' in page.locator("section.tool").inner_text()
    page.click(".tool.result summary")
    page.wait_for_selector("text=blue")
    assert page.locator(".hljs-keyword").first.inner_text() == "def"
    page.click(".code button[aria-label='Copy code']")


def test_hostile_names_and_messages_stay_text(page: Any, server: Server, tmp_path: Path) -> None:
    body = {
        "messages": [
            {"role": "user", "content": EVIL},
            {"role": "assistant", "content": MARKUP},
            {"role": "user", "content": "Hi"},
        ]
    }
    names = [EVIL, '"><script>window.hacked=1</script>', "a/b?c#d%2e", "..", "javascript:window.hacked=1"]
    for name in names:
        asked = body | {"max_tokens": 1, "everwarm": {"agent": name}}
        httpx.post(server.url + "v1/chat/completions", json=asked).raise_for_status()
    goto(page, "agents")
    for name in names:
        page.fill(".filters input", name)
        page.get_by_role("link", name=name, exact=True).last.wait_for()
    page.fill(".filters input", "")
    page.click("[role=tab]:has-text('Shared prefixes')")
    page.wait_for_selector(".tree-picture")
    goto(page, "live")
    page.wait_for_selector(".past >> text=window.hacked >> nth=0")
    goto(page, "chat", "")
    page.fill(".conversations input", "onerror")
    page.wait_for_selector(".hits li")
    page.click(".conversations .list a >> nth=0")
    page.wait_for_selector(".message.assistant h3")
    shown = page.locator(".message.assistant").first
    assert shown.locator("img, script, iframe, svg[onload]").count() == 0
    links = shown.locator(".markdown a")
    assert [links.nth(at).get_attribute("href") for at in range(links.count())] == ["https://example.com/a"]
    assert EVIL in shown.inner_text()
    assert look(page, "window.hacked") is None


def test_the_policy_holds_in_the_browser(browser: Any, server: Server) -> None:
    page = opened(browser, server.url)
    page.wait_for_selector(".foot .dot.live")
    said = look(
        page,
        """(async () => {
          const broken = [];
          document.addEventListener("securitypolicyviolation", (event) => broken.push(event.effectiveDirective));
          const attempt = async (act) => { try { await act(); return "done"; } catch (error) { return error.name; } };
          await new Promise((done) => setTimeout(done));  // out of the debugger's hands, which may do everything
          const markup = await attempt(() => { document.body.innerHTML = "<b>x</b>"; });
          const code = await attempt(() => (0, eval)("1"));
          const elsewhere = await attempt(() => fetch("https://example.com/"));
          const picture = document.createElement("img");
          picture.src = "https://example.com/x.png";
          document.body.append(picture);
          const style = document.createElement("style");
          style.textContent = "body { color: red }";
          document.head.append(style);
          await new Promise((done) => setTimeout(done, 300));
          return {markup, code, elsewhere, broken};
        })()""",
    )
    assert said["markup"] == "TypeError"
    assert said["code"] != "done"
    assert said["elsewhere"] == "TypeError"
    assert {"img-src", "style-src-elem", "connect-src"} <= set(said["broken"])
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, server: Server, scheme: str) -> None:
    page = opened(browser, server.url, color_scheme=scheme, reduced_motion="reduce")
    page.wait_for_selector(".foot .dot.live")
    talk(page, "axe", "Say something short.")
    found = findings(page)
    if scheme == "light":  # the structure is the same in both; the colours are in all of the others
        page.click("text=Settings")
        page.wait_for_selector("dialog")
        found += findings(page)
        page.keyboard.press("Escape")
        goto(page, "model")
        page.wait_for_selector(".facts")
        found += findings(page)
    goto(page, "agents")
    page.wait_for_selector(".row .tier.hot, .row .tier.warm")
    found += findings(page)
    page.click("[role=tab]:has-text('Shared prefixes')")
    page.wait_for_selector(".tree-picture")
    found += findings(page)
    goto(page, "live")
    page.wait_for_selector(".plot circle")
    found += findings(page)
    assert found == []
    dark = look(page, "getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in dark[4:-1].split(",")) < 200) == (scheme == "dark")
    assert page.troubles == []
    page.context.close()


def test_the_theme_can_be_switched(page: Any) -> None:
    before = look(page, "getComputedStyle(document.body).backgroundColor")
    page.click("button[aria-label='Switch between light and dark']")
    assert look(page, "getComputedStyle(document.body).backgroundColor") != before


def test_it_fits_a_phone(browser: Any, server: Server) -> None:
    page = opened(browser, server.url, 390, 780, has_touch=True, is_mobile=True)
    page.wait_for_selector(".phone-bar .dot.live")
    talk(page, "phone", "A word, please.")
    for view in ("chat/phone", "agents", "live", "model", "chat"):
        goto(page, view)
        page.wait_for_selector("main")
        page.wait_for_timeout(200)
        assert look(page, "document.documentElement.scrollWidth") <= 390, view
    page.click("button[aria-label=Conversations]")
    page.wait_for_selector(".rail.open")
    page.click(".rail .list a:has-text('phone')")
    page.wait_for_selector(".rail:not(.open)", state="attached")
    page.click(".phone-nav a:has-text('Live')")
    page.wait_for_selector("h1:text-is('Live')")
    assert page.troubles == []
    page.context.close()


def test_it_can_be_used_with_the_keyboard(page: Any) -> None:
    page.keyboard.press("Tab")
    assert look(page, "document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert look(page, "document.activeElement.id") == "main"
    goto(page, "agents")
    page.locator(".row button[aria-haspopup=menu]").first.focus()
    page.keyboard.press("Enter")
    look_until(page, "document.activeElement.textContent == 'Evict from memory'")
    page.keyboard.press("ArrowDown")
    look_until(page, "document.activeElement.textContent == 'Warm up'")
    page.keyboard.press("Escape")
    look_until(page, "document.activeElement.getAttribute('aria-haspopup') == 'menu'")


def test_a_killed_server_comes_back_under_the_page_and_the_agent_is_warm(browser: Any, server: Server) -> None:
    page = opened(browser, server.url)
    page.wait_for_selector(".foot .dot.live")
    talk(page, "survivor", "Remember this: " + "the lighthouse has ninety-nine steps and one dog. " * 20)
    server.end(signal.SIGKILL)
    page.wait_for_selector(".banner >> text=The server is away")
    server.start()
    server.wait()
    page.wait_for_selector(".foot .dot.live")
    page.wait_for_selector(".banner", state="detached")
    receipt = talk(page, "survivor", "How many steps does it have?")
    assert receipt.get_attribute("data-tier") == "warm"
    assert "tokens restored in" in receipt.inner_text()
    assert "computing them takes about" in receipt.inner_text()
    away = ("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "503")  # the browser says so of each try
    assert [said for said in page.troubles if not any(word in said for word in away)] == []
    page.context.close()


# Other servers --------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_memory_only(browser: Any, tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    keys, readers = {"key-a": "anna", "key-b": "bert"}, {"look-a": "anna"}
    with running(tmp_path / "tiny.gguf", tmp_path, keys=keys, readers=readers) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "everwarm": {"agent": "annas"}}
        httpx.post(server.url + "/v1/chat/completions", json=body, headers={"X-Api-Key": "key-a"}).raise_for_status()
        page = opened(browser, server.url + "/")
        page.get_by_label("API key").fill("wrong")
        page.click("text=Open")
        page.wait_for_selector("text=The server does not know this key.")
        page.get_by_label("API key").fill("key-b")
        page.click("text=Open")
        page.wait_for_selector(".foot .dot.live")
        goto(page, "agents")
        page.wait_for_selector("text=No agents yet")  # those of others are not told
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert look(page, kept) == '[{},{},""]'
        page.reload()
        page.get_by_label("API key").fill("look-a")
        page.click("text=Open")
        page.wait_for_selector(".foot >> text=looking only")
        goto(page, "chat", "annas")
        page.wait_for_selector("text=You are looking only")
        assert page.locator("#say").count() == 0
        goto(page, "agents")
        page.wait_for_selector("[data-agent=annas]")
        assert page.locator(".row [aria-haspopup=menu]").count() == 0
        page.context.close()


def test_hostile_metadata_of_a_model_stays_text(browser: Any, tmp_path: Path) -> None:
    Tiny(context=512, metadata={"evil": EVIL}).write(tmp_path / "tiny.gguf")
    with running(tmp_path / "tiny.gguf", tmp_path, name=EVIL) as server:
        page = opened(browser, server.url + "/#/model")
        page.wait_for_selector(".facts")
        assert EVIL in page.locator("h1").inner_text()
        page.click("text=All metadata of the file")
        page.click("button:text-is('Python')")
        assert look(page, "window.hacked") is None
        assert page.locator("main img").count() == 0
        assert page.troubles == []
        page.context.close()


def test_the_page_waits_while_the_model_is_loaded(browser: Any, server: Server) -> None:
    page = opened(browser, server.url)
    page.route("**/health", lambda route: route.fulfill(status=503, json={"status": "loading", "doing": "packing"}))
    page.route("**/v1/page/session", lambda route: route.fulfill(status=503, json={"status": "loading"}))
    page.goto(server.url + "#/model")
    page.reload()
    page.wait_for_selector("text=The model is being loaded")
    page.unroute_all()
    page.wait_for_selector(".foot .dot.live")
    page.context.close()
