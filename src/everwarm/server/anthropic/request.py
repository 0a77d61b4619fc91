"""The bodies of Anthropic's requests.

Every prompt is cached anyway, so `cache_control` changes nothing. Fields that are accepted and have no effect are
listed in `IGNORED`; other unknown fields are ignored and named. Content that a model of text can't read is replaced by
a note.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from everwarm.errors import RequestError
from everwarm.server.anthropic.content import chat_messages, chat_tools, tool_choice
from everwarm.server.errors import ApiError
from everwarm.server.request import Extension, Json, check_choice, template_tools
from everwarm.server.sampling import given
from everwarm.structured.asked import response_format
from everwarm.structured.grammar import Grammar
from everwarm.text.reasoning import Thinking
from everwarm.text.tool_calls.choice import ToolChoice

IGNORED = frozenset(
    {
        "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id",
        "context_management", "betas",
    }
)  # fmt: skip
"""Fields that are accepted and have no effect on the answer of a local model."""


class Metadata(BaseModel):
    model_config = ConfigDict(extra="ignore")
    user_id: Annotated[str | None, Field(max_length=4096)] = None


class CountRequest(BaseModel):
    """`POST /v1/messages/count_tokens`: what the model reads before it answers."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[Json], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None

    @model_validator(mode="after")
    def _supported(self) -> "CountRequest":
        if set(self.output_config or ()) - {"effort", "format"}:
            raise ValueError("output_config: only format and effort are supported")
        return self

    @property
    def ignored(self) -> list[str]:
        """What has no effect here and is not expected to: unknown fields, tools that Anthropic's servers carry out."""
        extra = sorted(name for name, value in (self.model_extra or {}).items() if value is not None)
        kinds = [str(tool["type"])[:50] for tool in self.tools or () if tool.get("type") not in (None, "custom")]
        fields = [name for name in extra if name not in IGNORED]
        return [*fields, *(f"tools of type {kind}" for kind in dict.fromkeys(kinds))]

    @property
    def marks_cache(self) -> bool:
        """Whether the client says what it wants to be cached: then it counts tokens accordingly."""
        blocks: list[object] = [*(self.tools or ()), *(self.system if isinstance(self.system, list) else ())]
        for message in self.messages:
            content = message.get("content")
            blocks += content if isinstance(content, list) else ()
        extra = (self.model_extra or {}).get("cache_control")
        return extra is not None or any(isinstance(block, dict) and block.get("cache_control") for block in blocks)

    def tools_and_choice(self) -> tuple[Sequence[Json] | None, ToolChoice]:
        """The tools as chat templates read them, and which of them may or must be called. Raises ApiError."""
        tools = template_tools(chat_tools(self.tools))
        return tools, check_choice(tool_choice(self.tool_choice), tools)

    def chat(self) -> Json:
        """What the chat template gets. Raises ApiError."""
        tools, choice = self.tools_and_choice()
        return {
            "messages": chat_messages(self.system, self.messages),
            "tools": tools,
            "tool_choice": choice,
            "thinking": self._thinking(),
        }

    def _thinking(self) -> Thinking:
        """Anthropic's models think only if they are asked to."""
        asked, effort = self.thinking or {}, (self.output_config or {}).get("effort")
        kind, budget = asked.get("type", "disabled"), asked.get("budget_tokens")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise ApiError(400, f"thinking.type: expected enabled, adaptive or disabled, found {str(kind)[:50]!r}")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
            raise ApiError(400, "thinking.budget_tokens: expected a number of tokens, at least 1")
        on = kind != "disabled"
        return Thinking(on, str(effort) if on and effort is not None else None, budget if kind == "enabled" else None)


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stream: bool | None = False
    metadata: Metadata | None = None
    everwarm: Extension = Extension()

    @property
    def asks_for_grammar(self) -> bool:
        return self.output_format is not None or (self.output_config or {}).get("format") is not None

    def asked_grammar(self) -> Grammar | None:
        """What the answer must follow. Raises RequestError."""
        inner = (self.output_config or {}).get("format")
        if inner is not None and self.output_format is not None:
            raise RequestError("output_config.format and output_format: an answer can follow only one of them")
        if inner is not None:
            return response_format(inner, "output_config.format")
        return response_format(self.output_format, "output_format")

    def options(self) -> Json:
        """Arguments of `LLM.start`; of those that say how to sample, the ones that were given."""
        return given(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k) | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or (),
            "cache": self.everwarm.cache,
            "priority": self.everwarm.priority,
        }
