"""The application: all routes of one model, and what is true for every request."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from everwarm.llm import LLM
from everwarm.server import agents, errors, log, ops, schema, tokens
from everwarm.server.anthropic import routes as anthropic
from everwarm.server.head import HeadAsGet
from everwarm.server.keys import Keys
from everwarm.server.limits import Guard
from everwarm.server.llamacpp import routes as llamacpp
from everwarm.server.metrics import Metrics
from everwarm.server.openai import routes as openai
from everwarm.server.openai.responses import routes as responses
from everwarm.server.origin import Origins, parse_origins
from everwarm.server.origin_guard import origin_middleware
from everwarm.server.page import routes as page_routes
from everwarm.server.page.live import Live
from everwarm.server.page.routes import PageOptions
from everwarm.server.serving import Limits, Serving


def create_app(
    llm: LLM,
    name: str,
    limits: Limits | None = None,
    keys: Keys | None = None,
    origins: Origins | None = None,
    names: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    page: PageOptions | None = None,
) -> FastAPI:
    """The application that serves one model under `name`, and lists it under `names`. `origins` says which web pages
    may ask; by default none but its own. `sampling` is for requests that don't say how to sample. `page`: how the
    page is served.
    """
    keys = keys or Keys({})
    origins = origins or parse_origins((), (), has_keys=not keys.is_open)
    serving = Serving(llm, name, limits, keys, names or (name,), sampling)
    metrics, live, page = Metrics(serving), Live(serving), page or PageOptions()

    def observe(line: log.Line) -> None:
        metrics.requests.observe(line)
        live.observe(line)

    app = FastAPI(
        title="everwarm",
        description="A local LLM that never computes the same thing twice.",
        openapi_url=None,  # `schema` serves it
        middleware=[  # from the outside in
            Middleware(log.RequestLog, serving=serving, observe=observe),
            *origin_middleware(origins),
            Middleware(Guard, serving=serving),
            Middleware(HeadAsGet),
        ],
    )
    app.state.serving, app.state.live = serving, live
    errors.install(app)
    app.include_router(ops.router(serving, metrics, page=page.mode != "off"))
    app.include_router(page_routes.router(serving, live, page))
    for routes in (openai, responses, anthropic, llamacpp, agents, tokens):
        app.include_router(routes.router(serving))
    schema.install(app)
    return app
