"""Apertus: `<|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]<|tools_suffix|>`. The key of each object is the name."""

from everwarm.text.tool_calls.json_objects import JsonObjects
from everwarm.text.tool_calls.json_reader import decoded
from everwarm.text.tool_calls.reader import NotACall, Reading


class Apertus(JsonObjects):
    marks = ("<|tools_prefix|>", "<|tools_suffix|>")
    openers, closer = ("<|tools_prefix|>",), "<|tools_suffix|>"

    def call_object(self, *ends: str, inner: bool = False) -> Reading[None]:
        yield from self.expect("{")
        yield from self.spaces()
        name = decoded((yield from self.collected()))
        yield from self.spaces()
        yield from self.expect(":")
        if (yield from self.spaces()) != "{" or not isinstance(name, str):
            raise NotACall
        self.start(name)
        yield from self.stream_object(*ends)
        if (yield from self.spaces()) == "}":
            self._at += 1
