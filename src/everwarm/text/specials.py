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
        taken = bytearray(len(text))
        found: list[tuple[int, int, int]] = []  # start, end, id
        for token in self._occurring(text):
            at = text.find(token)
            while at >= 0:
                end = at + len(token)
                overlap = taken.rfind(1, at, end)
                if overlap >= 0:
                    at = text.find(token, overlap + 1)
                    continue
                if self._ids[token] in self._strip_after:
                    while end < len(text) and text[end] in SPACES and not taken[end]:
                        end += 1
                taken[at:end] = b"\1" * (end - at)
                found.append((at, end, self._ids[token]))
                at = text.find(token, end)

        pieces: list[str | int] = []
        last = 0
        for start, end, id_ in sorted(found):
            pieces += [text[last:start], id_] if start > last else [id_]
            last = end
        return [*pieces, text[last:]] if last < len(text) else pieces

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
