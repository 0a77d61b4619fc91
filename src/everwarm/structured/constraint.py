"""A grammar as a constraint of one choice: which tokens may follow those that were chosen.

It implements `everwarm.engine.processors.Constraint`. After an end token nothing is constrained any more.
"""

from collections.abc import Container

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from everwarm.errors import RequestError


class GrammarConstraint:
    """Belongs to one choice and one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Container[int], name: str) -> None:
        """The matcher is before its first token and belongs to this constraint alone. Errors name the grammar."""
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._end_ids = end_ids
        self._name = name
        self._since_end = 0  # tokens from the first end token on

    def mask(self) -> npt.NDArray[np.uint32] | None:
        if self._since_end:
            return None
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the mask would allow an end token
            raise self._failed()
        return np.frombuffer(bits, np.uint32)[: self._words]  # there may be one word more

    def advance(self, token: int) -> None:
        if self._since_end or token in self._end_ids:
            self._since_end += 1
        elif not self._matcher.consume_token(token):
            raise self._failed()

    def rollback(self, count: int) -> None:
        free = min(count, self._since_end)
        self._since_end -= free
        if count > free and not self._matcher.rollback(count - free):
            raise self._failed()

    def _failed(self) -> RequestError:
        reason = self._matcher.get_error().split("\n", 1)[0][:200]
        return RequestError(f"{self._name}: too complex to follow from here on ({reason}): make it simpler")
