"""The application: all routes of one model, and what is true for every request."""

from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from everwarm.llm import LLM
from everwarm.server import agents, anthropic, errors, log, openai, ops, schema, tokens
from everwarm.server.limits import Guard
from everwarm.server.metrics import Metrics
from everwarm.server.serving import Limits, Serving

EXPOSED = ["X-Request-Id", "Retry-After"] + [
    f"X-Everwarm-{name}" for name in ("Agent", "Tier", "Cached-Tokens", "Prompt-Tokens", "Reason")
]


def create_app(
    llm: LLM,
    name: str,
    limits: Limits | None = None,
    keys: Mapping[str, str] | None = None,
    cors: Sequence[str] = (),
) -> FastAPI:
    """The application that serves one model under `name`. `keys` maps API keys to tenants; `cors` are origins whose
    pages may ask from a browser.
    """
    serving = Serving(llm, name, limits, keys, on_done=log.attach)
    metrics = Metrics(serving)
    app = FastAPI(
        title="everwarm",
        description="A local LLM that never computes the same thing twice.",
        openapi_url="/openapi.json",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        middleware=[  # from the outside in
            *([_cors(cors)] if cors else []),
            Middleware(log.RequestLog, serving=serving, observe=metrics.observe),
            Middleware(Guard, serving=serving),
        ],
    )
    app.state.serving = serving
    errors.install(app)
    app.include_router(ops.router(serving, metrics))
    for routes in (openai, anthropic, agents, tokens):
        app.include_router(routes.router(serving))
    schema.install(app)
    return app


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
    )
