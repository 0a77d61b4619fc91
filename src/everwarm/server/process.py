"""The server as a process: it listens at once, loads the model behind that, and ends when it is told to.

SIGTERM, SIGINT   take nothing new, finish what runs within the grace, save, end with 0
a second one      end now; what was acknowledged is on disk
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from everwarm.server.connections import ConnectionLimits
from everwarm.server.http import HttpServer
from everwarm.server.page import static

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_log = logging.getLogger(__name__)

SAVING_S = 2.0
"""Of the grace, what is left for saving (a quarter of it if that is less)."""


class Served(Protocol):
    """A model that takes requests."""

    @property
    def app(self) -> "ASGIApp": ...

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, and wait for what runs."""

    def close(self) -> None:
        """Save everything."""


@dataclass(slots=True)
class Progress:
    """What is being done before requests are taken; written by the thread that does it."""

    doing: str = "starting"
    done: float | None = None  # share, where it is known

    def say(self, doing: str, done: int = 0, total: int | None = None) -> None:
        self.doing, self.done = doing, min(1.0, done / total) if total else None


class Front:
    """The application until there is one: /health says how far it is, all else is asked to come again."""

    def __init__(self, progress: Progress, *, page: bool = True) -> None:
        self.app: ASGIApp | None = None
        self._page = page
        self.progress = progress

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            if self._page and (found := page_file(scope)) is not None:
                raw = [(name.encode(), value.encode()) for name, value in found.headers.items()]
                raw.append((b"content-length", str(len(found.body)).encode()))
                await send({"type": "http.response.start", "status": found.status, "headers": raw})
                await send({"type": "http.response.body", "body": found.body})
                return
            said: dict[str, Any] = {"status": "loading", "doing": self.progress.doing, "done": self.progress.done}
            if scope["path"] != "/health":
                message = f"the model is being loaded ({self.progress.doing}): try again soon"
                error = {"message": message, "type": "overloaded_error", "param": None, "code": None}
                said = {"type": "error", "error": error}  # OpenAI's shape and Anthropic's at once
            body = json.dumps(said).encode()
            headers = {"content-type": "application/json", "content-length": len(body), "retry-after": 1}
            raw = [(name.encode(), str(value).encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 503, "headers": [*raw, (b"connection", b"close")]})
            await send({"type": "http.response.body", "body": body})


def page_file(scope: "Scope") -> static.Answer | None:
    """What the page needs before there is a model: its own files, and nothing else."""
    path, headers = scope["path"], {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if scope["method"] != "GET" or not static.is_page(path, headers.get("accept", "")):
        return None
    return static.answer(path, headers)


def run(
    listener: socket.socket,
    load: Callable[[Progress], Served],
    grace_s: float,
    on_ready: Callable[[float], None],
    connections: ConnectionLimits,
    *,
    page: bool = True,
) -> None:
    """Serve until told to end. Raises what `load` raises; `on_ready` is told how many seconds that took. `page`: there
    is one, also while the model is being loaded.
    """
    with asyncio.Runner(loop_factory=_event_loop()) as runner:
        loading = runner.run(_run(listener, load, grace_s, on_ready, connections, page))
    if loading.is_alive():  # told to end before it was ready: nothing has been asked, nothing is to be saved
        sys.stderr.flush()
        os._exit(0)


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one: it takes half as long to hand over a token."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run(
    listener: socket.socket,
    load: Callable[[Progress], Served],
    grace_s: float,
    on_ready: Callable[[float], None],
    connections: ConnectionLimits,
    page: bool,
) -> threading.Thread:
    loop, progress = asyncio.get_running_loop(), Progress()
    front, told, loaded = Front(progress, page=page), asyncio.Event(), loop.create_future()

    def stop(number: int) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    def bring_up() -> None:
        try:
            served, error = load(progress), None
        except BaseException as failure:
            served, error = None, failure
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, loaded, served, error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    started = time.perf_counter()
    server = HttpServer(front, connections)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = threading.Thread(target=bring_up, name="everwarm-load", daemon=True)
    loading.start()
    ending = asyncio.create_task(told.wait())
    try:
        await asyncio.wait({loaded, ending, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            served: Served = loaded.result()
            front.app = served.app
            on_ready(time.perf_counter() - started)
            await asyncio.wait({ending, serving}, return_when=asyncio.FIRST_COMPLETED)
            _log.info("ending: nothing new is taken, what runs has %g s", grace_s)
            await served.drain(max(0.0, grace_s - min(SAVING_S, grace_s / 4)))
            server.should_exit = True
            await serving
            await asyncio.to_thread(served.close)
    finally:
        server.should_exit = True
        await serving
        ending.cancel()
    return loading


def _settle(loaded: "asyncio.Future[Served]", served: Served | None, error: BaseException | None) -> None:
    if loaded.cancelled():
        return
    if served is not None:
        loaded.set_result(served)
    else:
        assert error is not None
        loaded.set_exception(error)
