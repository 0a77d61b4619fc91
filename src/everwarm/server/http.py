"""The HTTP server: uvicorn, with connections that are counted, timed and closed when they only sit there.

Connections are accepted a few at a time, so that there are never many more open descriptors than places
(`connections`). asyncio's own listener accepts everything that waits, and only then tells anyone.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from everwarm.server.connections import ConnectionLimits, Place, Places, Silence

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_log = logging.getLogger(__name__)

_SAID = b'{"error": {"message": "too many connections are open: try again soon", "type": "overloaded_error"}}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n%b" % (len(_SAID), _SAID)
)
"""What a client is told for whom there is no place."""

BACKLOG = 2048
"""Connections that the system holds until they are accepted; beyond that, it has clients try again after a second."""

AT_ONCE = 32
"""Connections that are accepted before the event loop does something else."""

LOG_EVERY_S = 1.0
"""How often it is logged that connections can't be accepted."""


class Connection(H11Protocol):
    """One client's connection. It tells its place when it waits for the client, and for what."""

    def __init__(self, place: Place, **settings: Any) -> None:
        super().__init__(**settings)
        self._place = place
        self._since = time.monotonic()  # what it does now, it has done since then
        self._doing: object = None
        place.close = self._pushed_out

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        if not self._place.taken:
            self._pushed_out()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look(heard=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def check(self, now: float) -> None:
        """Close it if it has been silent for too long."""
        self._look()
        limits, silent_s = self._place.limits, now - self._since
        if self.transport.is_closing():
            if silent_s > limits.closing_s:  # what was sent is not being read
                self.transport.abort()
        elif self._doing is Silence.NOT_READING:
            if silent_s > limits.stalled_s:
                self.transport.abort()
        elif self._doing is Silence.NO_REQUEST and silent_s > limits.head_s:
            self.transport.close()

    def _look(self, heard: bool = False) -> None:
        """See what is being done, and since when."""
        busy = self.cycle is not None and not self.cycle.response_complete
        doing: object = None
        if self.transport.is_closing():
            doing = "closing"
        elif self.flow.write_paused:
            doing = Silence.NOT_READING
        elif busy and self.cycle.more_body and not self.flow.read_paused:
            doing = Silence.NO_BODY
        elif not busy:
            # uvicorn's timer runs from the end of a response to the next byte.
            doing = Silence.NO_REQUEST if self.timeout_keep_alive_task is None else Silence.NO_NEXT_REQUEST
        if doing is not self._doing or (heard and doing is Silence.NO_BODY):
            self._doing, self._since = doing, time.monotonic()
            self._place.silent(doing if isinstance(doing, Silence) else None)

    def _pushed_out(self) -> None:
        """Somebody else needs the place."""
        if self._doing is None:  # its socket is not ours yet: we are asked again when it is
            return
        if self._doing in (Silence.NO_REQUEST, Silence.NO_NEXT_REQUEST):
            self.transport.close()
        else:
            self.transport.abort()


class Listener:
    """Accepts connections, as many as there are places. What uvicorn expects of an asyncio server."""

    def __init__(self, server: "HttpServer", listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._server, self._listener = server, listener
        self._task = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        self._task.cancel()

    async def wait_closed(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _accept(self) -> None:
        loop, logged = asyncio.get_running_loop(), 0.0
        while True:
            try:
                first = await loop.sock_accept(self._listener)
            except OSError as error:  # it has gone already; or descriptors or memory are short
                if time.monotonic() > logged + LOG_EVERY_S:
                    logged = time.monotonic()
                    _log.warning("a connection was not accepted: %s", error.strerror or error)
                await asyncio.sleep(0.05)
                continue
            await asyncio.gather(*(self._admit(*one) for one in (first, *self._waiting())))

    def _waiting(self) -> Iterator[tuple[socket.socket, Any]]:
        """Some more that wait already: the event loop may be slow to come back."""
        with contextlib.suppress(OSError):  # no more
            for _ in range(AT_ONCE):
                yield self._listener.accept()

    async def _admit(self, client: socket.socket, peer: Any) -> None:
        place = self._server.places.take(peer[0] if isinstance(peer, tuple) else "")
        if place is None:
            _refuse(client)
            return
        place.silent(Silence.NO_REQUEST)  # from now on: others may be accepted before its first byte is read
        try:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(partial(self._server.connection, place), client)
        except Exception as error:
            _log.warning("a connection was not accepted: %s", error)
            place.leave()
            client.close()


class HttpServer(uvicorn.Server):
    """uvicorn with `Connection` and `Listener`. Signals are left to whoever runs it."""

    def __init__(self, app: "ASGIApp", limits: ConnectionLimits | None = None) -> None:
        self.places = Places(limits or ConnectionLimits())
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=self.places.limits.idle_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=1,
            )
        )

    def connection(self, place: Place) -> Connection:
        return Connection(
            place, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets that are bound already."""
        await self.lifespan.startup()
        self.servers = [Listener(self, each) for each in sockets or []]  # type: ignore[misc]
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
            await listener.wait_closed()  # before its socket is closed under it
        await super().shutdown(sockets)
        self._sweeping.cancel()

    async def _sweep(self) -> None:
        """Look at all connections, again and again."""
        every_s = self.places.limits.sweep_s
        while True:
            slept = time.monotonic()
            await asyncio.sleep(every_s)
            # A loop that was held up hears its clients late: that time is not theirs.
            now = min(time.monotonic(), slept + every_s)
            for number, connection in enumerate(list(self.server_state.connections)):
                if isinstance(connection, Connection):
                    connection.check(now)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)  # thousands that are closed at once would hold up everyone

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _refuse(client: socket.socket) -> None:
    """Say so without waiting; whoever does not read it sees a closed connection."""
    with client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.send(FULL)
