"""A real headless Chromium, driven by Playwright, for tests of the page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from browser import CHROMIUM

WHY_NOT = (
    "no Chromium here: install chromium, or set EVERWARM_CHROMIUM"
    if CHROMIUM is None
    else "Playwright is not installed: pip install playwright"
    if find_spec("playwright") is None
    else ""
)
"""Why the page can't be tested here; empty if it can."""

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
AXE = Path(__file__).parent.parent / "data" / "axe.min.js"


@contextmanager
def launched() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def opened(browser: Any, url: str, width: int = 1280, height: int = 800, **options: Any) -> Any:
    """A page of its own, which writes down in `page.troubles` whatever goes wrong in it."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.troubles = []
    page.requested = []
    page.on("console", lambda said: page.troubles.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", lambda request: page.requested.append(request.url))
    page.goto(url)
    return page


def findings(page: Any) -> list[str]:
    """What axe-core finds serious or worse, in words. It is run in the page's own world, past the page's policy."""
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    run = "axe.run().then((found) => JSON.stringify(found.violations))"
    said = session.send("Runtime.evaluate", {"expression": run, "awaitPromise": True, "returnByValue": True})
    session.detach()
    found = json.loads(said["result"]["value"])
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:150]} {one['nodes'][0].get('failureSummary', '')[:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
