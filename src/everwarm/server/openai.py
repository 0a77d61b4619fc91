"""OpenAI's API: chat completions, completions, models, embeddings.

What a client may send is a pydantic model; fields that are accepted and have no effect are listed in `IGNORED`
(docs/server.md), any other unknown field is refused: it would change the meaning of the request.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from everwarm.llm import DEFAULT_MAX_TOKENS, Generation
from everwarm.server.answers import Answers
from everwarm.server.content import Json, chat_message, checked_tools
from everwarm.server.errors import ApiError
from everwarm.server.openai_wire import ChatWire, TextWire
from everwarm.server.serving import Serving, agent_of
from everwarm.server.stream import respond

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "verbosity",
        "prediction", "reasoning_effort", "prompt_cache_retention",
    }
)  # fmt: skip
"""Fields that are accepted and have no effect on the answer of a local model."""


MOST_BIASES = 1024


def _short(bias: Any) -> Any:
    """Before anything is made of it: each entry that is wrong would become an error of its own."""
    if isinstance(bias, dict) and len(bias) > MOST_BIASES:
        raise ValueError(f"{len(bias):,} tokens, the limit is {MOST_BIASES:,}")
    return bias


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
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_short)] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(1, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
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

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

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

    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    response_format: Json | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None

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

    prompt: (
        str
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=1, fail_fast=True)]
        | Annotated[list[list[int]], Field(max_length=1, fail_fast=True)]
    )
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
        known = [_model(serving)]
        return {"object": "list", "data": known, "has_more": False, "first_id": serving.name, "last_id": serving.name}

    @api.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        serving.tenant(request)
        if name != serving.name:
            raise ApiError(404, f"model {name[:100]!r} is not served here; {serving.name} is")
        return _model(serving)

    @api.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        tenant = serving.tenant(request)
        serving.check_messages(len(asked.messages))
        options = {
            "max_tokens": asked.max_completion_tokens or asked.max_tokens or serving.context,
            "top_logprobs": (asked.top_logprobs or 0) if asked.logprobs else 0,
        }

        def talk() -> Json:
            messages = [chat_message(message, f"messages.{number}") for number, message in enumerate(asked.messages)]
            tools = checked_tools(serving.llm, asked.tools) if asked.tool_choice != "none" else None
            return {"messages": messages, "tools": tools}

        wire = ChatWire(serving, asked.n or 1, logprobs=bool(asked.logprobs), usage=asked.wants_usage)
        return await _answer(serving, request, tenant, asked, options, talk, wire)

    @api.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        tenant = serving.tenant(request)
        prompt = _prompt(asked.prompt)
        logprobs, before = asked.logprobs is not None, ""
        if logprobs:  # tells where tokens are in all of the text
            spell = partial(serving.llm.detokenize, special=True)
            before = prompt if isinstance(prompt, str) else await serving.texts.work(request, lambda: spell(prompt))
        given = {"prompt" if isinstance(prompt, str) else "tokens": prompt}
        options = {
            "max_tokens": asked.max_tokens or DEFAULT_MAX_TOKENS,
            "top_logprobs": asked.logprobs or 0,
        }
        count, usage = asked.n or 1, asked.wants_usage
        wire = TextWire(serving, count, logprobs=logprobs, usage=usage, prompt_chars=len(before))
        return await _answer(serving, request, tenant, asked, options, lambda: given, wire)

    @api.post("/v1/embeddings")
    async def embeddings(asked: EmbeddingRequest, request: Request) -> Response:
        serving.tenant(request)
        raise ApiError(400, f"{serving.name} is a model that writes text: it was not made for embeddings")

    return api


async def _answer(
    serving: Serving,
    request: Request,
    tenant: str,
    asked: Common,
    options: Json,
    prompt: Callable[[], Json],
    wire: ChatWire,
) -> Response:
    """`prompt` makes what the model reads; that takes a while if it is long."""
    serving.check_priority(asked.everwarm.priority)
    count = asked.n or 1
    if count > serving.limits.most_choices:
        raise ApiError(400, f"n: {count} answers at once, the limit is {serving.limits.most_choices}")
    agent = agent_of(request) or asked.everwarm.agent
    who = {"agent": agent, "group": "" if agent else asked.prompt_cache_key or ""}
    options = asked.options() | options | who | {"tenant": tenant, "context": serving.context}
    seeds = [None if asked.seed is None else (asked.seed + number) % 2**64 for number in range(count)]

    def start() -> list[Generation]:
        first = serving.llm.start(**prompt(), **options, seed=seeds[0])
        return [first, *(first.another_choice(seed) for seed in seeds[1:])]

    generations = await serving.texts.work(request, start)
    answers = Answers(serving, request.url.path, generations, agent or "", tenant)
    return await respond(request, answers, wire, bool(asked.stream), serving.limits.keep_alive_s)


def _model(serving: Serving) -> Json:
    """As both OpenAI's and Anthropic's clients read it."""
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "everwarm",
        "type": "model",
        "display_name": serving.llm.config.name,
        "created_at": datetime.fromtimestamp(serving.created, UTC).isoformat(),
        "max_input_tokens": serving.context,
    }


def _prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(isinstance(token, int) for token in prompt):
        raise ApiError(400, "prompt: one text, or one list of token ids")
    return prompt  # type: ignore[return-value]


def _bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError:
        raise ApiError(400, "logit_bias: expected token ids as keys") from None
