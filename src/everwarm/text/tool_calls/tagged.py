"""Calls whose arguments stand between tags, one by one.

    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>                       Qwen3-Coder, 3.5
    <seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>             Seed-OSS
    <minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>
    <｜DSML｜function_calls><｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="false">1</｜DSML｜...
    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>                           GLM

A text is passed on as it comes if the tool's schema says that it can be nothing else.
"""

import json
from typing import Any

from everwarm.text.tool_calls.reader import CallReader, Cut, NotACall, Reading
from everwarm.text.tool_calls.typed import as_json, kinds, only_text


class Tagged(CallReader):
    """Marks of one format. The outer pair may hold several calls; each call and each argument has a pair of its own."""

    outer: tuple[str, str] | None
    call: tuple[str, str]
    after_name: str
    argument: tuple[str, str]
    after_key: str
    one_line_break = False  # one line break after `after_key` and one before the end belong to the tags

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        inside = self.outer is not None and (yield from self.follows(self.outer[0]))
        yield from self.spaces()
        yield from self.expect(self.call[0])
        while True:
            yield from self.one_call()
            yield from self.spaces()
            if self.outer is not None and (yield from self.follows(self.outer[1])):
                self.end()
                return
            self._at = 0
            self.end()
            yield from self.spaces()
            if not inside or not (yield from self.follows(self.call[0])):
                break
        self._at = 0

    def one_call(self) -> Reading[None]:
        """Behind the mark that begins a call. Who asks ends it."""
        name = yield from self.name(*self.name_ends())
        yield from self.follows(self.after_name)
        self.start(name)
        yield from self.arguments(name)

    def name_ends(self) -> tuple[str, ...]:
        return (self.after_name,)

    def arguments(self, name: str) -> Reading[None]:
        """All arguments, and the mark that ends the call, if it is there."""
        properties = self.tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        before = "{"
        while True:
            yield from self.spaces()
            if not (yield from self.follows(self.argument[0])):
                break
            try:
                key = (yield from self.until(self.after_key, most=1024)).strip()
                yield from self.expect(self.after_key)
                self.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            except NotACall:
                break
            self.settle()
            yield from self.value(schemas.get(key))
            before = ", "
        self._at = 0
        yield from self.spaces()
        closed = yield from self.follows(self.call[1])
        rest = self._text[self._at :]
        if not closed and self._ended and any(self.mark(m).startswith(rest) for m in (self.argument[0], self.call[1])):
            raise Cut  # more arguments may have been meant to follow
        self.argue_whole("{}" if before == "{" else "}")
        if closed:
            self.settle()
        self._at = 0

    def value(self, schema: Any) -> Reading[None]:
        """Up to the mark that ends it."""
        if self.one_line_break:
            yield from self.follows("\n")
        end = self.argument[1]
        if not only_text(schema):
            text = yield from self.until(end)
            self.argue(as_json(self._spelt(text.removesuffix("\n") if self.one_line_break else text), schema))
        else:
            self.argue('"')
            yield from self.until(*(("\n" + end, end) if self.one_line_break else (end,)), pass_on=self._escaped)
            self.argue('"')
            if self.one_line_break:
                yield from self.follows("\n")
        yield from self.follows(end)
        self.settle()

    def _escaped(self, text: str) -> None:
        self.argue(json.dumps(self._spelt(text), ensure_ascii=False)[1:-1])


class Qwen3Coder(Tagged):
    marks = ("<tool_call>", "</tool_call>")
    openers = ("<tool_call>", "<function=")
    outer, call, after_name = ("<tool_call>", "</tool_call>"), ("<function=", "</function>"), ">"
    argument, after_key, one_line_break = ("<parameter=", "</parameter>"), ">", True


class Seed(Tagged):
    marks = ("<seed:tool_call>", "</seed:tool_call>")
    openers = ("<seed:tool_call>",)
    outer, call, after_name = ("<seed:tool_call>", "</seed:tool_call>"), ("<function=", "</function>"), ">"
    argument, after_key = ("<parameter=", "</parameter>"), ">"


class MiniMax(Tagged):
    marks = ("<minimax:tool_call>", "</minimax:tool_call>")
    openers = ("<minimax:tool_call>",)
    outer = ("<minimax:tool_call>", "</minimax:tool_call>")
    call, after_name = ('<invoke name="', "</invoke>"), '">'
    argument, after_key = ('<parameter name="', "</parameter>"), '">'


class DeepSeekV32(Tagged):
    """Each argument says whether it is a text; the schema knows better where it allows none."""

    marks = ()
    openers = ("<｜DSML｜function_calls>",)
    outer = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call, after_name = ('<｜DSML｜invoke name="', "</｜DSML｜invoke>"), '">'
    argument, after_key = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>"), '"'

    def value(self, schema: Any) -> Reading[None]:
        yield from self.spaces()
        if (yield from self.follows('string="true">')):
            allowed = kinds(schema)
            schema = schema if allowed and "string" not in allowed else {"type": "string"}
        elif (yield from self.follows('string="false">')):
            schema = {}
        else:
            yield from self.follows(">")
        yield from super().value(schema)


class Glm(Tagged):
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openers = ("<tool_call>",)
    outer, call, after_name = None, ("<tool_call>", "</tool_call>"), "\n"
    argument, after_key = ("<arg_key>", "</arg_value>"), "</arg_key>"

    def name_ends(self) -> tuple[str, ...]:
        return "\n", "<arg_key>", "</tool_call>"

    def value(self, schema: Any) -> Reading[None]:
        yield from self.spaces()
        yield from self.follows("<arg_value>")
        yield from super().value(schema)
