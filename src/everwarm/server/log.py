"""One line per request: who asked, what was reused, how fast it went. Never what was said.

The line is made by the outermost middleware, so that every request has one, also those that no route has seen; a route
that generates adds what became of its answer (`Outcome`).
"""

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everwarm.server.errors import ERROR
from everwarm.server.keys import CALLER
from everwarm.server.paths import with_version
from everwarm.server.serving import OUTCOME, REQUEST_ID, Outcome, Serving

_log = logging.getLogger("everwarm.request")

QUIET = frozenset({"/health", "/metrics", "/", "/v1/page/blocks", "/v1/page/live", "/v1/page/session"})
"""Asked every few seconds by machines or by the page; logged only when something is wrong, or in debug."""

UNMATCHED = "unmatched"
"""The route of a path that nobody serves."""

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(slots=True)
class Line:
    """A request, from its first byte to its last."""

    id: str
    method: str
    path: str
    route: str = UNMATCHED  # as the schema writes it
    status: int = 0
    tenant: str | None = None  # None: not known, or an operator
    total_s: float = 0.0
    outcome: Outcome | None = None
    weight_hit_rate: float | None = None  # of what all requests used while this one ran
    weight_misses: int = 0
    error: str = ""  # why it was refused

    @property
    def tokens_per_s(self) -> float | None:
        outcome = self.outcome
        if outcome is None or outcome.ttft_s is None:
            return None
        if outcome.completion_tokens < 2 or outcome.total_s <= outcome.ttft_s:
            return None
        return (outcome.completion_tokens - 1) / (outcome.total_s - outcome.ttft_s)

    def fields(self) -> dict[str, Any]:
        """What is written, in its order."""
        said: dict[str, Any] = {"id": self.id, "method": self.method, "route": self.route, "status": self.status}
        if self.route == UNMATCHED:
            said["path"] = self.path[:200]
        if (outcome := self.outcome) is not None:
            said |= {
                "tenant": outcome.tenant,
                "agent": outcome.agent,
                "prompt_tokens": outcome.prompt_tokens,
                "cached_tokens": outcome.cached_tokens,
                "completion_tokens": outcome.completion_tokens,
                "tier": outcome.tier,
                "reason": outcome.reason,
                "ttft_s": _rounded(outcome.ttft_s),
                "tok_s": _rounded(self.tokens_per_s, 1),
                "finish": outcome.finish,
                "weight_hit_rate": _rounded(self.weight_hit_rate),
                "weight_misses": self.weight_misses,
            }
            if outcome.joined:
                said["joined"] = True
        if self.error:
            said["error"] = self.error[:300]
        return said | {"total_s": _rounded(self.total_s)}


class RequestLog:
    """ASGI middleware: gives each request an id, and tells `observe` and the log what became of it."""

    def __init__(self, app: ASGIApp, serving: Serving, observe: Callable[[Line], None]) -> None:
        self._app = app
        self._serving = serving
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = with_version(scope)  # from here on everyone sees one path only
        line = Line(uuid.uuid4().hex, scope["method"], scope["path"])
        scope[REQUEST_ID] = line.id
        started, before = time.perf_counter(), self._serving.llm.weights.totals()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                headers = MutableHeaders(scope=message)
                line.id = headers.get("X-Request-Id", line.id)
                headers["X-Request-Id"] = headers["Request-Id"] = line.id  # OpenAI's and Anthropic's clients read them
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            line.status = 500
            raise
        finally:
            self._finish(line, scope, time.perf_counter() - started, before)

    def _finish(self, line: Line, scope: Scope, total_s: float, before: Any) -> None:
        line.total_s = total_s
        line.tenant = None if (caller := scope.get(CALLER)) is None else caller.tenant
        line.route = getattr(scope.get("route"), "path", line.route)
        line.outcome = scope.get(OUTCOME)
        line.error = scope.get(ERROR, "")
        if line.outcome is not None:
            used = self._serving.llm.weights.totals() - before
            line.weight_hit_rate, line.weight_misses = (used.hit_rate if used.uses else None), used.misses
            if line.status in (0, 200):  # it failed after the first byte, or before it, when the client had gone
                line.status = line.outcome.status
        line.status = line.status or 499
        self._observe(line)
        level = logging.DEBUG if line.path in QUIET and line.status < 400 else logging.INFO
        _log.log(level, "%s", _Text(line), extra={"fields": line.fields()})


class _Text:
    """Made only if someone reads it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __str__(self) -> str:
        return " ".join(f"{name}={_plain(value)}" for name, value in self._line.fields().items())


class JsonFormatter(logging.Formatter):
    """One object per line, of any logger."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        said |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def configure(form: str) -> None:
    """Send the logs of everwarm and uvicorn to stderr as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    for name, level in (("everwarm", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _plain(value: object) -> str:
    """One word; what could be taken for something else is quoted."""
    text = "-" if value is None or value == "" else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
