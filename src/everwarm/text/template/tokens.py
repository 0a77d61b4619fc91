"""Tells control tokens that the template wrote from the same text in a message.

In: the texts of the model's control tokens. Marks go around those that stand in the template's own literals; what
comes out of the rendering with its marks intact is the token, everything else is text. Invariant: an input can't
carry marks (it is cleared of them first), so no content, tool name or document can become a control token, whatever
the template cuts, joins or removes.

Some templates build tokens from pieces: `'<|' + message.role + '|>'`. Those tokens, and only those, are also
recognised without marks; then an input mark is put into each place of the inputs that spells one of them, or that
could end or begin one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from everwarm.errors import TemplateError
from everwarm.types import Segment

# Unicode noncharacters: never text, but valid in every encoding, and unchanged by trim, upper and split.
OPEN, CLOSE, BROKEN = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = dict.fromkeys(map(ord, (OPEN, CLOSE, BROKEN)))
_STAND_INS = [chr(code) for code in range(0xFDD3, 0xFDF0)]


def unmarked(value: Any) -> Any:
    """A text without marks; anything else as it is."""
    return value.translate(_MARKS) if isinstance(value, str) else value


class ControlTokens:
    """The texts of a model's control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Empty texts are ignored."""
        self.texts = frozenset(text for text in texts if text)
        self._lengths = sorted({len(text) for text in self.texts}, reverse=True)
        self._first = {text[0] for text in self.texts}

    def mark(self, literal: str) -> str:
        """The literal with marks around each control token; of two that begin at one place, the longer is meant."""
        return "".join(
            OPEN + piece.text + CLOSE if piece.special else piece.text for piece in self._cut(unmarked(literal))
        )

    def _cut(self, text: str) -> list[Segment]:
        pieces = []
        done = at = 0
        while at < len(text):
            length = 0
            if text[at] in self._first:
                length = next((size for size in self._lengths if text[at : at + size] in self.texts), 0)
            if length:
                pieces += [Segment(text[done:at]), Segment(text[at : at + length], special=True)]
                done = at + length
            at += length or 1
        return [piece for piece in (*pieces, Segment(text[done:])) if piece.text]

    def frames(self, literals: Iterable[str]) -> dict[str, set[str]]:
        """Tokens that begin as a literal ends and end as a literal begins, by the word missing between the two."""
        longest = max(self._lengths, default=0)
        ends: set[str] = set()
        starts: set[str] = set()
        for literal in literals:
            ends.update(literal[-size:] for size in range(1, min(longest, len(literal) + 1)))
            starts.update(literal[:size] for size in range(1, min(longest, len(literal) + 1)))
        frames: dict[str, set[str]] = {}
        for token in self.texts:
            heads = [at for at in range(1, len(token)) if token[:at] in ends]
            tails = [at for at in range(1, len(token)) if token[at:] in starts]
            for word in {token[head:tail] for head in heads for tail in tails if head <= tail}:
                frames.setdefault(word, set()).add(token)
        return frames

    def broken(self, text: str, whole: bool = False) -> str:
        """Input text in which no token can be read, nor, unless it is `whole`, a part of one at its ends."""
        places: set[int] = set()
        for token in self.texts:
            at = text.find(token)
            while at >= 0:
                places.add(at + 1)
                at = text.find(token, at + 1)
            if whole:
                continue
            end = len(text.rstrip())
            start = len(text) - len(text.lstrip())
            for size in range(1, len(token)):
                places.update(edge - size + 1 for edge in {end, len(text)} if text.endswith(token[:size], 0, edge))
                places.update(edge + size - 1 for edge in {start, 0} if text.startswith(token[-size:], edge))
        for place in sorted(places, reverse=True):
            text = text[:place] + BROKEN + text[place:]
        return text


class Guard:
    """Clears the inputs of one rendering, and reads its output."""

    def __init__(self, inputs: Any, tokens: ControlTokens, built: ControlTokens) -> None:
        """`inputs`: all plain data the template will see; `built`: those of the tokens that it makes from pieces."""
        self._tokens = tokens
        self._built = built
        used: set[str] = set()
        self.size = _collect(inputs, used)
        taken = [mark for mark in (OPEN, CLOSE, BROKEN) if mark in used]
        free = [mark for mark in _STAND_INS if mark not in used]
        if len(free) < len(taken):
            raise TemplateError("messages use all Unicode noncharacters U+FDD0 to U+FDEF; remove one of them")
        pairs = list(zip(taken, free, strict=False))
        self._hide = {ord(mark): other for mark, other in pairs}
        self._show = {ord(other): mark for mark, other in pairs}

    def clear(self, value: Any, key: str = "") -> Any:
        """Plain data without marks of its own. A role stays whole: templates may build a token around it."""
        if isinstance(value, str):
            text = value.translate(self._hide) if self._hide else value
            return self._built.broken(text, whole=key == "role") if self._built.texts else text
        if isinstance(value, Mapping):
            return {self.clear(name, "role"): self.clear(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.clear(item) for item in value]
        return value

    def read(self, output: str) -> list[Segment]:
        """Segments of what the template wrote."""
        segments: list[Segment] = []
        for number, piece in enumerate(output.split(OPEN)):
            token, close, rest = piece.partition(CLOSE)
            if number and close and token in self._tokens.texts:
                segments.append(Segment(token, special=True))
                piece = rest
            segments += self._built._cut(piece) if self._built.texts else [Segment(piece)]
        return _merged(Segment(unmarked(each.text).translate(self._show), each.special) for each in segments)


def _collect(value: Any, used: set[str]) -> int:
    """Add the noncharacters in all texts of `value` to `used`; the number of characters in them."""
    if isinstance(value, str):
        if not value.isascii():
            used.update(char for char in (OPEN, CLOSE, BROKEN, *_STAND_INS) if char in value)
        return len(value)
    if isinstance(value, Mapping):
        return sum(_collect(name, used) + _collect(item, used) for name, item in value.items())
    if isinstance(value, list):
        return sum(_collect(item, used) for item in value)
    return 1


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for segment in segments:
        if merged and not segment.special and not merged[-1].special:
            merged[-1] = Segment(merged[-1].text + segment.text)
        elif segment.text:
            merged.append(segment)
    return merged
