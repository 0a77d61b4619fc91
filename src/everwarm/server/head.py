"""HEAD is answered wherever GET is: some clients ask so whether somebody is there."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware: routes answer HEAD as they answer GET; the HTTP server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        routed = {**scope, "method": "GET"}
        try:
            await self._app(routed, receive, send)
        finally:
            scope.update((name, value) for name, value in routed.items() if name not in ("method", *scope))
