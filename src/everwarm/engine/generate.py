"""One sequence from prompt to end: prefill in chunks, then a token at a time.

In: token ids. Out: choices, one per generated token. Knows nothing of text: the caller decides when a text has ended.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from everwarm.engine.sampler import Choice, Sampler
from everwarm.errors import RequestError
from everwarm.kv.turn import Alone, Turn
from everwarm.model.transformer import KV, Span, Transformer

PREFILL_CHUNK = 512
"""Tokens per prefill step: enough rows for BLAS to run at full speed, activations that stay small."""


def check_prompt(model: Transformer, prompt: Sequence[int]) -> None:
    """Raise RequestError unless the model can take this prompt and say at least one token."""
    context, vocab = model.config.context, model.config.vocab_size
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token")
    if len(prompt) >= context:
        raise RequestError(
            f"the prompt has {len(prompt):,} tokens, the model's context is {context:,}: "
            "shorten it to leave room for an answer"
        )
    for token in prompt:
        if not 0 <= token < vocab:
            raise RequestError(f"token {token} is not in the vocabulary of {vocab:,}")


def prefill(
    model: Transformer,
    kv: KV,
    tokens: Sequence[int],
    *,
    logits_from: int,
    after_chunk: Callable[[], None] = lambda: None,
) -> Iterator[npt.NDArray[np.float32]]:
    """Compute `tokens` behind `kv` in chunks; yields the logits of the rows from `logits_from` on, as they come."""
    for low in range(0, len(tokens), PREFILL_CHUNK):
        chunk = tokens[low : low + PREFILL_CHUNK]
        logits = model.forward([Span(chunk, kv, min(max(logits_from - low, 0), len(chunk)))])
        after_chunk()
        if len(logits):
            yield logits


def generate(
    model: Transformer, turn: Turn | Alone, prompt: Sequence[int], sampler: Sampler, max_tokens: int
) -> Iterator[Choice]:
    """Sample up to `max_tokens` tokens, fewer if the context is full. What the turn has acquired of the prompt is not
    computed again. Close the iterator to stop earlier.
    """
    check_prompt(model, prompt)
    new = prompt[turn.kv.length :]
    started = time.perf_counter()
    (logits,) = prefill(model, turn.kv, new, logits_from=len(new) - 1, after_chunk=turn.seal_full)
    turn.computed(len(new), time.perf_counter() - started)
    for remaining in range(min(max_tokens, model.config.context - len(prompt)), 0, -1):
        choice = sampler.sample(logits[-1])
        turn.append([choice.token])
        yield choice
        if remaining > 1:
            logits = model.forward([Span([choice.token], turn.kv, 0)])
            turn.seal_full()
