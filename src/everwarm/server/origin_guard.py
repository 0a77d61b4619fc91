"""Refuses requests that a stranger's page may have sent (`origin`), and answers browsers that ask on behalf of pages
which are allowed (CORS).
"""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from everwarm.server.errors import ApiError
from everwarm.server.limits import OPEN
from everwarm.server.origin import ANY, Origins, RequestHeaders
from everwarm.server.refusal import refuse

EXPOSED = ["X-Request-Id", "Retry-After"] + [
    f"X-Everwarm-{name}" for name in ("Agent", "Tier", "Cached-Tokens", "Prompt-Tokens", "Reason")
]
"""Headers that a page of another origin may read."""


class OriginGuard:
    """ASGI middleware: refuses what `Origins` refuses, on every path but the open ones."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            why = self._origins.why_not(scope["method"], RequestHeaders(scope["headers"]))
            if why is not None:
                await refuse(ApiError(403, why, "permission_error"), scope, receive, send)
                return
        await self._app(scope, receive, send)


def origin_middleware(origins: Origins) -> list[Middleware]:
    """From the outside in."""
    guard = Middleware(OriginGuard, origins=origins)
    if not origins.cors:
        return [guard]
    allowed = [ANY] if ANY in origins.cors else sorted(origins.cors)
    cors = Middleware(
        CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
    )
    return [guard, cors]
