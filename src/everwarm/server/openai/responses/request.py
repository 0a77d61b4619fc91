"""The body of `POST /v1/responses`.

Fields that have no effect on the answer of a local model are accepted (`IGNORED`). What is unknown is ignored and named
in the receipt.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from everwarm.server.request import Extension, Json
from everwarm.server.sampling import given

IGNORED = frozenset(
    {
        "user", "service_tier", "safety_identifier", "prompt_cache_retention", "client_metadata", "max_tool_calls",
        "context_management", "stream_options", "include", "truncation", "parallel_tool_calls",
    }
)  # fmt: skip
"""Fields that are accepted without a word."""


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    effort: str | None = None
    summary: str | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    format: Json | None = None
    verbosity: str | None = None


class ResponsesRequest(BaseModel):
    """What a client asks for."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    input: str | Annotated[list[Json], Field(fail_fast=True)] = ""
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = Field(None, max_length=200)
    background: Literal[False] | None = False
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt_cache_key: str | None = Field(None, max_length=256)
    everwarm: Extension = Extension()

    @property
    def unknown(self) -> list[str]:
        """Fields that nobody here knows."""
        return sorted(set(self.model_extra or ()) - IGNORED)

    def options(self) -> Json:
        """Arguments of `LLM.start`; of those that say how to sample, the ones that were given."""
        return given(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % 2**64,
        ) | {
            "cache": self.everwarm.cache,
            "priority": self.everwarm.priority,
        }
