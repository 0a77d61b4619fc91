"""The least number of tokens that a text can have, without tokenising it.

Let L(b) be the length of the longest token that contains the byte b, and give every byte b the weight 1 / L(b). The
bytes of a token of length n weigh at most n * 1/n = 1 together. So a text has at least as many tokens as its bytes
weigh, however it is cut into tokens: also in a history, whose tokens a model has chosen.

Bytes that a tokenizer may drop weigh nothing, nor does U+FFFD: it may stand for bytes that are no character.
"""

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from everwarm.text.specials import SPACES
from everwarm.text.vocabulary import Vocabulary

_REPLACED = "\ufffd"


class LeastTokens:
    """The weights of one vocabulary."""

    def __init__(self, tokens: Iterable[bytes], dropped: Collection[int] = ()) -> None:
        """`tokens` are all that text can become; `dropped` are bytes that may become none."""
        longest = np.zeros(256, np.int64)
        for piece in tokens:
            found = np.frombuffer(piece, np.uint8)
            longest[found] = np.maximum(longest[found], len(piece))
        longest[list(dropped)] = 0
        self._weights: NDArray[np.float64] = np.divide(1.0, longest, out=np.zeros(256), where=longest > 0)

    def of(self, spelt: bytes) -> float:
        """At least so many tokens spell these bytes."""
        counts = np.bincount(np.frombuffer(spelt, np.uint8), minlength=256)
        return float(counts @ self._weights) * (1 - 1e-9)  # rounding must not make it more


def swallowed(vocabulary: Vocabulary) -> set[int]:
    """White space, if there are tokens that swallow what follows them."""
    return set(SPACES.encode()) if vocabulary.strip_after else set()


def without_replaced(text: str) -> str:
    """The text without characters that may stand for something else."""
    return text.replace(_REPLACED, "") if _REPLACED in text else text
