"""A real Chromium that opens a page of a stranger, and the stranger's web server that hears what the page got."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("EVERWARM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
WITHIN_S = 120.0

SCRIPT = """<!doctype html><title>a stranger's page</title><body><script>
const target = %s, report = %s;
const tell = (said) => fetch(report, {method: "POST", mode: "no-cors", body: JSON.stringify(said)});
const attempt = async (act) => {
  try { return await act(); } catch (error) { return "refused: " + error; }
};
const read = (path, options) => attempt(async () => (await fetch(target + path, options)).text());
const send = (path, options) => attempt(async () => (await fetch(target + path, options)).type);
(async () => { %s })();
</script>"""


class Stranger:
    """A web server on loopback. `report` is where pages send what they got, from any origin."""

    def __init__(self, port: int = 0) -> None:
        self.pages: dict[str, str] = {}
        self.heard: Queue[Any] = Queue()
        stranger = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # one request per connection: nothing is left open when it ends

            def do_GET(self) -> None:
                page = stranger.pages.get(self.path)
                body = (page or "not here").encode()
                self.send_response(200 if page else 404)
                self.send_header("Content-Type", "text/html" if page else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                stranger.heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nobody wants to know."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.port = int(self._server.server_address[1])

    @property
    def report(self) -> str:
        return f"http://127.0.0.1:{self.port}/report"

    def close(self) -> None:
        """May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self, path: str, target: str, script: str, report: str | None = None) -> None:
        """Put up a page whose script may `read` and `send` to the target, and must `tell` what it got."""
        self.pages[path] = SCRIPT % (json.dumps(target), json.dumps(report or self.report), script)


@contextmanager
def stranger(port: int = 0) -> Iterator[Stranger]:
    server = Stranger(port)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def chromium(url: str, *, names: dict[str, str] | None = None) -> Iterator[None]:
    """Open a page, headless; it is closed with the context. `names` are addresses by host name."""
    assert CHROMIUM is not None
    rules = ", ".join(f"MAP {name} {address}" for name, address in (names or {}).items())
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-popup-blocking",
            f"--user-data-dir={profile}", f"--host-resolver-rules={rules}", "--remote-debugging-port=0", url,
        ]  # fmt: skip
        browser = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(Path(profile))},
        )  # fmt: skip
        try:
            yield
        finally:
            browser.terminate()
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()


def visit(url: str, heard: Callable[[], Any], **options: Any) -> Any:
    """What a page tells after it was opened."""
    with chromium(url, **options):
        return heard()
