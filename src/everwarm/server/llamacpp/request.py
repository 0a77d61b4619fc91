"""The bodies of llama.cpp's own requests.

Control tokens that a prompt spells count as what they are: whoever asks here writes the chat format by hand.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from everwarm.llm import LLM
from everwarm.server.errors import ApiError
from everwarm.server.openai.request import MOST_BIASES, ChatRequest, GenerationRequest

Prompt = str | list[int | str]
"""A text, or token ids among which texts may be."""

FORBIDDEN = -1e6
"""A bias that no token survives; llama.cpp writes `false`."""


class LlamaCompletionRequest(GenerationRequest):
    """`POST /completion`."""

    prompt: Any
    logit_bias: Any = None
    n_probs: int | None = Field(0, ge=0, le=20)
    return_tokens: bool | None = False
    response_fields: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None

    def prompts(self, most: int) -> list[Prompt]:
        """One or several. Raises ApiError."""
        given = self.prompt
        if not isinstance(given, list) or any(isinstance(part, int) for part in given):
            return [_prompt(given)]
        if not given or len(given) > most:
            raise ApiError(400, f"prompt: {len(given):,} prompts at once; send at least 1, at most {most}")
        return [_prompt(one) for one in given]

    def biases(self, llm: LLM) -> dict[int, float]:
        """Added to the logits of tokens; a text stands for all its tokens, `false` for never. Raises ApiError."""
        given = self.logit_bias
        pairs = list(given.items()) if isinstance(given, dict) else given or []
        if not isinstance(pairs, list) or len(pairs) > MOST_BIASES:
            raise ApiError(400, f"logit_bias: expected at most {MOST_BIASES:,} pairs of a token and a number")
        found: dict[int, float] = {}
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], int | str):
                raise ApiError(400, "logit_bias: expected pairs of a token and a number")
            token, bias = pair
            bias = FORBIDDEN if bias is False else bias
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise ApiError(400, f"logit_bias: expected a number or false for {str(token)[:50]!r}")
            found |= dict.fromkeys(_tokens(llm, token), bias)
        return found

    def _biases(self) -> dict[int, float]:
        return {}  # `biases` needs the tokenizer


class LlamaTokenizeRequest(BaseModel):
    """`POST /tokenize`."""

    model_config = ConfigDict(extra="ignore")
    content: Any = ""
    add_special: bool | None = False  # begin with BOS, if the model does
    parse_special: bool | None = True  # names of control tokens in the text are those tokens
    with_pieces: bool | None = False


class LlamaDetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(extra="ignore")
    tokens: Annotated[list[int], Field(fail_fast=True)] = []


class ApplyTemplateRequest(ChatRequest):
    """`POST /apply-template`: the prompt that chat completions would make of this body."""


def encode(llm: LLM, prompt: Prompt, *, add_bos: bool, special: bool = True) -> list[int]:
    """The ids of a prompt; BOS goes before it if the model wants that and it begins with a text."""
    if isinstance(prompt, str):
        prompt = [prompt]
    ids: list[int] = []
    for number, part in enumerate(prompt):
        if isinstance(part, int):
            ids.append(part)
        else:
            begins = not number and add_bos and llm.tokenizer.add_bos
            ids += llm.tokenizer.encode(part, special=special, add_bos=begins, continuing=bool(number))
    return ids


def checked_prompt(given: Any) -> Prompt:
    """Raises ApiError if it is neither a text nor a list of token ids and texts."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(part, int | str) and not isinstance(part, bool) for part in given):
        return given
    raise ApiError(400, "prompt: expected a text, or a list of token ids and texts")


def _prompt(given: Any) -> Prompt:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise ApiError(400, "prompt.multimodal_data: this model reads text only")
        given = given.get("prompt_string")
    return checked_prompt(given)


def _tokens(llm: LLM, token: int | str) -> Sequence[int]:
    if isinstance(token, int):
        return [token]
    is_id = len(token) < 12 and token.isascii() and token.isdecimal()
    return [int(token)] if is_id else llm.tokenize(token)
