"""OpenAI's API: chat completions, completions, models, embeddings.

What a client may send is a pydantic model; fields that are accepted and have no effect are listed in `IGNORED`
(docs/server.md), any other unknown field is refused: it would change the meaning of the request.
"""

import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from everwarm.llm import DEFAULT_MAX_TOKENS, Event
from everwarm.server.answers import Answers
from everwarm.server.errors import ApiError, body
from everwarm.server.serving import Serving, receipt_json
from everwarm.server.stream import respond, sse

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "verbosity",
        "prediction", "reasoning_effort", "prompt_cache_retention",
    }
)  # fmt: skip
"""Fields that are accepted and have no effect on the answer of a local model."""

Json = dict[str, Any]


class Extension(BaseModel):
    """`everwarm` in the body: what no other API has."""

    model_config = ConfigDict(extra="forbid")
    agent: Annotated[str | None, Field(max_length=256)] = None
    cache: bool = True
    priority: Annotated[int, Field(ge=-100, le=100)] = 0


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Common(BaseModel):
    """What chat and plain completions share."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(1, ge=1)
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = Field(None, max_length=256)
    everwarm: Extension = Extension()

    @model_validator(mode="after")
    def _known(self) -> "Common":
        unknown = set(self.model_extra or ()) - IGNORED
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))[:200]}: not supported")
        return self

    def options(self) -> Json:
        """Arguments of `LLM.start`."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": _bias(self.logit_bias),
            "stop": self.stop or (),
            "cache": self.everwarm.cache,
            "priority": self.everwarm.priority,
        }


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Json], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Json] | None = None
    tool_choice: Any = None
    response_format: Json | None = None
    modalities: list[str] | None = None

    @model_validator(mode="after")
    def _supported(self) -> "ChatRequest":
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice: only auto and none are supported")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise ValueError("response_format: only text is supported")
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities: only text is supported")
        return self


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1, max_length=1)] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = 1
    suffix: Literal[""] | None = None


class EmbeddingRequest(BaseModel):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(extra="allow")
    input: Any
    model: str | None = None


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api = APIRouter()

    @api.get("/v1/models")
    async def models(request: Request) -> Json:
        serving.tenant(request)
        return {"object": "list", "data": [_model(serving)]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        serving.tenant(request)
        if name != serving.name:
            raise ApiError(404, f"model {name[:100]!r} is not served here; {serving.name} is")
        return _model(serving)

    @api.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        messages = [_message(message, f"messages.{number}") for number, message in enumerate(asked.messages)]
        tools = asked.tools if asked.tools and asked.tool_choice != "none" else None
        source: Json = {"messages": messages, "tools": tools}
        wanted = asked.max_completion_tokens or asked.max_tokens
        top = (asked.top_logprobs or 0) if asked.logprobs else 0
        return await _answer(serving, request, asked, source, wanted or serving.context, top, ChatWire(serving, asked))

    @api.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        source = _prompt(asked.prompt)
        top = asked.logprobs or 0
        limit = asked.max_tokens or DEFAULT_MAX_TOKENS
        return await _answer(serving, request, asked, source, limit, top, TextWire(serving, asked))

    @api.post("/v1/embeddings")
    async def embeddings(asked: EmbeddingRequest, request: Request) -> Response:
        serving.tenant(request)
        raise ApiError(400, f"{serving.name} is a model that writes text: it was not made for embeddings")

    return api


async def _answer(
    serving: Serving, request: Request, asked: Common, source: Json, limit: int, top: int, wire: "ChatWire"
) -> Response:
    tenant = serving.tenant(request)
    count = asked.n or 1
    if count > serving.limits.most_choices:
        raise ApiError(400, f"n: {count} answers at once, the limit is {serving.limits.most_choices}")
    agent = request.headers.get("x-agent-id") or asked.everwarm.agent
    who = {"agent": agent, "tenant": tenant, "group": "" if agent else asked.prompt_cache_key or ""}
    options = asked.options() | {"top_logprobs": top, "max_tokens": limit, "context": serving.context}
    generations = [
        serving.llm.start(
            **source,
            **options,
            **(who if not number else {"tenant": tenant, "keep": False}),
            seed=None if asked.seed is None else asked.seed + number,
        )
        for number in range(count)
    ]
    answers = Answers(serving, request.url.path, generations, agent or "", tenant)
    return await respond(request, answers, wire, bool(asked.stream), serving.limits.keep_alive_s)


class ChatWire:
    """Chat completions as OpenAI writes them."""

    chunk_object, whole_object, prefix = "chat.completion.chunk", "chat.completion", "chatcmpl-"

    def __init__(self, serving: Serving, asked: Common) -> None:
        self._usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._logprobs = asked.logprobs not in (None, False)  # type: ignore[attr-defined]
        self._llm = serving.llm
        self._count = asked.n or 1
        self._head = {
            "id": self.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": f"everwarm-{serving.llm.model.numerics_id[:8]}",
        }
        self._texts = [""] * self._count
        self._finish: list[str | None] = [None] * self._count
        self._logged: list[list[Json]] = [[] for _ in range(self._count)]

    def begin(self) -> str:
        return "".join(
            self._chunk([self._choice(number, {"role": "assistant", "content": ""})]) for number in range(self._count)
        )

    def token(self, choice: int, event: Event) -> str:
        self._texts[choice] += event.text
        logged = self._log(event)
        if logged:
            self._logged[choice].append(logged)
        if event.finish_reason:
            self._finish[choice] = event.finish_reason
        if not event.text and not logged:
            return ""
        return self._chunk([self._choice(choice, {"content": event.text}, logged=[logged] if logged else None)])

    def end(self, answers: Answers) -> str:
        """The reasons, when the turn is safe; usage if it was asked for; the receipt with the last of them."""
        receipt = {"everwarm": receipt_json(answers.receipt)} if answers.receipt else {}
        parts = []
        for number in range(self._count):
            last = number == self._count - 1 and not self._usage
            parts.append(self._chunk([self._choice(number, {}, self._finish[number])], receipt if last else {}))
        if self._usage:
            parts.append(self._chunk([], {"usage": _usage(answers)} | receipt))
        return "".join(parts) + sse("[DONE]")

    def error(self, error: ApiError) -> str:
        return sse(body(error, "")) + sse("[DONE]")

    def whole(self, answers: Answers) -> Json:
        choices = []
        for number, text in enumerate(self._texts):
            choice: Json = {"index": number, **self._said(text), "finish_reason": self._finish[number]}
            choice["logprobs"] = self._logged_whole(number)
            choices.append(choice)
        receipt = {"everwarm": receipt_json(answers.receipt)} if answers.receipt else {}
        return self._head | {"object": self.whole_object, "choices": choices, "usage": _usage(answers)} | receipt

    def _said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _choice(self, number: int, delta: Json, finish: str | None = None, logged: list[Json] | None = None) -> Json:
        return {
            "index": number,
            "delta": delta,
            "finish_reason": finish,
            "logprobs": {"content": logged, "refusal": None} if logged else None,
        }

    def _chunk(self, choices: list[Json], more: Json | None = None) -> str:
        usage = {"usage": None} if self._usage else {}
        return sse(self._head | {"object": self.chunk_object, "choices": choices} | usage | (more or {}))

    def _logged_whole(self, number: int) -> Json | None:
        return {"content": self._logged[number], "refusal": None} if self._logprobs else None

    def _log(self, event: Event) -> Json:
        if not self._logprobs:
            return {}
        top = [self._spelt(token, logprob) for token, logprob in event.top_logprobs]
        return self._spelt(event.token, event.logprob) | {"top_logprobs": top}

    def _spelt(self, token: int, logprob: float) -> Json:
        data = self._llm.tokenizer.token_bytes(token, special=True)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


class TextWire(ChatWire):
    """Plain completions as OpenAI writes them."""

    chunk_object, whole_object, prefix = "text_completion", "text_completion", "cmpl-"

    def begin(self) -> str:
        return ""

    def _said(self, text: str) -> Json:
        return {"text": text}

    def _choice(self, number: int, delta: Json, finish: str | None = None, logged: list[Json] | None = None) -> Json:
        return {
            "index": number,
            "text": delta.get("content", ""),
            "finish_reason": finish,
            "logprobs": _legacy(logged) if logged else None,
        }

    def _logged_whole(self, number: int) -> Json | None:
        return _legacy(self._logged[number]) if self._logprobs else None


def _legacy(logged: list[Json]) -> Json:
    return {
        "tokens": [one["token"] for one in logged],
        "token_logprobs": [one["logprob"] for one in logged],
        "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in logged],
        "text_offset": [],
    }


def _usage(answers: Answers) -> Json:
    receipt = answers.receipt
    prompt, cached = (receipt.prompt_tokens, receipt.cached_tokens) if receipt else (0, 0)
    said = answers.done.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _model(serving: Serving) -> Json:
    return {"id": serving.name, "object": "model", "created": serving.created, "owned_by": "everwarm"}


def _message(message: Json, where: str) -> Json:
    """Parts of text joined; a developer speaks as the system does. What a template can't read is refused."""
    message = dict(message)
    if message.get("role") == "developer":
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ApiError(400, f"{where}.content.{number}: only text is supported, found {str(kind)[:50]}")
            texts.append(part["text"])
        message["content"] = "".join(texts)
    return message


def _prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> Json:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not prompt or not all(isinstance(token, int) for token in prompt):
        raise ApiError(400, "prompt: one text, or one list of token ids")
    return {"tokens": prompt}


def _bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError:
        raise ApiError(400, "logit_bias: expected token ids as keys") from None
