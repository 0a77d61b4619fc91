"""Calls of models that forget the marks: the whole answer is one JSON object that names an offered tool.

    {"name": "add", "arguments": {"a": 1}}          perhaps in a fence, ```json ... ```

Only the whole answer counts: an object inside a text is a quotation, or something that a document has smuggled in. An
answer is held back only as long as it can still be such a call; all else goes to the parser of the model's own format.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from everwarm.events import Content
from everwarm.text.output_parser import OutputParser
from everwarm.text.tool_calls.json_reader import ARGUMENTS, NAMES, JsonReader, decoded
from everwarm.text.tool_calls.reader import NotACall, Reading, Tools

NAME = "lenient"
"""What the receipt calls it."""

_FENCE = re.compile(r"\s*(?:```[ \t]*(?:json|tool_call|tool_code|xml)?[ \t]*\n\s*)?")
_KEYS = frozenset({*NAMES, *ARGUMENTS, "type", "id", "tool_call_id"})
_FIRST_MEMBER = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?')
_LONGEST = 1 << 16
"""Characters of an answer that is held back."""


class Lenient:
    """Holds back an answer that may be a call as a whole, and asks another parser for all others."""

    def __init__(self, inner: OutputParser, reader: "WholeObject", *, fenced_only: bool = False) -> None:
        """`fenced_only`: the other parser reads objects without a fence, as they come."""
        self._inner, self._reader, self._fenced_only = inner, reader, fenced_only
        self._held: str | None = ""  # None: the other parser has it all

    @property
    def control_tokens(self) -> frozenset[str]:
        return self._inner.control_tokens

    def feed(self, text: str) -> Sequence[Content]:
        if self._held is None:
            return self._inner.feed(text)
        self._held += text
        possible = may_be_call(self._held, self._reader.tools)
        if self._fenced_only and self._held.lstrip().startswith("{"):
            possible = False
        return () if possible else self._release()

    def control(self, name: str) -> Sequence[Content]:
        return [*self._release(), *self._inner.control(name)]

    def finish(self) -> Sequence[Content]:
        if self._held:
            content = self._reader.whole(self._held)
            if content:
                return content
        return [*self._release(), *self._inner.finish()]

    def _release(self) -> Sequence[Content]:
        held, self._held = self._held, None
        return self._inner.feed(held) if held else ()


class WholeObject(JsonReader):
    """Reads a whole answer."""

    marks = ()
    openers = ("{",)

    def whole(self, answer: str) -> Sequence[Content]:
        """The call that it is, or nothing."""
        begin = _FENCE.match(answer)
        fenced = begin is not None and "```" in begin[0]
        body = answer[begin.end() if begin else 0 :].rstrip()
        if fenced:
            body = body.removesuffix("```").rstrip()
        self._text, self._ended = body, True
        try:
            for _ in self.calls():
                return []
        except NotACall:
            return []
        return self._found

    def calls(self) -> Reading[None]:
        members = decoded(self._text)
        if not isinstance(members, dict) or not _describes_call(members):
            raise NotACall
        yield from self.call_object()
        self.end()

    def start(self, name: str) -> None:
        if name not in self.tools:
            raise NotACall
        super().start(name)


def may_be_call(answer: str, tools: Tools) -> bool:
    """Whether an answer that begins like this can still be one object that names an offered tool."""
    begin = _FENCE.match(answer)
    body = answer[begin.end() if begin else 0 :]
    if not body:
        return True
    if not body.startswith("{"):
        return "```json".startswith(body.strip()) or "```tool_call".startswith(body.strip())
    if len(body) > _LONGEST:
        return False
    first = _FIRST_MEMBER.match(body)
    if first is None:
        return True
    key, value = first.groups()
    return key in _KEYS and (key not in NAMES or value is None or value in tools)


def _describes_call(members: Mapping[str, Any]) -> bool:
    """A name, arguments, and nothing that would make it another kind of object."""
    function = members.get("function")
    if isinstance(function, dict):
        return set(members) <= _KEYS and _describes_call(function)
    return set(members) <= _KEYS and any(key in members for key in ARGUMENTS)
