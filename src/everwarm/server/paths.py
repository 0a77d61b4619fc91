"""Clients that were told an address without `/v1`: their paths are served all the same."""

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
WITHOUT = ("/chat/completions", "/completions", "/responses", "/messages", "/models", "/embeddings")
"""Paths below `/v1` that clients also ask for without it."""


class PathsWithoutVersion:
    """ASGI middleware: puts `/v1` before such a path. It is the outermost, so everyone else sees one path only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(WITHOUT):
            path: str = scope["path"]
            if any(path == known or path.startswith(known + "/") for known in WITHOUT):
                scope = {**scope, "path": VERSION + path}
                if raw := scope.get("raw_path"):
                    scope["raw_path"] = VERSION.encode() + raw
        await self._app(scope, receive, send)
