"""What a caller may ask of the sampler: plain data, checked when it is made."""

import logging
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everwarm.errors import RequestError

_log = logging.getLogger(__name__)

FILE_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Metadata of a GGUF file that says how its makers sample, and the field of `Sampling` that each of them sets."""

LARGEST_BIAS = 1e6  # more than any logit, and far from what f32 can't hold


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: the most likely token, always."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely; 0 keeps all
    top_p: float = 1.0  # keep the most likely that together reach this probability
    min_p: float = 0.0  # keep those at least this likely relative to the most likely
    repetition_penalty: float = (
        1.0  # divides (multiplies) positive (negative) logits of tokens seen in prompt or answer
    )
    presence_penalty: float = 0.0  # subtracted once from tokens seen in the answer
    frequency_penalty: float = 0.0  # subtracted per occurrence in the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logit of a token id
    seed: int | None = None  # None: a fresh one for each request
    top_logprobs: int = 0  # how many alternatives each event reports

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, math.inf, "0 is greedy")
        _check("top_k", self.top_k, 0, math.inf, "0 keeps all tokens")
        if not isinstance(self.top_k, int) or not isinstance(self.top_logprobs, int):
            raise RequestError("top_k and top_logprobs: must be whole numbers")
        _check("top_p", self.top_p, 0.0, 1.0, "1 keeps all tokens", exclusive=True)
        _check("min_p", self.min_p, 0.0, 1.0, "0 keeps all tokens")
        _check("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "1 is none", exclusive=True)
        _check("presence_penalty", self.presence_penalty, -math.inf, math.inf, "0 is none")
        _check("frequency_penalty", self.frequency_penalty, -math.inf, math.inf, "0 is none")
        _check("top_logprobs", self.top_logprobs, 0, 1000, "0 is none")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias: expected token ids and what is added to their logits")
        for token, bias in self.logit_bias.items():
            is_bias = _is_number(bias) and (bias == -math.inf or (bias <= LARGEST_BIAS and _is_finite(bias)))
            if not isinstance(token, int) or not is_bias:
                raise RequestError(
                    f"logit_bias {token!r}: {bias!r}: must be a token id and a number up to {LARGEST_BIAS:.0e}, "
                    "-inf to forbid the token"
                )
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < 2**64):
            raise RequestError(f"seed {self.seed!r}: must be a whole number between 0 and 2^64 - 1")


def file_sampling(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Fields of `Sampling` that a model file recommends. A value that can't be used is left out: the model can."""
    found: dict[str, Any] = {}
    for key, name in FILE_KEYS.items():
        value = metadata.get(key)
        if name == "top_k" and isinstance(value, int):
            value = max(0, value)  # -1: all of them
        try:
            Sampling(**{name: value})  # type: ignore[arg-type]
        except RequestError as error:
            if value is not None:
                _log.warning("the model file's %s is not used: %s", key, error)
            continue
        found[name] = round(value, 6) if isinstance(value, float) else value  # f32: 0.6 is 0.60000002
    return found


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all others that can be computed with
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check(name: str, value: float, low: float, high: float, hint: str, *, exclusive: bool = False) -> None:
    if not _is_number(value):
        raise RequestError(f"{name} {value!r}: must be a number ({hint})")
    inside = (low < value if exclusive else low <= value) and value <= high and _is_finite(value)
    if not inside:  # NaN fails every comparison, so it lands here too
        relation = "more than" if exclusive else "at least"
        limits = " and ".join(
            text for text in (f"{relation} {low}" * (low > -math.inf), f"at most {high}" * (high < math.inf)) if text
        )
        raise RequestError(f"{name} {value}: must be {limits or 'a number'} ({hint})")
