"""Agents as files, on their way in and out: how slow a sender may be, how many files there are at once, and how many
bytes of unfinished uploads lie on disk.

A file lies in the system's temporary directory while it is received, or until it is sent. Readers that don't read are
closed by `http`.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from everwarm.server.errors import ApiError

KIND = "application/octet-stream"
"""What a file is called in `Content-Type`. A page of another origin can't send it unless the server allows that."""

MOST_AT_ONCE = 16
"""Files in each direction."""

STALL_S = 30.0
LEAST_BYTES = 64 << 10
"""An upload that brings fewer bytes in so many seconds has stalled."""

_CHUNK = 1 << 20


class Transfers:
    """What is under way. Used from the event loop."""

    def __init__(self) -> None:
        self._uploads, self._downloads = _AtOnce("uploads"), _AtOnce("exports")
        self._bytes = 0  # of uploads, on disk

    @contextlib.asynccontextmanager
    async def received(self, request: Request, quota: int) -> AsyncIterator[Path]:
        """The body of a request as a file, which is gone afterwards. All uploads together may have `quota` bytes, and
        at most half of what is free on the disk. Raises ApiError.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != KIND:
            raise ApiError(
                415, f"the body is sent as {kind[:100]!r}: send the file with the header Content-Type: {KIND}"
            )
        with self._uploads.one(), tempfile.TemporaryDirectory(prefix="everwarm-") as folder, self._share() as hold:
            budget = min(quota, self._bytes + shutil.disk_usage(folder).free // 2)
            announced = request.headers.get("content-length", "")
            if announced.isdecimal():
                self._check(int(announced[:20]), quota, budget)
            size = 0

            def count(came: int) -> None:
                nonlocal size
                size += came
                self._check(came, budget=budget, quota=quota, before=size - came)
                hold(came)

            path = Path(folder) / "upload"
            await _receive(request, path, count)
            yield path

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """One export, from before it is written until it is sent. Raises ApiError."""
        return self._downloads.one()

    @contextlib.contextmanager
    def _share(self) -> Iterator[Callable[[int], None]]:
        """Count what one upload has on disk."""
        mine = 0

        def hold(count: int) -> None:
            nonlocal mine
            mine += count
            self._bytes += count

        try:
            yield hold
        finally:
            self._bytes -= mine

    def _check(self, more: int, quota: int, budget: int, before: int = 0) -> None:
        if before + more > quota:
            raise ApiError(413, f"more than the quota of {quota:,} bytes: nothing was imported")
        if self._bytes + more > budget:
            raise ApiError(
                503, f"the uploads of all clients together would have more than {budget:,} bytes, which is the limit: "
                "try again when they are done", "overloaded_error", retry_after=10,
            )  # fmt: skip


class FileResponse(StreamingResponse):
    """Sends a file that has no name any more, and closes it in any case: a client may leave before the first byte."""

    def __init__(self, file: BinaryIO, headers: dict[str, str], held: contextlib.ExitStack) -> None:
        size = os.fstat(file.fileno()).st_size
        super().__init__(self._chunks(), media_type=KIND, headers=headers | {"Content-Length": str(size)})
        self._file = file
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, self._file:
            await super().__call__(scope, receive, send)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while chunk := await asyncio.to_thread(self._file.read, _CHUNK):
            yield chunk


class _AtOnce:
    """Counts transfers in one direction."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        if self._count >= MOST_AT_ONCE:
            raise ApiError(
                503, f"{MOST_AT_ONCE} {self._what} are under way, which is the limit: try again when one is done",
                "overloaded_error", retry_after=10,
            )  # fmt: skip
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


async def _receive(request: Request, path: Path, count: Callable[[int], None]) -> None:
    chunks = aiter(request.stream())
    try:
        with path.open("wb") as file:
            while await _receive_some(chunks, file, count):
                pass
    except TimeoutError:
        raise ApiError(
            408, f"the upload has stalled: fewer than {LEAST_BYTES:,} bytes came in {STALL_S:g} s", "timeout_error"
        ) from None
    except ClientDisconnect:
        raise ApiError(499, "the client has gone") from None
    except OSError as error:
        reason = error.strerror or "the disk can't be written"
        raise ApiError(503, f"the upload can't be kept: {reason}", "server_error", retry_after=10) from None


async def _receive_some(chunks: AsyncIterator[bytes], file: BinaryIO, count: Callable[[int], None]) -> bool:
    """Until enough has come not to count as stalled. False: that was all."""
    came = 0
    async with asyncio.timeout(STALL_S):
        while came < LEAST_BYTES:
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                return False
            came += len(chunk)
            count(len(chunk))
            await asyncio.to_thread(file.write, chunk)
    return True
