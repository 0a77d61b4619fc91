"""For those who run the server: is it well, what is it doing."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from everwarm.server.metrics import Metrics
from everwarm.server.page.routes import file_response
from everwarm.server.page.static import wants_page
from everwarm.server.serving import Serving


def router(serving: Serving, metrics: Metrics, *, page: bool = True) -> APIRouter:
    """The routes. Keys are asked for by `limits.Guard`: of all paths but /health and the page's."""
    api = APIRouter(tags=["operations"])

    @api.get("/", response_model=dict[str, str])
    async def root(request: Request) -> Response | dict[str, str]:
        """The page for browsers; for programs that look whether somebody is there, who it is."""
        if page and wants_page(request.headers.get("accept", "")):
            return file_response("/", request)
        return {"server": "everwarm", "model": serving.name, "api": "/v1", "docs": "/docs"}

    @api.get("/health", response_model=dict[str, Any])
    async def health() -> JSONResponse:
        """200 when requests are taken; 503 while the model is being loaded, or the server is about to end."""
        if serving.draining:
            stopping = {"status": "stopping", "model": serving.name, "requests": serving.active}
            return JSONResponse(stopping, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ok", "model": serving.name})

    scraping = asyncio.Lock()

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def scrape(request: Request) -> Response:
        """Metrics in Prometheus' text format: of everything for an operator, of its own requests for a tenant."""
        caller = serving.keys.caller(request.headers)
        async with scraping:  # one at a time, beside the event loop: it takes milliseconds, and locks
            text = await asyncio.to_thread(metrics.text, caller)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return api
