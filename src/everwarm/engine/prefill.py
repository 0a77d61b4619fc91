"""What a model can take, and logits of a whole text, chunk by chunk: for scoring and measuring, beside the engine."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from everwarm.errors import ContextError, RequestError
from everwarm.model.transformer import KV, Span, Transformer

PREFILL_CHUNK = 512
"""Tokens per prefill step: enough rows for BLAS to run at full speed, activations that stay small."""


def check_prompt(model: Transformer, prompt: Sequence[int], context: int | None = None) -> None:
    """Raise RequestError unless the model can take this prompt and say at least one token within `context`."""
    context, vocab = context or model.config.context, model.config.vocab_size
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token")
    if len(prompt) >= context:
        raise too_long(f"{len(prompt):,}", context)
    for token in prompt:
        if not 0 <= token < vocab:
            raise RequestError(f"token {token} is not in the vocabulary of {vocab:,}")


def too_long(tokens: str, context: int) -> ContextError:
    """A prompt of so many tokens leaves no room for an answer."""
    return ContextError(
        f"the prompt has {tokens} tokens, the context is {context:,}: shorten it to leave room for an answer"
    )


def prefill(
    model: Transformer,
    kv: KV,
    tokens: Sequence[int],
    *,
    logits_from: int,
) -> Iterator[npt.NDArray[np.float32]]:
    """Compute `tokens` behind `kv` in chunks; yields the logits of the rows from `logits_from` on, as they come."""
    for low in range(0, len(tokens), PREFILL_CHUNK):
        chunk = tokens[low : low + PREFILL_CHUNK]
        logits = model.forward([Span(chunk, kv, min(max(logits_from - low, 0), len(chunk)))])
        if len(logits):
            yield logits
