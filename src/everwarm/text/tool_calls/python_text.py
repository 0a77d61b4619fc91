"""Python's literals as JSON."""

import json
import re

_WORD = re.compile(r"\b(?:True|False|None)\b")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|\b(?:True|False|None)\b|[()]", re.S)
_BRACKETS = {"(": "[", ")": "]"}
_ESCAPE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)",
    re.S,
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}


def literal_as_json(text: str) -> str:
    """A whole literal. What is none comes out as no JSON either."""
    return _LITERAL.sub(_converted, text)


def _converted(found: re.Match[str]) -> str:
    inside = found[1] if found[1] is not None else found[2]
    if inside is not None:
        return string_as_json(inside)
    return _WORDS.get(found[0]) or _BRACKETS[found[0]]


def string_as_json(inside: str) -> str:
    """A text, given what stands between its quotes."""
    return json.dumps(_ESCAPE.sub(_unescaped, inside), ensure_ascii=False)


def words_as_json(words: str) -> str:
    return _WORD.sub(lambda found: _WORDS[found[0]], words)


def _unescaped(found: re.Match[str]) -> str:
    high, low, two, four, eight, other = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if code := two or four or eight:
        number = int(code, 16)
        return "\ufffd" if number > 0x10FFFF or 0xD800 <= number < 0xE000 else chr(number)
    return _ESCAPED.get(other, other if other in "\\'\"/" else "\\" + other)
