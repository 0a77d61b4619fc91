"""Finds special tokens in text.

In: a text, and the tokens to look for. Out: the text in pieces: strings, and the ids of the tokens between them.

Longer tokens come first: each takes its occurrences, from left to right, in what longer ones have left. So an
occurrence can be lost to a longer token that starts further right; a single scan from the left would get that wrong.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

SPACES = " \t\n\v\f\r"


class SpecialFinder:
    """A set of tokens to be found. Those in `strip_after` swallow the white space that follows them."""

    def __init__(self, ids: Mapping[str, int], strip_after: Collection[int] = ()) -> None:
        self._ids = ids
        self._strip_after = strip_after
        self._starting = Counter(text[:2] for text in ids)
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for text in ids:
            lengths[text[:2]].add(len(text))
        self._lengths = {start: sorted(sizes) for start, sizes in lengths.items()}
        first = "".join(sorted({re.escape(text[0]) for text in ids}))
        self._first = re.compile(f"[{first}]") if first else None

    def partition(self, text: str) -> list[str | int]:
        """The pieces of `text`, none of them empty."""
        pieces: list[str | int] = [text] if text else []
        for token in self._occurring(text):
            parts: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, str) and token in piece:
                    parts.extend(self._cut(piece, token))
                else:
                    parts.append(piece)
            pieces = parts
        return pieces

    def _occurring(self, text: str) -> list[str]:
        """Tokens that occur in `text`, in the order in which they take their share of it."""
        if self._first is None:
            return []
        found: set[str] = set()
        missing = dict(self._starting)
        for match in self._first.finditer(text):
            at = match.start()
            for start in (text[at : at + 2], text[at]):
                if not missing.get(start):
                    continue
                for length in self._lengths[start]:
                    token = text[at : at + length]
                    if token in self._ids and token not in found:
                        found.add(token)
                        missing[start] -= 1
        return sorted(found, key=lambda token: (-len(token.encode("utf-8", "surrogateescape")), self._ids[token]))

    def _cut(self, piece: str, token: str) -> list[str | int]:
        id_ = self._ids[token]
        parts: list[str | int] = []
        start = 0
        while (at := piece.find(token, start)) >= 0:
            if at > start:
                parts.append(piece[start:at])
            parts.append(id_)
            start = at + len(token)
            if id_ in self._strip_after:
                start = len(piece) - len(piece[start:].lstrip(SPACES))
        if start < len(piece):
            parts.append(piece[start:])
        return parts
