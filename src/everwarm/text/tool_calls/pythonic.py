r"""Calls as Python writes them.

    <|tool_call_start|>[add(a=1, b="x"), now()]<|tool_call_end|>        LFM2
    ```tool_code\nadd(a=1)\n```                                          Gemma 1 to 3, where a prompt asks for it

Each argument is passed on when it is whole. Values are Python's literals, or JSON's.
"""

import json
import re

from everwarm.text.tool_calls.json_objects import JsonObjects
from everwarm.text.tool_calls.json_reader import JsonReader, decoded
from everwarm.text.tool_calls.python_text import string_as_json, words_as_json
from everwarm.text.tool_calls.reader import LONGEST_NAME, Cut, NotACall, Reading

_IDENTIFIER = re.compile(r"[\w.]+")
_PLAIN = re.compile(r"[^\"'()\[\]{},]+")
_BRACKETS = {"(": "[]", "[": "[]", "{": "{}"}
"""What they are in JSON."""


class PythonReader(JsonReader):
    """For formats whose calls are Python."""

    def called(self, name: str) -> str:
        """The tool that a function stands for."""
        return name

    def python_call(self) -> Reading[None]:
        """`name(...)`. Starts the call; who asks ends it."""
        name = yield from self._identifier()
        yield from self.spaces()
        yield from self.expect("(")
        name = self.called(name)
        self.start(name)
        properties = self.tools.get(name, {}).get("properties")
        keys = list(properties) if isinstance(properties, dict) else []
        before, number = "{", 0
        while True:
            next_ = yield from self.spaces()
            if next_ == "":
                raise Cut
            if next_ in ")]}":  # the last two: its own bracket was forgotten
                self._at += next_ == ")"
                break
            if next_ == ",":
                self._at += 1
                continue
            key, value = yield from self._argument()
            if not key:  # by position
                key = keys[number] if number < len(keys) else f"argument_{number}"
            self.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
            before, number = ", ", number + 1
            if (yield from self.spaces()) == ",":
                self._at += 1
            self.settle()
        self.argue_whole("{}" if before == "{" else "}")
        self.settle()

    def _identifier(self) -> Reading[str]:
        name = ""
        while (yield from self.peek()) and (some := self.take(_IDENTIFIER)):
            name += some
            if len(name) > LONGEST_NAME:
                raise NotACall
        return name

    def _argument(self) -> Reading[tuple[str, str]]:
        """Its key, if it has one, and its value as JSON."""
        word = yield from self._identifier()
        if word and (yield from self.spaces()) == "=":
            self._at += 1
            key, word = word, ""
        else:
            key = ""
        value = (yield from self._python_value(word)).strip()
        try:
            decoded(value)
        except NotACall:
            value = json.dumps(value, ensure_ascii=False)
        return key, value

    def _python_value(self, begun: str) -> Reading[str]:
        """As JSON, up to a comma or the end of the call. The word that it begins with may have been read."""
        pieces: list[str] = []
        plain: list[str] = [begun]  # since the last piece
        open_: list[str] = []
        while character := (yield from self.peek()):
            if found := self.take(_PLAIN):
                plain.append(found)
                continue
            if not open_ and character in ",)]}":
                break
            pieces.append(words_as_json("".join(plain)))
            plain.clear()
            if character in "\"'":
                pieces.append((yield from self._python_string(character)))
                continue
            self._at += 1
            if character in _BRACKETS:
                open_.append(_BRACKETS[character][1])
                pieces.append(_BRACKETS[character][0])
            else:
                pieces.append(open_.pop() if character != "," else ",")
        if not character:
            raise Cut
        return "".join([*pieces, words_as_json("".join(plain))])

    def _python_string(self, quote: str) -> Reading[str]:
        """As JSON."""
        quote = quote * 3 if (yield from self.follows(quote * 3)) else (yield from self.expect(quote))
        raw = ""
        while True:
            raw += yield from self.until(quote, "\\")
            if (yield from self.follows(quote)):
                return string_as_json(raw)
            self._at += 1
            raw += "\\" + (yield from self.peek())
            self._at += self._at < len(self._text)


class Lfm2(PythonReader, JsonObjects):
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    openers, closer = ("<|tool_call_start|>",), "<|tool_call_end|>"

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        yield from self.expect(*self.openers)
        at = self._at
        if (yield from self.spaces()) == "[":
            self._at += 1
        if (yield from self.spaces()) == "{":  # a prompt may ask for JSON
            self._at = at
            yield from self.objects(self.closer)
            return
        while True:
            yield from self.python_call()
            if (yield from self.spaces()) != ",":
                break
            self.end()
            self._at += 1
            yield from self.spaces()
        if (yield from self.spaces()) == "]":
            self._at += 1
        self.settle()
        yield from self.close(self.closer)


class ToolCode(PythonReader):
    marks = ()
    openers = ("```tool_code\n",)

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        yield from self.expect(*self.openers)
        yield from self.spaces()
        while True:
            yield from self.python_call()
            next_ = yield from self.spaces()
            if (yield from self.follows("```")):
                self.end()
                return
            self.end()
            if not next_:
                return
            if next_ == ";":
                self._at += 1
                yield from self.spaces()

    def start(self, name: str) -> None:
        if name not in self.tools:  # any code may stand in a fence
            raise NotACall
        super().start(name)
