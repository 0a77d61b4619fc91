"""Talking to a running server: what `everwarm chat --url` needs of it, over plain HTTP."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from everwarm.errors import RequestError


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """What came back."""

    text: str
    tokens: int
    ttft_s: float
    total_s: float
    finish_reason: str
    receipt: dict[str, Any]


class Remote:
    """A server's chat API."""

    def __init__(self, url: str, key: str | None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        if urllib.parse.urlsplit(self._base).scheme not in ("http", "https"):
            raise RequestError(f"--url {url}: expected something like http://127.0.0.1:8080")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def model(self) -> str:
        """The name of the model that is served."""
        with self._open("/v1/models") as response:
            return str(json.load(response)["data"][0]["id"])

    def answer(
        self,
        messages: list[Any],
        agent: str | None,
        options: dict[str, Any],
        on_text: Callable[[str], None],
    ) -> RemoteAnswer:
        """One turn; `on_text` is told the text as it comes."""
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
        started, first, text, finish = time.perf_counter(), None, "", ""
        receipt: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        who = {"X-Agent-Id": agent.encode().decode("latin-1")} if agent else {}  # headers are bytes: UTF-8
        with self._open("/v1/chat/completions", body, who) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RequestError(str(chunk["error"].get("message", "the server failed")))
                for choice in chunk["choices"]:
                    said = choice["delta"].get("content") or ""
                    if said and first is None:
                        first = time.perf_counter()
                    text += said
                    on_text(said)
                    finish = choice["finish_reason"] or finish
                receipt, usage = chunk.get("everwarm") or receipt, chunk.get("usage") or usage
        now = time.perf_counter()
        return RemoteAnswer(
            text, int(usage.get("completion_tokens", 0)), (first or now) - started, now - started, finish, receipt
        )

    def conversation(self, agent: str) -> list[Any]:
        """What an agent has heard and said; nothing if it is not known."""
        try:
            with self._open(f"/v1/agents/{urllib.parse.quote(agent, safe='')}") as response:
                return list(json.load(response).get("messages") or [])
        except NotKnownError:
            return []

    def forget(self, agent: str) -> None:
        with suppress(NotKnownError):
            self._open(f"/v1/agents/{urllib.parse.quote(agent, safe='')}", method="DELETE").close()

    def _open(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers | (headers or {}), method=method)  # noqa: S310
        try:
            return urllib.request.urlopen(request, timeout=3600)  # noqa: S310
        except urllib.error.HTTPError as error:
            kind = NotKnownError if error.code == 404 else RequestError
            raise kind(_message(error)) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise RequestError(f"{self._base}: can't be reached: {reason}; is `everwarm serve` running?") from None


class NotKnownError(RequestError):
    """The server has no such thing."""


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered {error.code}"
