"""The application: all routes of one model, and what is true for every request."""

from collections.abc import Mapping

from fastapi import FastAPI

from everwarm.llm import LLM
from everwarm.server import errors, openai
from everwarm.server.serving import Limits, Serving


def create_app(llm: LLM, name: str, limits: Limits | None = None, keys: Mapping[str, str] | None = None) -> FastAPI:
    """The application that serves one model under `name`."""
    app = FastAPI(title="everwarm", openapi_url="/openapi.json")
    serving = Serving(llm, name, limits, keys)
    app.state.serving = serving
    errors.install(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": name}

    app.include_router(openai.router(serving))
    return app
