"""What changes logits before a token is chosen: a chain of processors, each with the state of one choice.

A processor sees every token that was chosen (`advance`), and takes back those that turn out not to count (`rollback`),
so that its next `apply` depends on the accepted tokens alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from everwarm.engine.sampling import Sampling
from everwarm.errors import RequestError

F32 = npt.NDArray[np.float32]


class Constraint(Protocol):
    """Which tokens may follow, for one choice: a grammar, a schema."""

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """Booleans over the vocabulary; None: every token may follow."""

    def advance(self, token: int) -> None:
        """This token was chosen."""

    def rollback(self, count: int) -> None:
        """The last `count` tokens do not count, after all."""


class Processor(Protocol):
    """One link of the chain."""

    def apply(self, logits: F32) -> bool:
        """Change a row of logits in place; whether anything was changed."""

    def advance(self, token: int) -> None: ...

    def rollback(self, count: int) -> None: ...


class Penalties:
    """Of tokens that were said before: repetition (prompt and answer), presence and frequency (the answer)."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        # np.unique would import numpy.ma in the first request: 8 ms
        self._prompt = np.array(sorted(set(prompt)), np.int64)
        self._said: list[int] = []
        self._counts: Counter[int] = Counter()

    def apply(self, logits: F32) -> bool:
        s = self._sampling
        answer = np.fromiter(self._counts, np.int64, len(self._counts))
        if s.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt, answer)
            penalty = np.float32(s.repetition_penalty)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if s.presence_penalty or s.frequency_penalty:
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[answer] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts
        return True

    def advance(self, token: int) -> None:
        self._said.append(token)
        self._counts[token] += 1

    def rollback(self, count: int) -> None:
        for token in self._said[len(self._said) - count :]:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        del self._said[len(self._said) - count :]


class Bias:
    """A number that is added to the logits of some tokens."""

    def __init__(self, bias: dict[int, float], vocab_size: int) -> None:
        for token in bias:
            if not 0 <= token < vocab_size:
                raise RequestError(f"logit_bias: token {token} is not in the vocabulary of {vocab_size}")
        self._ids = np.array(list(bias), np.int64)
        self._values = np.array(list(bias.values()), np.float32)

    def apply(self, logits: F32) -> bool:
        logits[self._ids] += self._values
        return True

    def advance(self, token: int) -> None:
        """It has no state."""

    def rollback(self, count: int) -> None:
        """It has no state."""


class Constrained:
    """Only what a constraint allows."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self.advance, self.rollback = constraint.advance, constraint.rollback

    def apply(self, logits: F32) -> bool:
        allowed = self._constraint.mask()
        if allowed is None:
            return False
        logits[~allowed] = -np.inf
        return True


def make_chain(
    sampling: Sampling, prompt: Sequence[int], vocab_size: int, constraint: Constraint | None
) -> list[Processor]:
    """Penalties, bias, constraint, in this order; those that would change nothing are left out."""
    chain: list[Processor] = []
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        chain.append(Penalties(sampling, prompt))
    if sampling.logit_bias:
        chain.append(Bias(dict(sampling.logit_bias), vocab_size))
    if constraint is not None:
        chain.append(Constrained(constraint))
    return chain
