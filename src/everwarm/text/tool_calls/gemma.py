"""Gemma 4 and FunctionGemma: `<|tool_call>call:add{a:1,b:<|"|>x<|"|>,c:{<|"|>d<|"|>:[true]}}<tool_call|>`.

Texts stand between quote marks of their own and have no escapes. Keys are bare or quoted.
"""

import json

from everwarm.text.tool_calls.json_reader import JsonReader, decoded, well_formed
from everwarm.text.tool_calls.reader import Cut, NotACall, Reading
from everwarm.text.tool_calls.typed import as_json

_DEEPEST = 64


class Gemma(JsonReader):
    marks = ("<|tool_call>", "<tool_call|>", '<|"|>')
    openers, closer, quote = ("<|tool_call>",), "<tool_call|>", '<|"|>'

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        yield from self.expect(*self.openers)
        yield from self.spaces()
        yield from self.expect("call:")
        name = yield from self.name("{", self.closer)
        self.start(name)
        if (yield from self.peek()) == "{":
            yield from self._object(0)
        else:
            self.argue("{}")
        self.argue_whole("")
        self.settle()
        yield from self.spaces()
        if not (yield from self.follows(self.closer)):
            self._at = 0
        self.end()

    def _object(self, depth: int) -> Reading[None]:
        self._at += 1
        before = "{"
        while True:
            next_ = yield from self.spaces()
            if next_ == "}":
                self._at += 1
                break
            key = yield from self._key()
            self.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._value(depth + 1)
            yield from self._comma("}")
        self.argue("{}" if before == "{" else "}")

    def _list(self, depth: int) -> Reading[None]:
        self._at += 1
        self.argue("[")
        comma = ""
        while (yield from self.spaces()) != "]":
            self.argue(comma)
            comma = ", "
            yield from self._value(depth + 1)
            yield from self._comma("]")
        self._at += 1
        self.argue("]")

    def _comma(self, end: str) -> Reading[None]:
        """Between members; settles what was read."""
        next_ = yield from self.spaces()
        if next_ == ",":
            self._at += 1
        elif next_ != end:
            raise NotACall if next_ else Cut
        self.settle()

    def _key(self) -> Reading[str]:
        if (yield from self.follows(self.quote)):
            key = yield from self.until(self.quote)
            yield from self.follows(self.quote)
            yield from self.spaces()
        elif (yield from self.peek()) == '"':
            key = well_formed(str(decoded((yield from self.collected()))))
            yield from self.spaces()
        else:
            key = (yield from self.until(":")).strip()
        yield from self.expect(":")
        return key

    def _value(self, depth: int) -> Reading[None]:
        next_ = yield from self.spaces()
        if depth > _DEEPEST:
            raise NotACall
        if (yield from self.follows(self.quote)):
            self.argue('"')
            yield from self.until(self.quote, pass_on=self._escaped)
            yield from self.follows(self.quote)
            self.argue('"')
        elif next_ == "{":
            yield from self._object(depth)
        elif next_ == "[":
            yield from self._list(depth)
        elif next_ == '"':
            self.argue((yield from self.collected()))
        else:
            self.argue(as_json((yield from self.until(",", "}", "]")).strip(), {}))

    def _escaped(self, text: str) -> None:
        self.argue(json.dumps(self._spelt(text), ensure_ascii=False)[1:-1])


class FunctionGemma(Gemma):
    marks = ("<start_function_call>", "<end_function_call>", "<escape>")
    openers, closer, quote = ("<start_function_call>",), "<end_function_call>", "<escape>"
