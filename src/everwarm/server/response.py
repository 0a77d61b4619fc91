"""The HTTP response to a request: server-sent events while the answer is generated, or one body at the end."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from everwarm.events import End, Event
from everwarm.kv.receipt import Receipt
from everwarm.server.active_request import ActiveRequest
from everwarm.server.errors import as_api_error
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.redact import without_paths
from everwarm.server.request import header_text
from everwarm.server.timings import PromptProgress
from everwarm.server.wire import Json, ServerEvents, Wire

STALLED_S = 60.0
"""How long a client may take to read what has been sent; then it counts as gone."""

PROGRESS_S = 0.1
"""How often it is looked how far a prompt is, for clients that want to know."""

KEEP_ALIVE = ": keep-alive\n\n"

_encode = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make an encoder for each event


async def respond(request: Request, active: ActiveRequest, wire: Wire, stream: bool) -> Response:
    """The response to a request: errors that come before the first token have a status of their own."""
    active.begin()
    try:
        if not stream:
            await unless_it_leaves(request, _collect(active, wire))
            active.close()
            return JSONResponse(wire.whole(active.usage, _receipt_json(active)), headers=_headers(active))
        progress = PromptProgress(active)
        first = await unless_it_leaves(request, _first(active, progress if wire.wants_progress else None))
    except BaseException as error:
        active.failed(as_api_error(error).status if isinstance(error, Exception) else 499)
        active.close()
        raise
    return _EventStream(active, first, wire, progress, _headers(active) | {"Cache-Control": "no-cache"})


async def _first(active: ActiveRequest, progress: PromptProgress | None) -> list[Event | End] | None:
    """The first events; none if they take long, or if there is progress to tell of."""
    if progress is None:
        return await active.next(active.keep_alive_s)
    until = time.perf_counter() + active.keep_alive_s
    while (events := await active.next(PROGRESS_S)) == []:
        if progress.is_known or time.perf_counter() > until:
            break
    return events


async def _collect(active: ActiveRequest, wire: Wire) -> None:
    while (events := await active.next()) is not None:
        for event in events:
            wire.add(event)


class _EventStream(StreamingResponse):
    """Cancels the work when it ends. That can't be left to the iterator: when the client has gone, nobody asks it
    again.
    """

    def __init__(
        self,
        active: ActiveRequest,
        first: list[Event | End] | None,
        wire: Wire,
        progress: PromptProgress,
        headers: dict[str, str],
    ) -> None:
        super().__init__(self._parts(first), media_type="text/event-stream", headers=headers)
        self._active, self._wire, self._progress = active, wire, progress
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
                self._active.failed(499)
            self._active.close()

    async def _parts(self, events: list[Event | End] | None) -> AsyncIterator[str]:
        active, wire, progress, begun = self._active, self._wire, self._progress, False
        alive = time.perf_counter()
        try:
            while events is not None:
                watched = wire.wants_progress and not progress.complete
                written: ServerEvents = []
                if not begun and (events or (watched and progress.is_known)):
                    begun, written = True, wire.begin(active.usage)
                if watched:
                    written += [event for report in progress.news(bool(events)) for event in wire.progress(report)]
                for event in events:
                    written += wire.add(event)
                if written:
                    alive = time.perf_counter()
                    yield _sse(written)
                elif not events and (not watched or time.perf_counter() > alive + active.keep_alive_s):
                    alive = time.perf_counter()
                    yield KEEP_ALIVE if (waiting := wire.waiting()) is None else _sse([waiting])
                events = await active.next(PROGRESS_S if watched else active.keep_alive_s)
            self._over = True
            yield _sse(wire.end(active.usage, _receipt_json(active)))
        except Exception as error:
            self._over = True
            told = as_api_error(error)
            active.failed(told.status)
            yield _sse(wire.error(told))


def _sse(events: ServerEvents) -> str:
    lines = []
    for event in events:
        name = f"event: {event.name}\n" if event.name else ""
        data = event.data if isinstance(event.data, str) else _encode(event.data)
        lines.append(f"{name}data: {data}\n\n")
    return "".join(lines)


def _headers(active: ActiveRequest) -> dict[str, str]:
    """What is known of the receipt when the answer begins."""
    joined = {"X-Everwarm-Joined": "true"} if active.joined else {}
    if (receipt := active.receipt) is None or active.has_several_prompts:
        return joined
    return joined | {
        "X-Everwarm-Agent": header_text(receipt.agent),
        "X-Everwarm-Tier": receipt.tier,
        "X-Everwarm-Cached-Tokens": str(receipt.cached_tokens),
        "X-Everwarm-Prompt-Tokens": str(receipt.prompt_tokens),
        "X-Everwarm-Reason": header_text(without_paths(receipt.reason)),
    }


def _receipt_json(active: ActiveRequest) -> Json | None:
    """The receipt of the prompt; of several, one of each."""
    told = [_as_json(receipt) | {"joined": active.joined} for receipt in active.receipts]
    if active.has_several_prompts:
        return {"prompts": told}
    return told[0] if told else None


def _as_json(receipt: Receipt) -> Json:
    error = None if receipt.error is None else without_paths(receipt.error)
    return asdict(receipt) | {"reason": without_paths(receipt.reason), "error": error}
