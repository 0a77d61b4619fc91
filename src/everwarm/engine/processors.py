"""What changes logits before a token is chosen: a chain of processors, each with the state of one choice.

A processor sees every token that was chosen (`advance`), and takes back those that turn out not to count (`rollback`),
so that its next `apply` depends on the accepted tokens alone.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from everwarm.engine.sampling import Sampling
from everwarm.errors import RequestError
from everwarm.kernels.backend import RowOperations

F32 = npt.NDArray[np.float32]
Bitmask = npt.NDArray[np.uint32]
"""A bit for each token of the vocabulary: token i may follow if bit i % 32 of word i // 32 is set."""

MOST_FORCED = 16
"""Tokens that a constraint leaves no choice about and that are computed in one step, at most."""


class Constraint(Protocol):
    """Which tokens may follow, for one choice: a grammar, a schema. All calls come from the engine's thread."""

    def mask(self) -> Bitmask | None:
        """The tokens that may follow; None: every token may, and so after an end token."""

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
    """Only what a constraint allows.

    Where the constraint leaves exactly one token, that token is forced. `forced` looks for such tokens ahead of those
    that were chosen, so that the engine can compute several in one step; each is still chosen in its turn.
    """

    def __init__(self, constraint: Constraint, rows: RowOperations) -> None:
        self._constraint = constraint
        self._rows = rows
        self._ahead: deque[int] = deque()  # forced tokens: the constraint is past them, none was chosen yet
        self._mask: Bitmask | None = None  # what may follow them
        self._mask_is_known = False

    def apply(self, logits: F32) -> bool:
        if self._ahead:
            only = self._ahead[0]
            kept = logits[only]
            logits.fill(-np.inf)
            logits[only] = kept
            return True
        allowed = self._next_mask()
        if allowed is None:
            return False
        self._rows.forbid(logits, allowed)
        return True

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model says, at most `MOST_FORCED`."""
        while len(self._ahead) < MOST_FORCED:
            allowed = self._next_mask()
            only = None if allowed is None else only_token(allowed)
            if only is None:
                break
            self._step(only)
            self._ahead.append(only)
        return list(self._ahead)

    def advance(self, token: int) -> None:
        if self._ahead and self._ahead[0] == token:
            self._ahead.popleft()
            return
        self._look_back()
        self._step(token)

    def rollback(self, count: int) -> None:
        self._look_back()
        self._constraint.rollback(count)
        self._mask_is_known = False

    def _next_mask(self) -> Bitmask | None:
        if not self._mask_is_known:
            self._mask = self._constraint.mask()
            self._mask_is_known = True
        return self._mask

    def _step(self, token: int) -> None:
        self._constraint.advance(token)
        self._mask_is_known = False

    def _look_back(self) -> None:
        """Bring the constraint back to the tokens that were chosen."""
        if self._ahead:
            self._constraint.rollback(len(self._ahead))
            self._ahead.clear()
            self._mask_is_known = False


def only_token(allowed: Bitmask) -> int | None:
    """The token that a mask leaves, if it leaves exactly one."""
    words = np.flatnonzero(allowed)
    if len(words) != 1:
        return None
    word = int(allowed[words[0]])
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


def packed(allowed: npt.NDArray[np.bool_]) -> Bitmask:
    """A boolean for each token, as a mask."""
    words = np.zeros((len(allowed) + 31) // 32, "<u4")
    bits = np.packbits(allowed, bitorder="little")
    words.view(np.uint8)[: len(bits)] = bits
    return words.astype(np.uint32, copy=False)


def make_chain(
    sampling: Sampling, prompt: Sequence[int], vocab_size: int, constrained: Constrained | None
) -> list[Processor]:
    """Penalties, bias, constraint, in this order; those that would change nothing are left out."""
    chain: list[Processor] = []
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        chain.append(Penalties(sampling, prompt))
    if sampling.logit_bias:
        chain.append(Bias(dict(sampling.logit_bias), vocab_size))
    if constrained is not None:
        chain.append(constrained)
    return chain
