"""A real headless Chromium, driven by Playwright, for tests of the page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from browser import CHROMIUM

from waiting_until import wait_until

WHY_NOT = (
    "no Chromium here: install chromium, or set EVERWARM_CHROMIUM"
    if CHROMIUM is None
    else "Playwright or axe is not installed: pip install playwright axe-playwright-python"
    if find_spec("playwright") is None or find_spec("axe_playwright_python") is None
    else ""
)
"""Why the page can't be tested here; empty if it can."""

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


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


def look(page: Any, expression: str) -> Any:
    """What an expression gives in the page. Playwright's own `evaluate` would need eval, which the page forbids."""
    if not hasattr(page, "session"):
        page.session = page.context.new_cdp_session(page)
    asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
    said = page.session.send("Runtime.evaluate", asked)
    assert "exceptionDetails" not in said, said["exceptionDetails"]
    return said["result"].get("value")


def look_until(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page."""
    wait_until(lambda: bool(look(page, expression)), pause_s=0.05)


def _axe() -> str:
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def findings(page: Any) -> list[str]:
    """What axe-core finds serious or worse, in words. It is run in the page's own world, past the page's policy."""
    look(page, f"{_axe()}; undefined")
    found = json.loads(look(page, "axe.run().then((found) => JSON.stringify(found.violations))"))
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:150]} {one['nodes'][0].get('failureSummary', '')[:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
