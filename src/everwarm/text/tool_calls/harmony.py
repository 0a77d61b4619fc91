"""gpt-oss: every message of an answer has a header that says what it is.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.add
    <|constrain|>json<|message|>{"a": 1}<|call|>

The analysis channel is reasoning, a recipient makes a call, all else is text. An answer without headers is text. Words
in a header that say nothing of this are text, too, before the message.
"""

import re
from collections.abc import Callable

from everwarm.events import Reasoning
from everwarm.text.tool_calls.reader import CallReader, Cut, NotACall, Reading

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"to=([^\s<\ud800-\udfff]+)")


class Harmony(CallReader):
    """Reasoning, text and calls: it needs no other parser for reasoning."""

    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", *_ENDS)
    openers = ("<|message|>",)

    def _read(self) -> Reading[None]:
        """The whole answer, message by message."""
        try:
            while (yield from self.peek()):
                try:
                    yield from self.calls()
                except NotACall:
                    yield from self._plain_text()
        except Cut:
            self._at = 0
            (self.argue if self._open else self.say)(self._text)

    def calls(self) -> Reading[None]:
        """One message."""
        header = yield from self.until("<|message|>", *_ENDS, most=_LONGEST_HEADER)
        yield from self.expect("<|message|>")
        recipient = _RECIPIENT.search(header)
        channel = re.search(re.escape(self.mark("<|channel|>")) + r"\s*(\w+)", header)
        if recipient is not None and recipient[1] != "assistant" and self.tools:
            name = recipient[1].removeprefix("functions.")
            self.check_name(name)
            self.say(self._other_words(header))
            self.start(name)
            yield from self._body(self.argue)
            self.end()
        elif channel is not None:
            self.say(self._other_words(header))
            self.settle()
            yield from self._body(self._think if channel[1] == "analysis" else self.say)
            self.settle()
        else:
            raise NotACall

    def _other_words(self, header: str) -> str:
        """What is left of a header without its role, channel, recipient and kind of content."""
        start, channel, constrain = (
            re.escape(self.mark(name)) for name in ("<|start|>", "<|channel|>", "<|constrain|>")
        )
        known = rf"{start}\s*(?:assistant)?|{channel}\s*\w+|{_RECIPIENT.pattern}|{constrain}\s*\w*|\b(?:json|code)\s*$"
        return re.sub(known, "", header).strip()

    def _body(self, pass_on: Callable[[str], None]) -> Reading[None]:
        """Up to the end of the message, or to the header of the next one."""
        yield from self.until(*_ENDS, "<|start|>", "<|channel|>", pass_on=pass_on)
        for end in _ENDS:
            if (yield from self.follows(end)):
                return

    def _plain_text(self) -> Reading[None]:
        """What is no message, up to where one may begin."""
        self._at = 1
        self.say(self._text[:1])
        self.settle()
        yield from self.until("<|start|>", "<|channel|>", pass_on=self.say)

    def _think(self, text: str) -> None:
        if text:
            self._found.append(Reasoning(self._spelt(text)))
