"""A first server: chat over OpenAI's wire format, one request at a time.

In: a loaded model. Out: a FastAPI application with `/health`, `/v1/models` and `/v1/chat/completions` (streaming or
not). Requests wait for each other; batching comes with the engine. A field that is not listed in `ChatRequest` is
refused rather than ignored.
"""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from everwarm.errors import EverwarmError
from everwarm.llm import DEFAULT_MAX_TOKENS, LLM, End, Event


class ChatRequest(BaseModel):
    """The part of OpenAI's chat request that is understood."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of `LLM.stream`."""
        named = self.model_dump(exclude={"model", "messages", "max_tokens", "max_completion_tokens", "stop", "stream"})
        limits = (self.max_completion_tokens, self.max_tokens, DEFAULT_MAX_TOKENS)
        return named | {"max_tokens": next(limit for limit in limits if limit is not None), "stop": self.stop or ()}


def create_app(llm: LLM, name: str) -> FastAPI:
    """The application that serves one model under `name`."""
    app = FastAPI(title="everwarm", openapi_url="/openapi.json")
    turn = threading.Lock()

    @app.exception_handler(EverwarmError)
    @app.exception_handler(RequestValidationError)
    def refuse(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            message = f"{'.'.join(str(part) for part in first['loc'][1:]) or 'body'}: {first['msg']}"
        else:
            message = str(error)
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, status_code=400)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "model": name}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "everwarm"}]}

    @app.post("/v1/chat/completions")
    def chat(request: ChatRequest) -> Response:
        llm.encode_prompt(messages=request.messages)  # what is wrong with the request shows here, before any output
        events = llm.stream(messages=request.messages, **request.options())
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if request.stream:
            return StreamingResponse(_chunks(events, turn, head), media_type="text/event-stream")
        with turn:
            *done, end = events
        assert isinstance(end, End)
        said = [event for event in done if isinstance(event, Event)]
        message = {"role": "assistant", "content": "".join(event.text for event in said)}
        choice = {"index": 0, "message": message, "finish_reason": said[-1].finish_reason, "logprobs": None}
        usage = {
            "prompt_tokens": end.receipt.prompt_tokens,
            "completion_tokens": len(said),
            "total_tokens": end.receipt.prompt_tokens + len(said),
            "prompt_tokens_details": {"cached_tokens": end.receipt.cached_tokens},
        }
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": usage})

    return app


def _chunks(events: Iterator[Event | End], turn: threading.Lock, head: dict[str, Any]) -> Iterator[str]:
    """Server-sent events: the role first, then text as it comes, the reason of the end last."""

    def chunk(delta: dict[str, str], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return f"data: {json.dumps(head | {'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"

    yield chunk({"role": "assistant", "content": ""})
    while True:
        with turn:  # for one token only: a client that has gone away must not keep the others waiting
            event = next(events, None)
        if event is None:
            break
        if isinstance(event, End):
            continue
        if event.text:
            yield chunk({"content": event.text})
        if event.finish_reason:
            yield chunk({}, event.finish_reason)
    yield "data: [DONE]\n\n"
