"""Spaces as SentencePiece and Gemma 4 write them in tokens: as U+2581.

A merge can cross the place between two characters only if some token contains these two in a row. So text is cut before
each U+2581 whose left neighbour stands before U+2581 in no token: into words, mostly. That changes no id, and the same
words return all the time, so that their ids can be remembered.
"""

import re
from collections.abc import Iterable

SPACE = "\u2581"


def word_boundary(texts: Iterable[str]) -> re.Pattern[str]:
    """The empty place before a space that none of these tokens reaches across."""
    joining: set[str] = set()
    for text in texts:
        if text.find(SPACE, 1) > 0:
            first, *others = text.split(SPACE)[:-1]
            joining.update(first[-1:], (before[-1:] or SPACE for before in others))
    left = "".join(re.escape(character) for character in sorted(joining))
    return re.compile(f"(?<=[^{left}])(?={SPACE})" if left else f"(?<=.)(?={SPACE})", re.DOTALL)
