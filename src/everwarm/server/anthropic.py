"""Anthropic's API: messages and the counting of their tokens.

Every prompt is cached by itself, so `cache_control` changes nothing. Fields that are accepted and have no effect are
listed in `IGNORED`; any other unknown field, and content that a model of text can't read, is refused.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from everwarm.server.answers import Answers
from everwarm.server.anthropic_content import chat_messages, chat_tools
from everwarm.server.anthropic_wire import MessageWire
from everwarm.server.content import Json, checked_tools
from everwarm.server.openai import Extension
from everwarm.server.serving import Serving, agent_of
from everwarm.server.stream import respond

IGNORED = frozenset(
    {"cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"}
)
"""Fields that are accepted and have no effect on the answer of a local model."""


class Metadata(BaseModel):
    model_config = ConfigDict(extra="ignore")
    user_id: Annotated[str | None, Field(max_length=256)] = None


class Prompt(BaseModel):
    """What is read before an answer: `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[Json], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None

    @model_validator(mode="after")
    def _supported(self) -> "Prompt":
        unknown = {name for name, value in (self.model_extra or {}).items() if value is not None} - IGNORED
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))[:200]}: not supported")
        if self.tool_choice is not None and self.tool_choice.get("type") not in ("auto", "none"):
            raise ValueError("tool_choice: only auto and none are supported")
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            raise ValueError("thinking: not supported; leave it out, or set its type to disabled")
        if set(self.output_config or ()) - {"effort"}:
            raise ValueError("output_config: only effort is accepted (and has no effect)")
        return self

    def chat(self, serving: Serving) -> Json:
        """What the template is given. Raises ApiError."""
        tools = None if self.tool_choice == {"type": "none"} else checked_tools(serving.llm, chat_tools(self.tools))
        return {"messages": chat_messages(self.system, self.messages), "tools": tools}


class MessagesRequest(Prompt):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=0)
    stream: bool | None = False
    metadata: Metadata | None = None
    everwarm: Extension = Extension()

    def options(self) -> Json:
        """Arguments of `LLM.start`."""
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or (),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or 0,
            "cache": self.everwarm.cache,
            "priority": self.everwarm.priority,
        }


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api = APIRouter()

    @api.post("/v1/messages")
    async def messages(asked: MessagesRequest, request: Request) -> Response:
        tenant = serving.tenant(request)
        serving.check_priority(asked.everwarm.priority)
        agent = agent_of(request) or asked.everwarm.agent
        group = (asked.metadata.user_id or "") if asked.metadata and not agent else ""
        options: dict[str, Any] = asked.options() | {"agent": agent, "tenant": tenant, "group": group}
        serving.check_messages(len(asked.messages))
        generation = await serving.texts.work(
            request, lambda: serving.llm.start(**asked.chat(serving), **options, context=serving.context)
        )
        answers = Answers(serving, request.url.path, [generation], agent or "", tenant)
        wire = MessageWire(serving, asked.max_tokens, kept=asked.everwarm.cache)
        return await respond(request, answers, wire, bool(asked.stream), serving.limits.keep_alive_s)

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(asked: Prompt, request: Request) -> Json:
        serving.tenant(request)

        def count() -> int:
            segments, add_bos = serving.llm.segments(**asked.chat(serving))
            return len(serving.llm.tokenizer.encode(segments, add_bos=add_bos))

        return {"input_tokens": await serving.texts.work(request, count)}

    return api
