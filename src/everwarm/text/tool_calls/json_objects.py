"""Calls as JSON objects that hold a name and arguments, between marks of their own.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>              Hermes, Qwen, Granite 4 and many others
    <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]                      Granite 3
    <tool_calls>[{"name": "add", "arguments": {"a": 1}, "id": "1"}]</tool_calls>
    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>
    function call<|role_sep|>{"name": "add", "arguments": {"a": 1}}

Each of them may hold one object or a list. Where the end mark is missing, the call ends with its object.
"""

from everwarm.text.tool_calls.json_reader import JsonReader
from everwarm.text.tool_calls.reader import NotACall, Reading


class JsonObjects(JsonReader):
    """Between an opening and a closing mark."""

    closer: str

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        yield from self.expect(*self.openers)
        yield from self.objects(self.closer)

    def objects(self, *closers: str) -> Reading[None]:
        """One object or a list of them, and the closing mark."""
        first = yield from self.spaces()
        listed = first == "["
        self._at += listed
        while True:
            if listed and (yield from self.spaces()) == "]":
                self._at += 1
                listed = False
                break
            yield from self.spaces()
            yield from self.call_object(*closers)
            separator = yield from self.spaces()
            if not (listed and separator == ","):
                break
            self.end()
            self._at += 1
        if not self._open:
            raise NotACall  # an empty list
        if listed and (yield from self.spaces()) == "]":
            self._at += 1
        self.settle()
        yield from self.close(*closers)

    def close(self, *closers: str) -> Reading[None]:
        """The call ends with its closing mark, if there is one."""
        yield from self.spaces()
        for closer in closers:
            if (yield from self.follows(closer)):
                break
        else:
            self._at = 0
        self.end()


class Hermes(JsonObjects):
    marks = ("<tool_call>", "</tool_call>")
    openers, closer = ("<tool_call>",), "</tool_call>"


class Granite(JsonObjects):
    marks = ("<|tool_call|>", "<|/tool_call|>")
    openers, closer = ("<|tool_call|>",), "<|/tool_call|>"


class Apriel(JsonObjects):
    marks = ("<tool_calls>", "</tool_calls>")
    openers, closer = ("<tool_calls>",), "</tool_calls>"


class CommandR(JsonObjects):
    marks = ("<|START_ACTION|>", "<|END_ACTION|>")
    openers, closer = ("<|START_ACTION|>",), "<|END_ACTION|>"


class GigaChat(JsonObjects):
    marks = ("<|role_sep|>", "<|message_sep|>")
    openers, closer = ("function call",), "<|message_sep|>"

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        yield from self.expect("function call")
        yield from self.expect("<|role_sep|>")
        yield from self.objects(self.closer)
