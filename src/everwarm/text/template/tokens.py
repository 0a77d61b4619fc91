"""Tells control tokens that the template wrote from the same text in a message.

In: the texts of the model's control tokens. Marks go around those that stand in the template's own literals; what
comes out of the rendering with its marks intact is the token, everything else is text. Invariant: an input can't
carry marks (it is cleared of them first), so no content, tool name or document can become a control token, whatever
the template cuts, joins or removes.

Some templates build tokens from pieces: `'<|' + message.role + '|>'`. Those tokens, and only those, are also
recognised without marks; then an input mark is put into each place of the inputs that spells one of them, or that
could end or begin one.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from io import StringIO
from itertools import pairwise
from typing import Any

from everwarm.errors import TemplateError
from everwarm.text.prefixes import MOST_LENGTH, Prefixes
from everwarm.text.template.meter import meter
from everwarm.types import Segment

MOST_TOKENS = 1 << 18
"""Control tokens of a model. Real ones have up to 131,072 (a code book of images); sorting these takes 0.3 s."""

# Unicode noncharacters: never text, but valid in every encoding, and unchanged by trim, upper and split.
OPEN, CLOSE, BROKEN = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = (OPEN, CLOSE, BROKEN)
_STAND_INS = [chr(code) for code in range(0xFDD3, 0xFDF0)]


_SEGMENT_SIZE = 64  # what a segment takes in memory, counted as characters


def unmarked(value: Any) -> Any:
    """A text without marks; anything else as it is."""
    return _replaced(value, ((mark, "") for mark in _MARKS)) if isinstance(value, str) else value


def _replaced(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    """With every first of a pair replaced by its second. `translate` would do it at once, but takes 50 times longer."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text


class ControlTokens:
    """The texts of a model's control tokens. All work on them is counted by the meter that runs."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Empty texts are ignored. Raises TemplateError for more, or longer ones, than any model needs."""
        self.texts = frozenset(text for text in texts if text)
        if len(self.texts) > MOST_TOKENS:
            raise TemplateError(
                f"chat template: {len(self.texts):,} control tokens, at most {MOST_TOKENS:,}; use a raw prompt (--raw)"
            )
        self._forwards = Prefixes(self.texts)
        self._longest = self._forwards.longest
        if self._longest > MOST_LENGTH:
            name = max(self.texts, key=len)[:20]
            raise TemplateError(
                f"chat template: control token {name!r}... has {self._longest:,} characters, at most {MOST_LENGTH}; "
                "use a raw prompt (--raw)"
            )
        self._backwards = Prefixes(text[::-1] for text in self.texts)

    def mark(self, literal: str) -> str:
        """The literal with marks around each control token; of two that begin at one place, the longer is meant."""
        return "".join(
            OPEN + piece.text + CLOSE if piece.special else piece.text for piece in self.cut(unmarked(literal))
        )

    def cut(self, text: str) -> Iterator[Segment]:
        """Control tokens and what is between them, from left to right."""
        done = 0
        for at in self._forwards.places(text):
            meter().tick()
            token = self._forwards.longest_at(text, at) if at >= done else None
            if token is not None:
                if at > done:
                    yield Segment(text[done:at])
                yield Segment(token, special=True)
                done = at + len(token)
        if done < len(text):
            yield Segment(text[done:])

    def frames(self, literals: Iterable[str]) -> "Frames":
        """How tokens can begin as a literal ends, and end as a literal begins."""
        heads: set[str] = set()
        tails: set[str] = set()
        for literal in literals:
            for size in range(1, min(self._longest, len(literal) + 1)):
                meter().tick()
                if self._forwards.begins(literal[-size:]):
                    heads.add(literal[-size:])
                if self._backwards.begins(literal[:size][::-1]):
                    tails.add(literal[:size])
        return Frames(self.texts, sorted(heads), sorted(tails), self._longest)

    def broken(self, text: str, whole: bool = False) -> str:
        """Input text in which no token can be read, nor, unless it is `whole`, a part of one at its ends."""
        places = set()
        for at in self._forwards.places(text):
            meter().tick()
            if self._forwards.longest_at(text, at) is not None:
                places.add(at + 1)
        if not whole:
            for edge in {len(text.rstrip()), len(text)}:
                for size in range(1, min(self._longest, edge + 1)):
                    if self._forwards.begins(text[edge - size : edge]):
                        places.add(edge - size + 1)
            for edge in {len(text) - len(text.lstrip()), 0}:
                for size in range(1, min(self._longest, len(text) - edge + 1)):
                    if self._backwards.begins(text[edge : edge + size][::-1]):
                        places.add(edge + size - 1)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return BROKEN.join(text[start:end] for start, end in pairwise(cuts))


class Frames:
    """What a template's literals can put around a word so that it becomes a control token."""

    def __init__(self, texts: Set[str], heads: list[str], tails: list[str], longest: int) -> None:
        self._texts = texts
        self._heads = heads
        self._tails = tails
        self._longest = longest

    def around(self, word: str) -> set[str]:
        """The tokens that are a head, this word and a tail."""
        if len(word) > self._longest - 2:
            return set()
        found = set()
        for head in self._heads:
            meter().tick()
            for tail in self._tails:
                token = head + word + tail
                if token in self._texts:
                    found.add(token)
        return found


class Guard:
    """Clears the inputs of one rendering, and reads its output."""

    def __init__(self, inputs: Any, tokens: ControlTokens) -> None:
        """`inputs`: all plain data the template will see."""
        self._tokens = tokens
        self.built = ControlTokens(())
        """Those of the tokens that the template makes from pieces."""
        used: set[str] = set()
        self.size = _collect(inputs, used)
        taken = [mark for mark in _MARKS if mark in used]
        free = [mark for mark in _STAND_INS if mark not in used]
        if len(free) < len(taken):
            raise TemplateError("messages use all Unicode noncharacters U+FDD0 to U+FDEF; remove one of them")
        self._hide = list(zip(taken, free, strict=False))
        self._show = [(other, mark) for mark, other in self._hide]

    def clear(self, value: Any, key: str = "") -> Any:
        """Plain data without marks of its own. A role stays whole: templates may build a token around it."""
        if isinstance(value, str):
            text = _replaced(value, self._hide)
            return self.built.broken(text, whole=key == "role") if self.built.texts else text
        if isinstance(value, Mapping):
            return {self.clear(name, "role"): self.clear(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.clear(item) for item in value]
        return value

    def read(self, output: str) -> list[Segment]:
        """Segments of what the template wrote."""
        return list(self._merged(self._pieces(output)))

    def _pieces(self, output: str) -> Iterator[Segment]:
        at = 0
        while at < len(output):
            meter().tick()
            mark = output.find(OPEN, at)
            end = len(output) if mark < 0 else mark
            if end > at:
                yield from self.built.cut(output[at:end]) if self.built.texts else [Segment(output[at:end])]
            if mark < 0:
                return
            at = mark + 1
            close = output.find(CLOSE, at, at + MOST_LENGTH + 1)
            if close >= 0 and output[at:close] in self._tokens.texts:
                yield Segment(output[at:close], special=True)
                at = close + 1

    def _merged(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """The segments without marks, neighbouring texts as one."""
        texts = StringIO()
        for segment in segments:
            if not segment.special:
                texts.write(segment.text)
                continue
            if text := self._plain(texts.getvalue()):
                yield Segment(text)
            texts = StringIO()
            meter().tick(_SEGMENT_SIZE)
            yield Segment(self._plain(segment.text), special=True)
        if text := self._plain(texts.getvalue()):
            yield Segment(text)

    def _plain(self, text: str) -> str:
        return _replaced(unmarked(text), self._show)


def _collect(value: Any, used: set[str]) -> int:
    """Add the noncharacters in all texts of `value` to `used`; the number of characters in them."""
    if isinstance(value, str):
        if not value.isascii():
            used.update(char for char in (*_MARKS, *_STAND_INS) if char in value)
        return len(value)
    if isinstance(value, Mapping):
        return sum(_collect(name, used) + _collect(item, used) for name, item in value.items())
    if isinstance(value, list):
        return sum(_collect(item, used) for item in value)
    return 1
