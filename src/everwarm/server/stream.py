"""Answers on the wire: as server-sent events while they come, or collected into one response."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from everwarm.errors import CancelledError
from everwarm.llm import End, Event
from everwarm.server.answers import Answers
from everwarm.server.errors import ApiError, as_api_error
from everwarm.server.serving import receipt_headers

KEEP_ALIVE = ": keep-alive\n\n"


class Wire(Protocol):
    """How one API writes answers. Each method returns whole server-sent events, or nothing."""

    def begin(self) -> str: ...

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
    events = answers.events()
    try:
        if not stream:
            return await _collect(request, answers, events, wire)
        coming = asyncio.ensure_future(anext(events))
        await asyncio.wait({coming}, timeout=keep_alive_s)
        if coming.done():
            coming.result()
    except BaseException as error:
        answers.failed(as_api_error(error).status if isinstance(error, Exception) else 499)
        await events.aclose()
        raise
    headers = receipt_headers(answers.receipt) | {"Cache-Control": "no-cache"}
    body = _parts(answers, events, coming, wire, keep_alive_s)
    return StreamingResponse(body, media_type="text/event-stream", headers=headers)


async def _parts(
    answers: Answers,
    events: AsyncGenerator[tuple[int, Event | End]],
    coming: "asyncio.Future[tuple[int, Event | End]]",
    wire: Wire,
    keep_alive_s: float,
) -> AsyncIterator[str]:
    try:
        yield wire.begin()
        while True:
            done, _ = await asyncio.wait({coming}, timeout=keep_alive_s)
            if not done:
                yield KEEP_ALIVE
                continue
            try:
                choice, event = coming.result()
            except StopAsyncIteration:
                break
            if isinstance(event, Event) and (text := wire.token(choice, event)):
                yield text
            coming = asyncio.ensure_future(anext(events))
        yield wire.end(answers)
    except Exception as error:
        answers.failed(as_api_error(error).status)
        yield wire.error(as_api_error(error))
    finally:
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await coming
        await events.aclose()


async def _collect(
    request: Request, answers: Answers, events: AsyncGenerator[tuple[int, Event | End]], wire: Wire
) -> JSONResponse:
    """All of it. If the client leaves before the end, the work ends, too."""

    async def read() -> None:
        async for choice, event in events:
            if isinstance(event, Event):
                wire.token(choice, event)

    async def gone() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.1)

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(gone())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise CancelledError("the client has gone")
        reading.result()
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
    return JSONResponse(wire.whole(answers), headers=receipt_headers(answers.receipt))
