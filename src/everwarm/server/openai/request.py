"""The bodies of OpenAI's requests.

Fields that are accepted and have no effect are listed in `IGNORED` (docs/server.md). Other unknown fields are ignored
and named in the response; only what would silently give a wrong answer is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from everwarm.errors import RequestError
from everwarm.llm import LLM
from everwarm.server.errors import ApiError
from everwarm.server.openai.content import chat_messages, tool_choice
from everwarm.server.openai.dialects import translated
from everwarm.server.request import Extension, Json, check_choice, template_tools
from everwarm.server.sampling import given
from everwarm.structured.asked import asked_grammar, response_format
from everwarm.structured.grammar import Grammar
from everwarm.text.reasoning import Thinking
from everwarm.text.tool_calls.choice import ToolChoice

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "verbosity", "prediction",
        "prompt_cache_retention",
    }
)  # fmt: skip
"""Fields that are accepted and have no effect on the answer of a local model."""


_GRAMMAR_FIELDS = ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "grammar", "json_schema")
"""vLLM's and llama.cpp's: what an answer must follow."""

MOST_BIASES = 1024


def _check_count(bias: Any) -> Any:
    """Before the entries are validated: each wrong one would become an error of its own."""
    if isinstance(bias, dict) and len(bias) > MOST_BIASES:
        raise ValueError(f"{len(bias):,} tokens, the limit is {MOST_BIASES:,}")
    return bias


class ThinkingSwitch(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: int | None = Field(None, ge=0)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What chat completions and plain completions share."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_count)] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(1, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    timings_per_token: bool | None = False
    return_progress: bool | None = False
    response_format: Json | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_schema: Json | None = None
    prompt_cache_key: str | None = Field(None, max_length=256)
    everwarm: Extension = Extension()

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, body: Any) -> Any:
        return translated(body)

    @property
    def ignored(self) -> list[str]:
        """Fields that nobody here knows: they have no effect."""
        return sorted(
            name for name, value in (self.model_extra or {}).items() if name not in IGNORED and value is not None
        )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def asks_for_grammar(self) -> bool:
        return any(getattr(self, name) is not None for name in ("response_format", *_GRAMMAR_FIELDS))

    def asked_grammar(self) -> Grammar | None:
        """What the answer must follow: OpenAI's field, vLLM's or llama.cpp's. Raises RequestError."""
        format_ = response_format(self.response_format)
        asked = asked_grammar(**{name: getattr(self, name) for name in _GRAMMAR_FIELDS})
        if format_ is not None and asked is not None:
            raise RequestError(f"response_format and {asked.name}: an answer can follow only one of them")
        return format_ or asked

    def options(self) -> Json:
        """Arguments of `LLM.start`; of those that say how to sample, the ones that were given."""
        return given(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        ) | {
            "logit_bias": self._biases(),
            "stop": self.stop or (),
            "ignore_eos": self.ignore_eos,
            "cache": self.everwarm.cache,
            "priority": self.everwarm.priority,
        }

    def _biases(self) -> dict[int, float]:
        try:
            return {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise ApiError(400, "logit_bias: the keys must be token ids") from None


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, Field(max_length=32)] = None
    reasoning_budget: int | None = Field(None, ge=-1)  # tokens; -1: no limit (llama.cpp's name)
    thinking: ThinkingSwitch | None = None  # as DeepSeek's and GLM's APIs have it
    chat_template_kwargs: Json | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _supported(self) -> "ChatRequest":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt: an answer goes on, or begins; not both")
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's")
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities: only text is supported")
        return self

    def tools_and_choice(self) -> tuple[Sequence[Json] | None, ToolChoice]:
        """The tools as chat templates read them, and which of them may or must be called. Raises ApiError."""
        tools = template_tools(self.tools)
        return tools, check_choice(tool_choice(self.tool_choice, self.parallel_tool_calls), tools)

    def answer_grammar(self, llm: LLM) -> Grammar | None:
        """What the answer must follow. Raises ApiError or RequestError."""
        return llm.answer_grammar(self.asked_grammar(), *self.tools_and_choice())

    def chat(self) -> Json:
        """What the chat template gets. Raises ApiError."""
        tools, choice = self.tools_and_choice()
        return {
            "messages": chat_messages(self.messages),
            "tools": tools,
            "tool_choice": choice,
            "thinking": self.asked_thinking(),
            "template_variables": self.chat_template_kwargs,
        }

    def asked_thinking(self) -> Thinking:
        """Of all the fields that say something about reasoning."""
        enabled = None if self.reasoning_effort is None else True
        if self.thinking is not None:
            enabled = self.thinking.type != "disabled"
        budget = self.reasoning_budget
        if budget is None and self.thinking is not None:
            budget = self.thinking.budget_tokens
        if budget is None and isinstance(named := (self.chat_template_kwargs or {}).get("thinking_budget"), int):
            budget = named
        budget = None if budget is None or budget < 0 else budget
        return Thinking(enabled, self.reasoning_effort, budget)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[list[int]], Field(fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = 1
    suffix: Literal[""] | None = None

    def prompts(self, most: int) -> list[str | list[int]]:
        """One or several. Raises ApiError."""
        given = self.prompt
        if isinstance(given, list) and given and isinstance(given[0], str | list):
            if len(given) > most:
                raise ApiError(400, f"prompt: {len(given):,} prompts at once, the limit is {most}; send fewer")
            return [one for one in given if isinstance(one, str | list)]
        if not given:
            raise ApiError(400, "prompt: it is empty; send a text, a list of texts, or token ids")
        return [given]  # type: ignore[list-item]


class EmbeddingRequest(BaseModel):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(extra="allow")
    input: Any
    model: str | None = None
