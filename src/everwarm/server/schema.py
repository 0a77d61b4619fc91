"""The OpenAPI schema, told as it is: every route may refuse a request, and how a refusal looks."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REFUSALS = {
    "400": "The request can't be understood, or asks for what the model can't do.",
    "401": "An API key is needed.",
    "404": "No such agent, model or path.",
    "405": "The path knows no such method.",
    "408": "It took longer than the limit.",
    "409": "It contradicts what is there.",
    "413": "The body is larger than the limit.",
    "429": "Too many requests run or wait; Retry-After says when to come again.",
    "503": "The model is being loaded, the memory is taken, or the server ends; Retry-After says when to come again.",
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error", "description": "On Anthropic's routes only."},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        },
    },
}


def install(app: FastAPI) -> None:
    """Replace the application's schema."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape, which is never sent
        schemas.pop(name, None)
    for path, operations in found["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, why in REFUSALS.items():
                if path != "/health" or status in ("405", "413", "408", "400"):
                    responses.setdefault(status, _refusal(why))
            operation.setdefault("security", [] if path == "/health" else [{"key": []}, {"header": []}])
    if "/health" in found["paths"]:
        found["paths"]["/health"]["get"]["responses"]["503"] = {
            "description": "The model is being loaded, or the server ends; the body says what is being done.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    found["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    return found


def _refusal(why: str) -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/Error"}
    return {"description": why, "content": {"application/json": {"schema": reference}}}
