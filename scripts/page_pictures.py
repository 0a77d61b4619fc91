"""Pictures of the page for the README and docs/page.md, taken by a real Chromium from a real server with SmolLM2.

    python scripts/page_pictures.py [FOLDER] [--all FOLDER]

Agents talk, some are evicted, the server is killed and started again; the page is photographed on the way. FOLDER
(docs/page) gets what the docs show. With --all, another folder gets every view at 1,280 and 390 pixels, light and dark,
to be looked at before a change of the page is called done. Needs Chromium, and `pip install playwright pillow`.
"""

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "server"), str(ROOT / "examples")]

from chromium import launched, look, look_until, opened
from stories import CLOCKMAKER, LIGHTHOUSE
from test_page import Server

from everwarm import config
from everwarm.pull import pull

WIDE, PHONE = (1280, 800), (390, 844)
ASSISTANT = "You answer questions about this story in one short sentence.\n\n"
DESK = "You are a friendly assistant of a small bookshop. You answer in one or two short sentences. " * 6
VISITORS = {
    "desk-anna": "Do you have books about the sea?",
    "desk-ben": "When do you open on Saturday?",
    "desk-cora": "Can I return a book that I don't like?",
    "desk-dora": "Which book would you give to a child of ten?",
}
VIEWS = ("chat/ada", "chat/librarian", "agents", "tree", "live", "model")


def ask(server: Server, agent: str, messages: list[dict[str, str]], most: int = 40) -> str:
    body = {"messages": messages, "max_tokens": most, "temperature": 0, "everwarm": {"agent": agent}}
    request = urllib.request.Request(
        server.url + "v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def post(server: Server, path: str, method: str = "POST", body: Any = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    urllib.request.urlopen(request, timeout=600).close()


def goto(page: Any, view: str) -> None:
    shown, _, name = view.partition("/")
    look(
        page,
        "location.hash = " + json.dumps(f"#/{'agents' if shown == 'tree' else shown}" + (f"/{name}" if name else "")),
    )
    if shown == "chat":
        page.wait_for_selector(".message.assistant" if name else "main")
        look_until(page, "!document.querySelector('.column > .quiet')")
    if shown == "agents":
        page.wait_for_selector(".row .tier:not(:text-is('…'))")
    if shown == "tree":
        page.click("[role=tab]:has-text('Shared prefixes')")
        page.wait_for_selector(".tree-picture")
    if shown == "live":
        page.wait_for_selector(".plot circle")
    if shown == "model":
        page.wait_for_selector(".facts")
    page.wait_for_timeout(400)


def say(page: Any, text: str) -> None:
    before = page.locator(".receipt").count()
    page.fill("#say", text)
    page.press("#say", "Enter")
    look_until(page, f"document.querySelectorAll('.receipt').length > {before}")
    page.wait_for_selector(".composer button[type=submit]")


def system(page: Any, text: str) -> None:
    page.locator(".tools button:has-text('Settings')").click()
    page.get_by_label("System prompt").fill(text)
    page.keyboard.press("Escape")


def picture(page: Any, path: Path) -> None:
    image = Image.open(io.BytesIO(page.screenshot()))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert("RGB").save(path, optimize=True)


def film(page: Any, frames: list[tuple[Image.Image, int]], ms: int) -> None:
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    frames.append((image.resize((960, 600), Image.Resampling.LANCZOS), ms))


def prepare(server: Server) -> None:
    """Agents of several kinds."""
    for name, story, question in (
        ("ada", LIGHTHOUSE, "What is the name of Mara's dog?"),
        ("bob", CLOCKMAKER, "What is the name of Emil's granddaughter?"),
    ):
        ask(server, name, [{"role": "system", "content": ASSISTANT + story}, {"role": "user", "content": question}])
    for name, question in VISITORS.items():
        ask(server, name, [{"role": "system", "content": DESK}, {"role": "user", "content": question}])
    post(server, "v1/agents/ada/pin", body={"pinned": True})
    post(server, "v1/agents/desk-anna/fork", body={"name": "desk-anna~2"})
    for name in ("bob", "desk-cora", "desk-dora"):
        post(server, f"v1/agents/{name}?evict_only=true", "DELETE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "page")
    parser.add_argument("--all", type=Path, help="where every view goes, in all sizes and colours")
    asked = parser.parse_args()
    os.environ.setdefault("EVERWARM_THREADS", "2")
    model = pull("smollm2", config.home())
    with tempfile.TemporaryDirectory(prefix="everwarm-page-") as home, launched() as browser:
        server = Server(model, Path(home), most_tokens=48)
        server.start()
        server.wait()
        try:
            prepare(server)
            frames: list[tuple[Image.Image, int]] = []
            page = opened(browser, server.url, *WIDE, reduced_motion="reduce")
            page.wait_for_selector(".foot .dot.live")
            goto_new(page, "librarian")
            rules = "You are a librarian. You answer in one short sentence and name the shelf. " * 5
            system(page, "Today is Monday. " + rules)
            say(page, "Where do I find books about stars?")
            system(page, "Today is Tuesday. " + rules)
            say(page, "And books about the sea?")
            page.wait_for_selector(".why")
            page.wait_for_timeout(1500)
            look(page, "document.querySelector('.messages').scrollTop = 1e6")
            picture(page, asked.folder / "why.png")
            goto(page, "chat/ada")
            say(page, "What was the name of the fishing boat?")
            film(page, frames, 1800)
            server.end(signal.SIGKILL)
            page.wait_for_selector(".banner >> text=The server is away")
            film(page, frames, 1600)
            server.start()
            server.wait()
            page.wait_for_selector(".banner", state="detached")
            page.wait_for_timeout(600)
            film(page, frames, 1000)
            page.fill("#say", "Who was its captain?")
            film(page, frames, 1200)
            before = page.locator(".receipt").count()
            page.press("#say", "Enter")
            started = time.monotonic()
            while page.locator(".receipt").count() <= before and time.monotonic() < started + 60:
                film(page, frames, 160)
            page.wait_for_timeout(1500)  # until the list of agents has heard of it
            film(page, frames, 4500)
            picture(page, asked.folder / "chat.png")
            for name in ("bob", "desk-ben"):  # something for the plots
                goto(page, f"chat/{name}")
                say(page, "Tell me more, please.")
                page.wait_for_timeout(4000)
                say(page, "And then?")
                page.wait_for_timeout(3000)
            page.wait_for_timeout(1500)
            for view, name in (("agents", "agents"), ("tree", "tree"), ("live", "live"), ("model", "model")):
                goto(page, view)
                picture(page, asked.folder / f"{name}.png")
            images, durations = zip(*frames, strict=True)
            images[0].save(
                asked.folder / "restart.webp", save_all=True, append_images=images[1:], duration=list(durations),
                loop=0, quality=60, method=6,
            )  # fmt: skip
            page.context.close()
            phone(browser, server, asked.folder)
            if asked.all is not None:
                everything(browser, server, asked.all)
        finally:
            server.end(signal.SIGTERM)


def goto_new(page: Any, name: str) -> None:
    look(page, "location.hash = " + json.dumps(f"#/chat/{name}"))
    page.wait_for_selector(f"textarea[aria-label='Message to {name}']")


def phone(browser: Any, server: Server, folder: Path) -> None:
    """Two pictures side by side: chat in light, agents in dark."""
    parts = []
    for scheme, view in (("light", "chat/ada"), ("dark", "agents")):
        page = opened(browser, server.url, *PHONE, color_scheme=scheme, is_mobile=True, has_touch=True)
        page.wait_for_selector(".phone-bar .dot.live")
        goto(page, view)
        if view.startswith("chat"):
            say(page, "Thank you. And the name of the dog?")
        parts.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        page.context.close()
    both = Image.new("RGB", (2 * PHONE[0] + 24, PHONE[1]), "white")
    both.paste(parts[0], (0, 0))
    both.paste(parts[1], (PHONE[0] + 24, 0))
    both.save(folder / "phone.png", optimize=True)


def everything(browser: Any, server: Server, folder: Path) -> None:
    for width, height in (WIDE, PHONE):
        for scheme in ("light", "dark"):
            page = opened(browser, server.url, width, height, color_scheme=scheme, reduced_motion="reduce")
            page.wait_for_selector(".dot.live", state="attached")
            for view in VIEWS:
                goto(page, view)
                if view == "chat/librarian":
                    system(page, f"Today is {scheme} {width}. You are a librarian who answers briefly. " * 4)
                    say(page, "Which books do you like?")
                picture(page, folder / f"{view.replace('/', '-')}-{width}-{scheme}.png")
            page.context.close()


if __name__ == "__main__":
    main()
