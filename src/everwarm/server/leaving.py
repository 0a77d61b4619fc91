"""Clients that leave before their answer: what is done for them ends, too."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from everwarm.server.errors import ApiError

T = TypeVar("T")


async def unless_it_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do it; if the client leaves before the end, it ends, too. The request's body must have been read."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client has gone")
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Until the client goes away. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
