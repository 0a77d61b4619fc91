"""How well a model predicts a text.

In: token ids. Out: the mean negative log-likelihood per predicted token, and its exponential, the perplexity. The
text is cut into windows that are scored on their own; the first token of a window is given, every other one is
predicted.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from everwarm.engine.prefill import prefill
from everwarm.engine.sampler import log_softmax
from everwarm.errors import ModelError, RequestError
from everwarm.kv.index.index import Index
from everwarm.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Score:
    """Of a text under a model."""

    tokens: int  # that were predicted
    nll: float  # mean, in nats
    ppl: float


def score(
    model: Transformer,
    index: Index,
    tokens: Sequence[int],
    window: int,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Perplexity of `tokens`. Progress is told (tokens done, tokens in all)."""
    if len(tokens) < 2:
        raise RequestError(f"the text has {len(tokens)} token(s): scoring needs at least 2")
    if not 2 <= window <= model.config.context:
        raise RequestError(f"window {window}: must be between 2 and the model's context of {model.config.context:,}")
    total, count = 0.0, 0
    for low in range(0, len(tokens), window):
        part = tokens[low : low + window]
        at = 0
        with closing(index.sequence(window)) as kv:
            for logits in prefill(model, kv, part, logits_from=0):
                targets = np.asarray(part[at + 1 : at + 1 + len(logits)], np.int64)
                logprobs = log_softmax(logits[: len(targets)])
                total -= float(logprobs[np.arange(len(targets)), targets].sum())
                count += len(targets)
                at += len(logits)
        if progress:
            progress(min(low + window, len(tokens)), len(tokens))
    nll = total / count
    if math.isnan(nll):
        raise ModelError("the model computed no numbers (NaN): its weights are damaged")
    return Score(count, nll, math.exp(nll) if nll < 700 else math.inf)
