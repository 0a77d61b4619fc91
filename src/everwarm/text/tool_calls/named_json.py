r"""Calls with the name between marks and the arguments as a JSON object after it.

...begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>...  DeepSeek R1
...begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...                           DeepSeek V3.1
...begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>...
[TOOL_CALLS]add[ARGS]{"a": 1}   or   [TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}
[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
"""

import re

from everwarm.text.tool_calls.json_objects import JsonObjects
from everwarm.text.tool_calls.json_reader import JsonReader
from everwarm.text.tool_calls.reader import NotACall, Reading

_ID = re.compile(r"[\w-]{0,64}")
_NUMBERED = re.compile(r"^(?:functions\.)?(.*?)(?::\d+)?$", re.S)


class Section(JsonReader):
    """Calls inside a section, each between marks. A section whose own marks are missing is read as well."""

    section: str
    section_end: str
    call: str
    call_end: str

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        inside = yield from self.follows(self.section)
        yield from self.spaces()
        yield from self.expect(self.call)
        while True:
            yield from self.one_call()
            self.end()
            yield from self.spaces()
            if not (yield from self.follows(self.call)):
                break
        if inside and (yield from self.follows(self.section_end)):
            return
        self._at = 0

    def one_call(self) -> Reading[None]:
        """Behind the mark that begins a call."""
        raise NotImplementedError

    def close(self) -> Reading[None]:
        """The mark that ends a call, if it is there."""
        yield from self.spaces()
        if not (yield from self.follows(self.call_end)):
            self._at = 0

    def arguments(self) -> Reading[None]:
        """An object; or whatever is there."""
        if (yield from self.spaces()) == "{":
            yield from self.stream_object(self.call_end)
        else:
            self.argue_whole((yield from self.until(self.call_end)) or "{}")


class DeepSeek(Section):
    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    marks = (section, section_end, call, call_end, separator)
    openers = (section, call)

    def one_call(self) -> Reading[None]:
        """V3.1 writes the name before the separator, those before it write `function` there, and a fence."""
        name = yield from self.name(self.separator, self.call_end)
        yield from self.expect(self.separator)
        fenced = False
        if name == "function" and (yield from self.spaces()) != "{":
            name = yield from self.name("\n", "```", self.call_end)
            yield from self.spaces()
            fenced = yield from self.follows("```")
            if fenced:
                yield from self.follows("json")
        self.start(name)
        yield from self.arguments()
        if fenced:
            self.settle()
            yield from self.spaces()
            if not (yield from self.follows("```")):
                self._at = 0
        yield from self.close()


class Kimi(Section):
    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    marks = (section, section_end, call, call_end, separator)
    openers = (section, call)

    def one_call(self) -> Reading[None]:
        written = yield from self.name(self.separator, self.call_end)
        yield from self.expect(self.separator)
        found = _NUMBERED.match(written)
        self.start(found[1] if found else written)
        yield from self.arguments()
        yield from self.close()


class Mistral(JsonObjects):
    """Both forms: a list of objects, or a name with its arguments."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[/TOOL_CALLS]")
    openers = ("[TOOL_CALLS]",)
    closer = "[/TOOL_CALLS]"

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        yield from self.expect("[TOOL_CALLS]")
        if (yield from self.spaces()) in ("[", "{") and not (yield from self._at_mark()):
            yield from self.objects(self.closer)
            return
        name = yield from self.name("[ARGS]", "[CALL_ID]", "{")
        id_ = (yield from self.name("[ARGS]", "{")) if (yield from self.follows("[CALL_ID]")) else ""
        if not _ID.fullmatch(id_):
            raise NotACall
        yield from self.follows("[ARGS]")
        if (yield from self.spaces()) != "{":
            raise NotACall
        self.start(name)
        yield from self.stream_object()
        self.end()

    def _at_mark(self) -> Reading[bool]:
        """Whether a mark comes next that is written as text: it begins as a list does."""
        at = self._at
        for mark in self.marks:
            if (yield from self.follows(mark)):
                self._at = at
                return True
        return False
