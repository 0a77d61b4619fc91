"""What a client is told when something is wrong: OpenAI's shape, or Anthropic's on its routes. Never a traceback."""

import logging
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from everwarm.errors import (
    AgentExistsError,
    CancelledError,
    CapacityError,
    ContextError,
    EverwarmError,
    GGUFError,
    ModelError,
    PackError,
    StoreError,
    TurnLostError,
    UnknownAgentError,
)
from everwarm.server.redact import without_paths

_log = logging.getLogger(__name__)

_OUR_FILES = (GGUFError, PackError, ModelError)
"""Something is wrong with the model's files: no request is to blame."""


_PARAM = re.compile(r"([a-z_]+(?:\.[\w]+)*): ")
"""Where messages of ours begin with the field that they are about."""

ERROR = "everwarm.error"
"""Where a request's scope says why it was refused."""


class ApiError(EverwarmError):
    """Something that the client is told with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = kind
        self.retry_after = retry_after
        self.code = code


def as_api_error(error: BaseException) -> ApiError:
    """Any error, as the client is told of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        message = first["msg"].removeprefix("Value error, ")
        return ApiError(400, f"{where}: {message}" if where else message, param=where or None)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), "overloaded_error", retry_after=1)
    if isinstance(error, CancelledError):
        return ApiError(408, str(error), "timeout_error")
    if isinstance(error, UnknownAgentError):
        return ApiError(404, str(error))
    if isinstance(error, TurnLostError):
        return ApiError(503, str(error), "overloaded_error", retry_after=1, code="turn_lost")
    if isinstance(error, AgentExistsError):
        return ApiError(409, str(error))
    if isinstance(error, StoreError):
        return ApiError(400, without_paths(str(error)))
    if isinstance(error, ContextError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, EverwarmError) and not isinstance(error, _OUR_FILES):
        return ApiError(400, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "something went wrong in the server; its log says what", "server_error")


def body(error: ApiError, path: str) -> dict[str, object]:
    """The body of a response."""
    if path.startswith("/v1/messages"):
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
        }
        kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        if error.status in (503, 529):
            kind = "overloaded_error"
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    param = error.param
    if param is None and error.status == 400 and (named := _PARAM.match(str(error))):
        param = named.group(1)
    code = error.code or ("invalid_api_key" if error.status == 401 else None)
    return {"error": {"message": str(error), "type": error.kind, "param": param, "code": code}}


def response(error: BaseException, scope: Scope) -> JSONResponse:
    """The answer to a request that failed; the scope remembers why, for the log."""
    told = as_api_error(error)
    scope[ERROR] = str(told)
    path = scope["path"]
    headers = {} if told.retry_after is None else {"Retry-After": str(told.retry_after)}
    return JSONResponse(body(told, path), status_code=told.status, headers=headers)


def install(app: FastAPI) -> None:
    """Have every error answered this way."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return response(error, request.scope)

    for kind in (EverwarmError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
