"""Finds special tokens in text.

In: a text, and the tokens to look for. Out: the text in pieces: strings, and the ids of the tokens between them.

Longer tokens come first: each takes its occurrences, from left to right, in what longer ones have left. So an
occurrence can be lost to a longer token that starts further right; a single scan from the left would get that wrong.

At each place only the longest token that still fits is a candidate. So memory and time grow with the text, and hardly
with the number of tokens or with the number of those that begin alike.
"""

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush

from everwarm.text.prefixes import Prefixes

SPACES = " \t\n\v\f\r"


class SpecialFinder:
    """A set of tokens to be found. Those in `strip_after` swallow the white space that follows them."""

    def __init__(self, ids: Mapping[str, int], strip_after: Collection[int] = ()) -> None:
        self._ids = ids
        self._strip_after = strip_after
        self._tokens = Prefixes(ids)

    def partition(self, text: str) -> list[str | int]:
        """The pieces of `text`, none of them empty."""
        candidates = [
            self._candidate(token, at)
            for at in self._tokens.places(text)
            if (token := self._tokens.longest_at(text, at)) is not None
        ]
        heapify(candidates)
        taken = bytearray(len(text) if candidates else 0)
        found: list[tuple[int, int, int]] = []  # start, end, id
        while candidates:
            _, id_, at, token = heappop(candidates)
            end = at + len(token)
            overlap = taken.find(1, at, end)
            if overlap == at:
                continue
            if overlap > at:
                shorter = self._tokens.longest_at(text, at, overlap)
                if shorter is not None:
                    heappush(candidates, self._candidate(shorter, at))
                continue
            if id_ in self._strip_after:
                while end < len(text) and text[end] in SPACES and not taken[end]:
                    end += 1
            taken[at:end] = b"\1" * (end - at)
            found.append((at, end, id_))

        pieces: list[str | int] = []
        last = 0
        for start, end, id_ in sorted(found):
            pieces += [text[last:start], id_] if start > last else [id_]
            last = end
        return [*pieces, text[last:]] if last < len(text) else pieces

    def _candidate(self, token: str, at: int) -> tuple[int, int, int, str]:
        """It is ordered as tokens take their share: by length in bytes, by id, then from left to right."""
        id_ = self._ids[token]
        return -len(token.encode("utf-8", "surrogateescape")), id_, at, token
