"""Llama 3: the whole answer is `{"name": "add", "parameters": {"a": 1}}`, or several of these with `;` between them;
perhaps after `<|python_tag|>`. Built-in tools are called as Python: `<|python_tag|>brave_search.call(query="x")`.

Without the tag an object is a call only at the beginning of the answer, and only if it names an offered tool: it has no
mark that tells it from an answer in JSON.
"""

from everwarm.text.tool_calls.json_objects import JsonObjects
from everwarm.text.tool_calls.pythonic import PythonReader
from everwarm.text.tool_calls.reader import NotACall, Reading

TAG = "<|python_tag|>"


class Llama3(JsonObjects, PythonReader):
    marks = (TAG,)
    openers = (TAG, "{")

    _tagged = False

    def may_open(self) -> bool:
        return self.said_nothing or self._text.startswith(self.mark(TAG), self._at)

    def calls(self) -> Reading[None]:
        yield from self.spaces()
        self._tagged = yield from self.follows(TAG)
        if (yield from self.spaces()) != "{":
            yield from self.python_call()
            self.end()
            return
        while True:
            yield from self.call_object()
            self.settle()
            if (yield from self.spaces()) != ";":
                break
            self.end()
            self._at += 1
            if (yield from self.spaces()) != "{":
                return
        self._at = 0
        self.end()

    def called(self, name: str) -> str:
        name = name.removesuffix(".call")
        if name not in self.tools:  # the tag may stand before any code
            raise NotACall
        return name

    def start(self, name: str) -> None:
        if not self._tagged and name not in self.tools:
            raise NotACall
        super().start(name)
