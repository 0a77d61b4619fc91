"""What is true before a route sees a request: a key where one is needed, a place in the queue, a body of bounded size,
JSON that is JSON.

A body is read here, up to the limit, whether or not its length was announced; a JSON one goes through a strict parser
first, which knows no NaN, no halves of characters, no bytes that are not UTF-8, and a depth of at most 200. What the
routes get is what the client sent.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator

from fastapi import Request
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everwarm.server.errors import ApiError, response
from everwarm.server.keys import CALLER, Caller
from everwarm.server.page.static import is_page
from everwarm.server.refusal import refuse
from everwarm.server.serving import Serving
from everwarm.server.texts import BODY_BYTES, LONG_BYTES

OPEN = frozenset({"/health"})
"""Paths that answer to everyone: without a key, under any name, for any page."""

STREAMED = re.compile(r"/v1/agents/import/?")
"""Paths that read their own, larger bodies as they come."""

READING = frozenset({"/v1/page/blocks"})
"""Paths that only look, whatever their method."""

OPERATED = frozenset({"/metrics"})
"""Paths that an operator's key opens."""

QUEUED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion"})
"""Paths that generate: so many at once as the queue holds."""

MOST_HELD = 256 << 20
"""Bytes of bodies that are being read or answered, of all requests together."""

MOST_VALUES = 500_000
VALUES, VALUES_PER_TOKEN = 50_000, 8
"""Commas and brackets in a body: each may become an object, many times its size on the wire, and takes time on the
event loop. No more than MOST_VALUES; fewer if the context is short: a message has three, a token id one.
"""

BODY_S = 60.0
"""How long a client may take to send its body."""


class Guard:
    """ASGI middleware: refuses what no route should see."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._held = 0  # bytes
        self._long = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, body = scope["path"], None
        held = contextlib.ExitStack()  # its place in the queue, its share of the bodies
        try:
            hold = held.enter_context(self._holding())
            if path not in OPEN and not is_page(path, Headers(scope=scope).get("accept", "")):
                scope[CALLER] = self._caller(scope)
            if path in QUEUED:
                self._serving.check_queue()  # before the body is read
            if not STREAMED.fullmatch(path):
                body = await self._read(Request(scope), receive, hold)
                scope[BODY_BYTES] = len(body)
                if body:
                    _check_kind(scope)
                    await self._check(body)
                receive = _again(body, receive)
            if path in QUEUED:
                held.enter_context(self._serving.admitted())
        except ApiError as error:
            held.close()
            if body is None:
                await refuse(error, scope, receive, send)
            else:
                await response(error, scope)(scope, receive, send)
            return
        with held:
            await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        keys, headers = self._serving.keys, Headers(scope=scope)
        if scope["path"] in OPERATED:
            return keys.caller(headers)
        return keys.tenant(headers, reading=scope["method"] in ("GET", "HEAD") or scope["path"] in READING)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """Count what one request keeps in memory of its body."""
        mine, most = 0, max(MOST_HELD, self._serving.limits.most_body_bytes)

        def hold(count: int) -> None:
            nonlocal mine
            mine += count
            self._held += count
            if count and self._held > most:
                raise ApiError(
                    503, f"the bodies of all requests together have more than {most:,} bytes, which is the limit",
                    "overloaded_error", retry_after=1,
                )  # fmt: skip

        try:
            yield hold
        finally:
            self._held -= mine

    async def _check(self, body: bytes) -> None:
        """Long ones one after the other, so that others have their turn between two of them."""
        if len(body) < LONG_BYTES:
            _check_json(body, MOST_VALUES)
            return
        async with self._long:
            _check_json(body, min(MOST_VALUES, VALUES + VALUES_PER_TOKEN * self._serving.context))
            await asyncio.sleep(0)

    async def _read(self, request: Request, receive: Receive, hold: Callable[[int], None]) -> bytes:
        most = self._serving.limits.most_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > most:
            raise ApiError(413, f"the body has {announced[:20]} bytes, the limit is {most:,}")
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client has gone")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    hold(len(parts[-1]))
                    if size > most:
                        raise ApiError(413, f"the body has more than {most:,} bytes, which is the limit")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:g} s", "timeout_error") from None


def _check_kind(scope: Scope) -> None:
    """JSON must be called JSON: other kinds a page of any origin may send from a browser without being asked."""
    kind = Request(scope).headers.get("content-type", "").partition(";")[0].strip().lower()  # the first, as routes do
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"the body is sent as {kind[:100]}: send JSON with the header Content-Type: application/json"
        )


def _check_json(body: bytes, most: int) -> None:
    values = body.count(b",") + body.count(b"[") + body.count(b"{")
    if values > most:
        raise ApiError(413, f"the body has {values:,} commas and brackets, the limit is {most:,}")
    try:
        from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _again(body: bytes, client: Receive) -> Receive:
    """The body, once more; then whatever the client does next."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await client()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
