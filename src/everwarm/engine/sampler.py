"""From logits to a token.

In: one row of logits and what was generated so far. Out: the token, its log-probability and the alternatives asked
for. The choice depends on the logits, the request's seed and the number of tokens generated, on nothing else: any
batch, same text.

Order: the chain of processors (penalties, bias, constraint), temperature, top-k, top-p, min-p, draw. Log-probabilities
are those of the model: of the logits before all that.
"""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everwarm.engine.processors import Constrained, Constraint, make_chain
from everwarm.engine.sampling import Sampling
from everwarm.errors import ModelError, RequestError
from everwarm.kernels.backend import RowOperations

F32 = npt.NDArray[np.float32]

_FIRST_CANDIDATES = 256  # top-p rarely needs more; it asks for more when it does


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token that was chosen."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # most likely first


class Sampler:
    """The sampler of one choice."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        rows: RowOperations,
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._rows = rows
        self._constrained = None if constraint is None else Constrained(constraint, rows)
        self._processors = make_chain(sampling, prompt, vocab_size, self._constrained)
        self._count = 0  # tokens that were chosen
        self.spent_s = 0.0

    def sample(self, logits: F32) -> SampledToken:
        """Choose the next token; the one after it depends on it."""
        started = time.perf_counter()
        sampled = self._sample(logits)
        self.spent_s += time.perf_counter() - started
        return sampled

    def forced(self) -> list[int]:
        """Tokens that `sample` is certain to choose next, because the constraint leaves no other."""
        if self._constrained is None:
            return []
        started = time.perf_counter()
        forced = self._constrained.forced()
        self.spent_s += time.perf_counter() - started
        return forced

    def rollback(self, count: int) -> None:
        """The last `count` tokens do not count, after all."""
        self._count -= count
        for processor in self._processors:
            processor.rollback(count)

    def _sample(self, logits: F32) -> SampledToken:
        best, greatest, total = self._rows.summarize(logits, 1.0)
        if math.isnan(total):
            raise ModelError("the model computed no numbers (NaN or infinity): its weights are damaged")
        adjusted = self._adjust(logits)
        token = best if adjusted is logits and self.sampling.temperature == 0.0 else self._choose(adjusted)
        self._count += 1
        for processor in self._processors:
            processor.advance(token)
        normaliser = greatest + math.log(total)
        likely = self._rows.greatest_ids(logits, min(self.sampling.top_logprobs, len(logits)))
        return SampledToken(
            token, float(logits[token]) - normaliser, tuple((i, float(logits[i]) - normaliser) for i in likely)
        )

    def _adjust(self, logits: F32) -> F32:
        """Through the chain; the row itself if nothing changes it."""
        if not self._processors:
            return logits
        adjusted = logits.copy()
        changes = [processor.apply(adjusted) for processor in self._processors]
        if not any(changes):
            return logits
        if adjusted.max() == -np.inf:
            raise RequestError("logit_bias or a constraint forbids every token of the vocabulary: leave at least one")
        return adjusted

    def _choose(self, logits: F32) -> int:
        s = self.sampling
        if s.temperature == 0.0:
            return int(np.argmax(logits))
        fraction = uniform(self.seed, self._count)
        if not s.top_k and s.top_p == 1.0 and s.min_p == 0.0:
            return self._rows.draw(logits, s.temperature, fraction)
        ids, weights = keep(logits, s, self._rows)
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, fraction * cumulative[-1], side="right")
        return int(ids[min(int(at), len(ids) - 1)])


def keep(logits: F32, s: Sampling, rows: RowOperations) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that top-k, top-p and min-p leave, with their unnormalised probabilities.

    Most likely first where top-k or top-p asks for an order, else by id: to sort a whole vocabulary takes longer than
    everything else here.
    """
    _, greatest, total = rows.summarize(logits, s.temperature)

    def weigh(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        # In f64, relative to the maximum: a tiny temperature makes huge quotients, and only differences matter.
        return np.exp((logits[ids].astype(np.float64) - greatest) / s.temperature)

    def likeliest(count: int) -> npt.NDArray[np.int64]:
        return np.asarray(rows.greatest_ids(logits, count), np.int64)

    count = min(s.top_k or len(logits), len(logits))
    if s.top_k or s.top_p < 1.0:
        ids = likeliest(count if s.top_k else min(_FIRST_CANDIDATES, count))
        weights = weigh(ids)
    else:
        ids = np.arange(count)
        weights = weigh(ids)
    if s.top_p < 1.0:  # a share of what top-k has left
        share = s.top_p * (float(weights.sum()) if s.top_k else total)
        while weights.sum() < share and len(ids) < count:
            ids = likeliest(min(8 * len(ids), count))
            weights = weigh(ids)
        reached = int(np.searchsorted(np.cumsum(weights), share)) + 1
        ids, weights = ids[:reached], weights[:reached]
    if s.min_p > 0.0:
        likely = weights >= s.min_p
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def log_softmax(logits: F32) -> npt.NDArray[np.float64]:
    """Over the last axis, in f64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def uniform(seed: int, index: int) -> float:
    """The index-th draw of a seed, in [0, 1). SplitMix64: it is random access, and it will never change under us."""
    mask = 2**64 - 1
    x = _mix(seed ^ 0x6A09E667F3BCC909) + (index + 1) * 0x9E3779B97F4A7C15 & mask
    return (_mix(x) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)
