"""Answers on the wire: as server-sent events while they come, or collected into one response."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from everwarm.llm import Event
from everwarm.server.answers import Answers
from everwarm.server.errors import ApiError, as_api_error
from everwarm.server.serving import receipt_headers

KEEP_ALIVE = ": keep-alive\n\n"


class Wire(Protocol):
    """How one API writes answers. Each method returns whole server-sent events, or nothing."""

    def waiting(self) -> str:
        """Nothing has happened for a while: the line is kept open."""

    def begin(self, answers: Answers) -> str:
        """Before the first token, when the receipt is known."""

    def token(self, choice: int, event: Event) -> str: ...

    def end(self, answers: Answers) -> str:
        """When every choice is over and the first is safe."""

    def error(self, error: ApiError) -> str: ...

    def whole(self, answers: Answers) -> dict[str, Any]:
        """The body of a response that is not streamed; `token` has been told everything."""


def sse(data: object, event: str | None = None) -> str:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{name}data: {text}\n\n"


async def respond(request: Request, answers: Answers, wire: Wire, stream: bool, keep_alive_s: float) -> Response:
    """The response to a request: errors that come before the first token have a status of their own."""
    if not stream:
        return await _collect(request, answers, wire)
    coming = _Coming(answers)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({coming.task, leaving}, timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if coming.task.done():
            coming.task.result()
        elif leaving.done():
            raise ApiError(499, "the client has gone")
    except BaseException as error:
        answers.failed(as_api_error(error).status if isinstance(error, Exception) else 499)
        await coming.close()
        raise
    finally:
        leaving.cancel()
    headers = receipt_headers(answers.looked_up) | {"Cache-Control": "no-cache"}
    return _EventStream(answers, coming, wire, headers, keep_alive_s)


class _Coming:
    """The event that is waited for, while other things may happen."""

    def __init__(self, answers: Answers) -> None:
        self._events = answers.events()
        self.next()

    def next(self) -> None:
        self.task = asyncio.ensure_future(anext(self._events))

    async def close(self) -> None:
        """The work is over, and all it held is free, when this returns."""
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.exception()  # seen, or of no interest any more
        await self._events.aclose()


class _EventStream(StreamingResponse):
    """Ends the work before it ends itself. That can't be left to the iterator: when the client has gone, whatever the
    iterator awaits is cancelled, also in its `finally`.
    """

    def __init__(
        self, answers: Answers, coming: _Coming, wire: Wire, headers: dict[str, str], keep_alive_s: float
    ) -> None:
        super().__init__(self._parts(), media_type="text/event-stream", headers=headers)
        self._answers, self._coming, self._wire, self._keep_alive_s = answers, coming, wire, keep_alive_s
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._over:
                self._answers.failed(499)
            await self._coming.close()

    async def _parts(self) -> AsyncIterator[str]:
        answers, coming, wire = self._answers, self._coming, self._wire
        begun = False
        try:
            while True:
                done, _ = await asyncio.wait({coming.task}, timeout=self._keep_alive_s)
                if not done:
                    yield wire.waiting()
                    continue
                try:
                    choice, event = coming.task.result()
                except StopAsyncIteration:
                    break
                if not begun:
                    begun = True
                    yield wire.begin(answers)
                if isinstance(event, Event) and (text := wire.token(choice, event)):
                    yield text
                coming.next()
            self._over = True
            yield wire.end(answers)
        except Exception as error:
            self._over = True
            answers.failed(as_api_error(error).status)
            yield wire.error(as_api_error(error))


async def _collect(request: Request, answers: Answers, wire: Wire) -> JSONResponse:
    """All of it. If the client leaves before the end, the work ends, too."""

    async def read() -> None:
        async with contextlib.aclosing(answers.events()) as events:
            async for choice, event in events:
                if isinstance(event, Event):
                    wire.token(choice, event)

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ApiError(499, "the client has gone")
        reading.result()
    except BaseException as error:
        answers.failed(as_api_error(error).status if isinstance(error, Exception) else 499)
        raise
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
    return JSONResponse(wire.whole(answers), headers=receipt_headers(answers.looked_up))


async def _left(request: Request) -> None:
    """Until the client goes away. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
