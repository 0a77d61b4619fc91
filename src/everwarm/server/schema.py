"""The OpenAPI schema, told as it is: what messages look like, which fields are ignored, how a refusal looks.

FastAPI knows the types of the routes only; what they check by themselves is added here.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response

from everwarm.server.anthropic import request as anthropic
from everwarm.server.openai import request as openai
from everwarm.server.openai.content import ROLES

SCHEMA = "/openapi.json"

_CDN = "https://cdn.jsdelivr.net"
_PAGE_MAY = (
    f"default-src 'none'; script-src {_CDN} 'unsafe-inline'; style-src {_CDN} 'unsafe-inline'; "
    f"img-src {_CDN} https://fastapi.tiangolo.com data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""The page's code comes from elsewhere, and can ask this server everything: it must not send that anywhere else."""

REFUSALS = {
    "400": "The request can't be understood, or asks for what the model can't do.",
    "401": "An API key is needed.",
    "403": "A page of another origin asks, or the server is not known under this name; or the key is an operator's.",
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

_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_BLOCK = {  # of Anthropic's
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "tool_use", "tool_result"]}, "text": {"type": "string"}},
}
_SCHEMAS = {
    "ChatMessage": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": list(ROLES)}, "content": _CONTENT},
    },
    "Message": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]},
        },
    },
    "Error": _ERROR,
}
_MESSAGES = {"ChatRequest": "ChatMessage", "TokenizeRequest": "ChatMessage", "CountRequest": "Message",
             "MessagesRequest": "Message"}  # fmt: skip
_IGNORED = {"ChatRequest": openai.IGNORED, "CompletionRequest": openai.IGNORED, "CountRequest": anthropic.IGNORED,
            "MessagesRequest": anthropic.IGNORED}  # fmt: skip
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def install(app: FastAPI) -> None:
    """Replace the application's schema, and serve it, with a page to try it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    written: list[bytes] = []

    async def schema() -> Response:
        if not written:  # once: it takes milliseconds
            written.append(bytes(JSONResponse(app.openapi()).body))
        return Response(written[0], media_type="application/json")

    async def page() -> Response:
        shown = get_swagger_ui_html(openapi_url=SCHEMA, title=app.title)
        shown.headers["Content-Security-Policy"] = _PAGE_MAY
        return shown

    app.add_api_route(SCHEMA, schema, include_in_schema=False)
    app.add_api_route("/docs", page, include_in_schema=False)


def _described(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas |= _SCHEMAS
    for name, message in _MESSAGES.items():
        _say_items(schemas[name]["properties"]["messages"], message)
    for name, ignored in _IGNORED.items():
        schemas[name]["additionalProperties"] = False
        for field in sorted(ignored):
            schemas[name]["properties"].setdefault(field, {"description": "Accepted; has no effect."})
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
    for path in _STREAMS:
        content = found["paths"][path]["post"]["responses"]["200"]["content"]
        content["application/json"]["schema"] = {"type": "object"}
        content["text/event-stream"] = {"schema": {}}  # events: some tools read them as objects, some as text
    exported = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    found["paths"]["/v1/agents/{name}/export"]["post"]["responses"]["200"]["content"] = exported
    found["paths"]["/v1/agents/import"]["post"]["requestBody"] = {"required": True, "content": exported}
    found["paths"]["/health"]["get"]["responses"]["503"] = {
        "description": "The model is being loaded, or the server ends; the body says what is being done.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    found["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    return found


def _say_items(messages: dict[str, Any], name: str) -> None:
    """Of a list, or of the one that is no null."""
    for found in [messages, *messages.get("anyOf", [])]:
        if found.get("type") == "array":
            found["items"] = {"$ref": f"#/components/schemas/{name}"}


def _refusal(why: str) -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/Error"}
    return {"description": why, "content": {"application/json": {"schema": reference}}}
