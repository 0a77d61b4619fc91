"""Reading JSON that is still coming in. Its end is found without waiting for the end mark, which may occur in texts."""

import json
import re
from collections.abc import Callable
from typing import Any

from everwarm.text.tool_calls.reader import CallReader, NotACall, Reading

NAMES = ("name", "function", "tool_name", "function_name", "tool")
"""Keys under which models write the name of a tool."""
ARGUMENTS = ("arguments", "parameters", "args", "params", "input")
"""Keys under which models write the arguments."""
_BESIDE = ("id", "type", "tool_call_id", "call_id", "index")
"""Keys that say nothing of a call's arguments."""
_MEMBERS = 16
"""Members of an object that describes a call, at most."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_RAW = re.compile(r"[\x00-\x1f]+")
_BETWEEN = re.compile(r"[-+.\w,:\s]+")
_SCALAR = re.compile(r"[-+.\w]+")
_ESCAPES = {character: "\\" + character for character in '"\\/bfnrtu'} | {"'": "'"}
"""What may follow a backslash. Before anything else a backslash can only mean itself."""
_HALF = re.compile("[\ud800-\udfff]")
_CLOSING = {"{": "}", "[": "]"}


class JsonReader(CallReader):
    """For formats whose calls hold JSON."""

    def string(self, pass_on: Callable[[str], None]) -> Reading[None]:
        """A text with its quotes. Line breaks and the like in it are escaped: that is what they can only mean."""
        yield from self.expect('"')
        pass_on('"')
        while character := (yield from self.peek()):
            if character == '"':
                self._at += 1
                pass_on('"')
                return
            if character == "\\":
                self._at += 1
                escaped = yield from self.peek()
                if not escaped:
                    break
                pass_on(_ESCAPES.get(escaped, "\\\\"))
                self._at += escaped in _ESCAPES
            elif plain := self.take(_PLAIN):
                pass_on(plain)
            elif raw := self.take(_RAW):
                pass_on(json.dumps(raw)[1:-1])
            else:
                raise NotACall
        raise NotACall

    def value(self, pass_on: Callable[[str], None]) -> Reading[None]:
        """One value. Raises `NotACall` where it is none, after what it could read was passed on."""
        open_: list[str] = []
        while character := (yield from self.peek()):
            if character == '"':
                yield from self.string(pass_on)
            elif character in _CLOSING:
                self._at += 1
                open_.append(_CLOSING[character])
                pass_on(character)
            elif open_ and character == open_[-1]:
                self._at += 1
                open_.pop()
                pass_on(character)
            elif open_ and (between := self.take(_BETWEEN)):
                pass_on(between)
            elif not open_ and (yield from self._scalar(pass_on)):
                return
            else:
                raise NotACall
            if not open_:
                return
        raise NotACall

    def _scalar(self, pass_on: Callable[[str], None]) -> Reading[bool]:
        """A number or a word: it ends where something else comes."""
        found = False
        while (yield from self.peek()) and (some := self.take(_SCALAR)):
            pass_on(some)
            found = True
        return found

    def collected(self) -> Reading[str]:
        """One value, whole."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    def stream_object(self, *ends: str) -> Reading[None]:
        """An object as the arguments of a call that was started, as it comes. If it breaks, all up to one of the end
        marks are the arguments.
        """
        try:
            yield from self.value(self._pass_on)
        except NotACall:
            if not ends or not (yield from self.peek()):
                raise
            yield from self.until(*ends, pass_on=self.argue)
        self.argue_whole("")

    def _pass_on(self, text: str) -> None:
        self.argue(text)
        self.settle()

    def call_object(self, *ends: str, inner: bool = False) -> Reading[None]:
        """An object that describes a call: a name, arguments, other members that don't matter. Starts the call; who
        asks ends it. `inner`: it is the `function` of another one.
        """
        yield from self.expect("{")
        name: str | None = None
        held: str | None = None  # arguments that came before the name
        odd = False  # there are members that say something else
        for _ in range(_MEMBERS):
            if (yield from self.spaces()) == ",":
                self._at += 1
                yield from self.spaces()
            if (yield from self.follows("}")):
                break
            if self._open:  # its arguments are complete: what is odd after them is no part of the call
                self.settle()
                if (yield from self.peek()) != '"':
                    return
            key = decoded((yield from self.collected()))
            if self._open and key not in _BESIDE and key not in NAMES:
                self._at = 0
                return
            yield from self.spaces()
            yield from self.expect(":")
            first = yield from self.spaces()
            if key in NAMES and first == '"' and name is None:
                name = decoded((yield from self.collected()))
                if held is not None and isinstance(name, str):
                    self.start(name)
                    self.argue_whole(held)
            elif key == "function" and first == "{" and name is None and not inner:
                yield from self.call_object(*ends, inner=True)
                name = ""
            elif key in ARGUMENTS and held is None:
                if first == "{" and isinstance(name, str):
                    self.start(name)
                    yield from self.stream_object(*ends)
                    held = ""
                else:
                    held = as_object((yield from self.collected()))
                    if isinstance(name, str):
                        self.start(name)
                        self.argue_whole(held)
            else:
                yield from self.collected()
                odd = odd or key not in _BESIDE
        if not isinstance(name, str):
            raise NotACall
        if held is None and not self._open:
            if odd:  # perhaps they are the arguments, under another name
                raise NotACall
            self.start(name)
            self.argue_whole("{}")


def well_formed(text: str) -> str:
    """Without halves of characters, which an escape in JSON may spell: no answer could be sent with them."""
    return _HALF.sub("\ufffd", text)


def decoded(text: str) -> Any:
    """A JSON value. Raises `NotACall`."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotACall from None


def as_object(text: str) -> str:
    """Arguments that came whole: an object; a text that holds one, as some models write it; or none at all."""
    value = decoded(text)
    if isinstance(value, dict):
        return text
    if isinstance(value, str):
        return well_formed(value) if isinstance(decoded(value), dict) else _no_object()
    return "{}" if value is None else _no_object()


def _no_object() -> str:
    raise NotACall


def _refuse(constant: str) -> None:
    raise ValueError(constant)
