"""Answering a request whose body was not read."""

import asyncio
import contextlib

from starlette.types import Receive, Scope, Send

from everwarm.server.errors import ApiError, response

LINGER_S = 5.0
MOST_LINGER = 256 << 20
"""How long, and how much, is still read of a body that was refused."""


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once. Most clients read no answer before they have sent all of the body, and lose it if the connection
    is reset meanwhile: what still comes is thrown away, for a while.
    """
    refusal = response(error, scope)
    refusal.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
    await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
    left = MOST_LINGER
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
                left -= len(message["body"])
    await send({"type": "http.response.body", "body": b""})
