"""Answers on the wire: as server-sent events while they come, or collected into one response."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from everwarm.llm import Event
from everwarm.server.answers import Answers, Batch
from everwarm.server.errors import ApiError, as_api_error
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.serving import receipt_headers

STALLED_S = 60.0
"""How long a client may take to read what has been sent; then it counts as gone."""

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
    answers.begin()
    try:
        if not stream:
            await unless_it_leaves(request, _collect(answers, wire))
            answers.close()
            return JSONResponse(wire.whole(answers), headers=receipt_headers(answers.looked_up))
        first = await unless_it_leaves(request, answers.next(keep_alive_s))
    except BaseException as error:
        answers.failed(as_api_error(error).status if isinstance(error, Exception) else 499)
        answers.close()
        raise
    headers = receipt_headers(answers.looked_up) | {"Cache-Control": "no-cache"}
    return _EventStream(answers, first, wire, headers, keep_alive_s)


class _EventStream(StreamingResponse):
    """Ends the work before it ends itself. That can't be left to the iterator: when the client has gone, it is not
    asked again.
    """

    def __init__(
        self, answers: Answers, first: Batch | None, wire: Wire, headers: dict[str, str], keep_alive_s: float
    ) -> None:
        super().__init__(self._parts(first), media_type="text/event-stream", headers=headers)
        self._answers, self._wire, self._keep_alive_s = answers, wire, keep_alive_s
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stalled = False

        async def send_soon(message: Message) -> None:
            nonlocal stalled
            try:
                async with asyncio.timeout(STALLED_S):
                    await send(message)
            except TimeoutError:
                stalled = True
                raise OSError("the client does not read its answer") from None

        try:
            await super().__call__(scope, receive, send_soon)
        except Exception:
            if not stalled:
                raise
        finally:
            if not self._over:
                self._answers.failed(499)
            self._answers.close()

    async def _parts(self, batch: Batch | None) -> AsyncIterator[str]:
        answers, wire, begun = self._answers, self._wire, False
        try:
            while batch is not None:
                text = ""
                if batch and not begun:
                    begun, text = True, wire.begin(answers)
                text += "".join(wire.token(choice, event) for choice, event in batch if isinstance(event, Event))
                if text or not batch:
                    yield text or wire.waiting()
                batch = await answers.next(self._keep_alive_s)
            self._over = True
            yield wire.end(answers)
        except Exception as error:
            self._over = True
            answers.failed(as_api_error(error).status)
            yield wire.error(as_api_error(error))


async def _collect(answers: Answers, wire: Wire) -> None:
    while (batch := await answers.next()) is not None:
        for choice, event in batch:
            if isinstance(event, Event):
                wire.token(choice, event)
