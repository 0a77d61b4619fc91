"""Work on the texts of requests, beside the event loop: rendering, tokenising, spelling.

It is Python, so threads that do it hold up all others. Short texts have two threads, long ones have one thread of their
own: nobody with a short text waits for a long one, and the engine and the event loop share the processor's time with
at most three.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")

LONG_BYTES = 256 << 10
"""A body with so many bytes has a long text."""

BODY_BYTES = "everwarm.body_bytes"
"""Where a request's scope says how long its body is."""


class Texts:
    """The threads."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, "everwarm-text")
        self._long = ThreadPoolExecutor(1, "everwarm-long-text")

    async def work(self, request: Request, act: Callable[[], T]) -> T:
        """What `act` returns. If this is cancelled before `act` has begun, it never begins."""
        threads = self._long if request.scope.get(BODY_BYTES, 0) >= LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, act)

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.shutdown(wait=True, cancel_futures=True)
