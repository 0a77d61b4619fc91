"""Many texts, and which of them begin at a given place of another text.

In: the texts of special tokens. Out: for a place in a text, the longest of them that stands there. Invariant: a
look-up takes time in the logarithm of their number, whatever they are: thousands of lengths, or each one the beginning
of the next. A trie would do the same, but takes a Python object per character.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

MOST_LENGTH = 256
"""Characters of a special token. The longest of any known model has 60; a place is compared with so many characters."""


class Prefixes:
    """A set of texts, none of them empty."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts)
        self.longest = max(map(len, self._texts), default=0)
        first = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._first = re.compile(f"[{first}]") if first else None
        self._starts = {text[:2] for text in self._texts}
        # Of each text the longest other one that it begins with, and one further up: ancestors are found by leaps.
        self._parents: list[int] = []
        self._leaps: list[int] = []
        self._depths: list[int] = []
        for number, text in enumerate(self._texts):
            parent = number - 1
            while parent >= 0 and not text.startswith(self._texts[parent]):
                parent = self._parents[parent]
            self._parents.append(parent)
            self._leaps.append(self._leap(parent))
            self._depths.append(self._depth(parent) + 1)

    def _leap(self, parent: int) -> int:
        """Where a child of `parent` leaps to: two leaps of the same length become one of twice the length."""
        if parent < 0:
            return -1
        near = self._leaps[parent]
        far = self._leaps[near] if near >= 0 else -1
        same = self._depth(parent) - self._depth(near) == self._depth(near) - self._depth(far)
        return far if same else parent

    def _depth(self, number: int) -> int:
        return self._depths[number] if number >= 0 else 0

    def places(self, text: str, start: int = 0) -> Iterator[int]:
        """Where one of the texts may begin, from left to right: its first two characters are there."""
        if self._first is None:
            return
        starts = self._starts
        for found in self._first.finditer(text, start):
            at = found.start()
            if text[at : at + 2] in starts or text[at] in starts:
                yield at

    def longest_at(self, text: str, at: int, end: int | None = None) -> str | None:
        """The longest that begins at `at` and ends no later than `end`."""
        most = at + self.longest
        here = text[at : most if end is None or end > most else end]
        # The greatest that is not above: all that `here` begins with are among its own beginnings.
        number = bisect_right(self._texts, here) - 1
        while number >= 0 and not here.startswith(self._texts[number]):
            leap = self._leaps[number]
            far = leap >= 0 and not here.startswith(self._texts[leap])
            number = leap if far else self._parents[number]
        return self._texts[number] if number >= 0 else None

    def begins(self, part: str) -> bool:
        """Whether one of the texts begins with `part` and goes on behind it."""
        number = bisect_right(self._texts, part)
        return number < len(self._texts) and self._texts[number].startswith(part)

    def __contains__(self, text: str) -> bool:
        number = bisect_left(self._texts, text)
        return number < len(self._texts) and self._texts[number] == text
