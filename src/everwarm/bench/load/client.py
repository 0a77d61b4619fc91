"""A client of OpenAI's API that measures: one connection per turn, every piece of the stream with its time.

Nothing but the standard library, and nothing is understood before the stream has ended: the client computes on the same
cores as the server.
"""

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everwarm.errors import RequestError

_MOST_LINE = 1 << 24


@dataclass(slots=True)
class Heard:
    """One turn as the client saw it. Times are of `time.perf_counter`."""

    sent: float
    deltas: list[float] = field(default_factory=list)  # when each delta came that held text
    end: float = 0.0
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    agent: int = 0
    turn: int = 0

    @property
    def ttft_s(self) -> float:
        return self.deltas[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.deltas, self.deltas[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return int(self.usage.get("completion_tokens") or len(self.deltas))

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class Client:
    """A server to ask."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"--url {url}: expected something like http://127.0.0.1:8080")
        self.url = parts.geturl()
        self._host, self._path = parts.hostname, parts.path
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def chat(self, messages: Sequence[Mapping[str, str]], agent: str, options: Mapping[str, Any]) -> Heard:
        """One turn."""
        return await self.stream("/v1/chat/completions", {"messages": messages, **options}, agent)

    async def stream(self, path: str, body: Mapping[str, Any], agent: str) -> Heard:
        """One streamed answer. What the server or the connection does wrong is in `error`."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        heard = Heard(time.perf_counter())
        pieces: list[tuple[float, bytes]] = []
        try:
            status = await self._send("POST", path, body, {"X-Agent-Id": agent}, pieces)
            heard.end = time.perf_counter()
            if status != 200:
                heard.error = f"{status}: {_message(b''.join(piece for _, piece in pieces))}"
            else:
                _understand(pieces, heard)
        except (OSError, EOFError, ValueError, LookupError) as error:
            heard.error = f"{type(error).__name__}: {error}"
        heard.end = heard.end or time.perf_counter()
        return heard

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Any other request; its answer as JSON. Raises RequestError."""
        pieces: list[tuple[float, bytes]] = []
        try:
            status = await self._send(method, path, body, {}, pieces)
        except (OSError, EOFError, ValueError) as error:
            raise RequestError(f"{self.url}: can't be reached: {error}") from None
        said = b"".join(piece for _, piece in pieces)
        if status >= 400:
            raise RequestError(f"{self.url}{path}: {status}: {_message(said)}")
        try:
            return json.loads(said)
        except ValueError:
            return said.decode("utf-8", "replace")

    async def _send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], pieces: list[tuple[float, bytes]]
    ) -> int:
        """The status; what comes behind the headers is appended to `pieces`, with its time."""
        data = b"" if body is None else json.dumps(body).encode()
        all_headers = {
            "Host": f"{self._host}:{self._port}",
            "Content-Type": "application/json",
            "Content-Length": len(data),
            "Connection": "close",
            **self._headers,
            **headers,
        }
        head = f"{method} {self._path}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in all_headers.items())
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_MOST_LINE)
        try:
            writer.write(head.encode() + b"\r\n" + data)
            await writer.drain()
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"\r\ntransfer-encoding: chunked" not in answer:
                while piece := await reader.read(1 << 16):
                    pieces.append((time.perf_counter(), piece))
            else:
                while size := int(await reader.readline(), 16):
                    piece = await reader.readexactly(size + 2)
                    pieces.append((time.perf_counter(), piece[:-2]))
        finally:
            writer.close()
        return int(answer.split(None, 2)[1])


def _understand(pieces: Sequence[tuple[float, bytes]], heard: Heard) -> None:
    """Server-sent events; one belongs to the time when its last byte came."""
    rest = b""
    for when, piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            chunk = json.loads(event[6:])
            if "error" in chunk:
                heard.error = str(chunk["error"].get("message", "the server failed"))
                return
            for choice in chunk.get("choices", ()):
                if said := choice.get("text") or choice.get("delta", {}).get("content"):
                    heard.deltas.append(when)
                    heard.text += said
                heard.finish = choice.get("finish_reason") or heard.finish
            heard.usage = chunk.get("usage") or heard.usage
            heard.receipt = chunk.get("everwarm") or heard.receipt
    if not heard.deltas:
        heard.error = "the answer held no text"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
