"""From logits to a token.

In: one row of logits and what was generated so far. Out: the token, its log-probability and the alternatives asked
for. The choice depends on the logits, the request's seed and the number of tokens generated, on nothing else: any
batch, same text.

Order: penalties, bias, temperature, top-k, top-p, min-p, draw. Log-probabilities are those of the model: of the
logits before all that.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everwarm.engine.sampling import Sampling
from everwarm.errors import ModelError, RequestError

F32 = npt.NDArray[np.float32]

_FIRST_CANDIDATES = 256  # top-p rarely needs more; it asks for more when it does


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled token."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # most likely first


class Sampler:
    """The sampler of one request."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        for token in sampling.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(f"logit_bias: token {token} is not in the vocabulary of {vocab_size}")
        self.sampling = sampling
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        self._answer: Counter[int] = Counter()
        self._drawn = 0

    def sample(self, logits: F32) -> Choice:
        """Choose the next token and remember it for the penalties."""
        if not np.isfinite(logits.max()):  # NaN wins every maximum, so this sees one anywhere
            raise ModelError("the model computed no numbers (NaN or infinity): its weights are damaged")
        token = self._choose(self._adjust(logits))
        self._answer[token] += 1
        self._drawn += 1
        logprobs = log_softmax(logits)
        best = _most_likely(logprobs, self.sampling.top_logprobs)
        return Choice(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))

    def _adjust(self, logits: F32) -> F32:
        """Penalties and bias."""
        s = self.sampling
        if s.repetition_penalty == 1.0 and not (s.presence_penalty or s.frequency_penalty or s.logit_bias):
            return logits
        logits = logits.copy()
        answer = np.fromiter(self._answer, np.int64, len(self._answer))
        if s.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt, answer)
            penalty = np.float32(s.repetition_penalty)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if s.presence_penalty or s.frequency_penalty:
            counts = np.fromiter(self._answer.values(), np.float32, len(self._answer))
            logits[answer] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts
        for token, bias in s.logit_bias.items():
            logits[token] += np.float32(bias)
        if logits.max() == -np.inf:
            raise RequestError("logit_bias forbids every token of the vocabulary: leave at least one")
        return logits

    def _choose(self, logits: F32) -> int:
        s = self.sampling
        if s.temperature == 0.0:
            return int(np.argmax(logits))
        # In f64, relative to the maximum: a tiny temperature makes huge quotients, and only differences matter.
        scaled = (logits.astype(np.float64) - float(logits.max())) / s.temperature
        ids, weights = _keep(scaled, s)
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, uniform(self.seed, self._drawn) * cumulative[-1], side="right")
        return int(ids[min(int(at), len(ids) - 1)])


def _keep(scaled: npt.NDArray[np.float64], s: Sampling) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that top-k, top-p and min-p leave, most likely first, with their unnormalised probabilities."""
    count = min(s.top_k or len(scaled), len(scaled))
    # top-p is a share of what top-k has left.
    ids = _most_likely(scaled, count) if s.top_k or s.top_p == 1.0 else _most_likely(scaled, _FIRST_CANDIDATES)
    weights = np.exp(scaled[ids])
    if s.top_p < 1.0:
        total = weights.sum() if s.top_k else np.exp(scaled).sum()
        while weights.sum() < s.top_p * total and len(ids) < count:
            ids = _most_likely(scaled, min(8 * len(ids), count))
            weights = np.exp(scaled[ids])
        reached = int(np.searchsorted(np.cumsum(weights), s.top_p * total)) + 1
        ids, weights = ids[:reached], weights[:reached]
    if s.min_p > 0.0:
        likely = weights >= s.min_p * weights[0]
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _most_likely(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` greatest values, greatest first; of equal ones the smaller id comes first."""
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(values):
        # Everything at least as great as the count-th: ties at the border are settled by id, not by partition's whim.
        border = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= border)
    else:
        ids = np.arange(len(values))
    return ids[np.argsort(-values[ids], kind="stable")][:count]


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
