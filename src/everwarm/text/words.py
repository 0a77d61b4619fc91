"""Cuts text into words: the pieces that byte pair merges never cross.

In: a text and the patterns of its pre-tokenizer (`pretokenizers`). Out: words whose concatenation is the text.

Each pattern cuts every piece that the patterns before it have left: matches become pieces, so does what lies between
them. A pattern sees one piece at a time and nothing around it. Most see no characters either, but classes of them, as
llama.cpp's do: beyond ASCII a character is its general category (or a space), one byte each. That makes the patterns
small and independent of Python's version of Unicode.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import AnyStr

import numpy as np
from numpy.typing import NDArray

from everwarm.text.pace import paced
from everwarm.text.pretokenizers import Pattern, Thirds

_SPACE = 0x0B  # every space beyond ASCII becomes a vertical tab, which `\s` matches
_CODES = {"-": 0x80, "N": 0x81, "L": 0x82, "P": 0x83, "M": 0x84, "S": 0x85, "W": _SPACE}
_HAN_CODES = {0x82: 0x86, 0x80: 0x87}  # letters, and code points still unassigned
_HAN = (
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0x20000, 0x2A6E0),
    (0x2A700, 0x2EBF0),
    (0x2F800, 0x2FA20),
)

_CLASSES = {
    r"\p{L}": r"A-Za-z\x82\x86",
    r"\p{N}": r"0-9\x81",
    r"\p{P}": r"!-#%-*,-/:;?@\[-\]_{}\x83",
    r"\p{M}": r"\x84",
    r"\p{S}": r"$+<->^`|~\x85",
    r"\p{Upper}": r"A-Z\x82\x86",
    r"\p{Lower}": r"a-z\x82\x86",
    r"\p{Han}": r"\x86\x87",
    r"\p{NotHan}": r"A-Za-z\x82",
}
"""The members of a class in a pattern. Case is known within ASCII only: a letter beyond it is both."""

_LONG_PIECE = 1 << 16

_Step = Callable[["_Views", list[int]], list[int]]


class WordSplitter:
    """The patterns of one pre-tokenizer, compiled."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._steps = [_compile(pattern) for pattern in patterns]

    def split(self, text: str) -> list[str]:
        """The words of `text`, which must hold no surrogates."""
        views = _Views(text)
        ends = [len(text)] if text else []
        for step in self._steps:
            ends = step(views, ends)
        return [text[start:end] for start, end in pairwise([0, *ends])]


class _Views:
    """A text as patterns see it; a view is made when the first pattern asks for it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._collapsed: bytes | None = None
        self._wide: str | None = None

    def collapsed(self) -> bytes:
        """One byte per character: itself if ASCII, else its class."""
        if self._collapsed is None:
            if self._text.isascii():
                self._collapsed = self._text.encode("ascii")
            else:
                codes = np.frombuffer(self._text.encode("utf-32-le"), np.uint32)
                self._collapsed = _class_of_code()[codes].tobytes()
        return self._collapsed

    def wide(self) -> str:
        """The characters themselves, except spaces beyond ASCII."""
        if self._wide is None:
            self._wide = self._text if self._text.isascii() else _wide_space().sub(chr(_SPACE), self._text)
        return self._wide


def _compile(pattern: Pattern) -> _Step:
    if isinstance(pattern, Thirds):
        run, end = re.compile(_expand(pattern.digit + "+").encode("ascii")), pattern.end
        return lambda views, ends: _cut_thirds(run, end, views.collapsed(), ends)
    if r"\u" in pattern:
        wide = re.compile(pattern, re.ASCII)
        return lambda views, ends: _cut(wide, views.wide(), ends)
    collapsed = re.compile(_expand(pattern).encode("ascii"))
    return lambda views, ends: _cut(collapsed, views.collapsed(), ends)


def _expand(pattern: str) -> str:
    """The pattern with its classes spelled out, inside brackets or with brackets of their own."""
    inside = False

    def spell(match: re.Match[str]) -> str:
        nonlocal inside
        part = match[0]
        if part in "[]":
            inside = part == "["
        elif part in _CLASSES:
            return _CLASSES[part] if inside else f"[{_CLASSES[part]}]"
        return part

    return re.sub(r"\\p\{\w+\}|\\.|[\[\]]", spell, pattern)


def _cut(pattern: re.Pattern[AnyStr], view: AnyStr, ends: list[int]) -> list[int]:
    cuts: list[int] = []
    start = 0
    for end in ends:
        last = start
        matches = pattern.finditer(view[start:end])
        for match in matches if end - start < _LONG_PIECE else paced(matches):
            first, stop = match.span()
            if start + first > last:
                cuts.append(start + first)
            last = start + stop
            cuts.append(last)
        if last < end:
            cuts.append(end)
        start = end
    return cuts


def _cut_thirds(run: re.Pattern[bytes], at_end: bool, view: bytes, ends: list[int]) -> list[int]:
    cuts: list[int] = []
    start = 0
    for end in ends:
        for match in run.finditer(view[start:end]):
            first, stop = start + match.start(), start + match.end()
            if at_end:
                cuts.extend(range(first + ((stop - first) % 3 or 3), stop + 1, 3))
            else:
                cuts.extend(cut for cut in range(first + (stop - first) % 3, stop, 3) if cut > start)
        if not cuts or cuts[-1] < end:
            cuts.append(end)
        start = end
    return cuts


@cache
def _runs() -> tuple[list[int], list[str]]:
    """Where runs of one class begin, beyond ASCII, and their classes (Unicode 15.1)."""
    runs = files("everwarm.text").joinpath("unicode_classes.txt").read_text(encoding="ascii").split()
    return [int(run[:-1], 16) for run in runs], [run[-1] for run in runs]


@cache
def _class_of_code() -> NDArray[np.uint8]:
    starts, letters = _runs()
    lengths = np.diff([*starts, 0x110000])
    table = np.concatenate(
        [np.arange(0x80, dtype=np.uint8), np.repeat(np.array([_CODES[x] for x in letters], np.uint8), lengths)]
    )
    for first, stop in _HAN:
        han = table[first:stop]
        for code, han_code in _HAN_CODES.items():
            han[han == code] = han_code
    return table


@cache
def _wide_space() -> re.Pattern[str]:
    table = _class_of_code()
    spaces = np.flatnonzero(table == _SPACE)
    return re.compile("[" + "".join(chr(code) for code in spaces if code > 0x7F) + "]")
