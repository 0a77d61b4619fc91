"""What all parsers of tool calls share: reading a text that is still coming in, and giving out what is certain.

A format is a generator, `calls`, which reads from the place where a call seems to begin. It waits where the text ends
so far, and goes on when more has come: so it does not matter where the text is cut. It raises `NotACall` for what is
none; then all that it has read since the last `settle` comes back as text. Once a call has been started, it can't be
taken back: what follows up to its end mark are its arguments, even if they are no JSON.

White space next to a call belongs to how the call is written and is no text of the answer.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from everwarm.events import Content, Text, ToolCallArguments, ToolCallEnd, ToolCallStart

T = TypeVar("T")
Reading = Generator[None, None, T]
Tools = Mapping[str, Mapping[str, Any]]
"""The tools that are offered: the JSON schemas of their arguments, by name."""

MOST_REFUSED = 64
"""So often what looks like a call may turn out to be none; then the rest of the answer is text. Bounds the time."""
LONGEST_NAME = 256
_FIRST_STAND_IN = 0xDC00
_STAND_IN = re.compile("[\udc00-\udcff]")
_NAME = re.compile(rf"[\w.:/@$-]{{1,{LONGEST_NAME}}}")
"""Of a tool that was not offered: whoever executes calls is better at saying so than a parser."""
_HALF = re.compile("[\ud800-\udfff]")
_SPACES = re.compile(r"\s+")


class NotACall(Exception):  # noqa: N818 - no fault: it is text
    """What looked like a call is none."""


class Cut(Exception):  # noqa: N818 - no fault: answers may end anywhere
    """The answer has ended inside a call."""


class CallReader(ABC):
    """An `OutputParser` that finds calls of one format; all else is text.

    Control tokens are single characters in the text that formats see (`mark`): surrogates, which no text has. So a mark
    that is a control token of the vocabulary is never mistaken for text that spells it, nor the other way round.
    """

    marks: ClassVar[tuple[str, ...]]  # all that may be control tokens
    openers: ClassVar[tuple[str, ...]]  # marks with which calls begin

    def __init__(self, name: str, tools: Tools, controls: frozenset[str], new_id: Callable[[], str]) -> None:
        """`name` of the format; `controls` are the control tokens of the vocabulary."""
        self.control_tokens = frozenset(self.marks) & controls
        self.tools = tools
        self._name = name
        self._new_id = new_id
        stand_ins = {mark: chr(_FIRST_STAND_IN + number) for number, mark in enumerate(self.marks)}
        self._stand_in = {mark: stand_ins[mark] for mark in self.control_tokens}
        self._spelling = {character: mark for mark, character in self._stand_in.items()}
        self._openers = [self.mark(opener) for opener in self.openers]
        self._opener = re.compile("|".join(map(re.escape, self._openers)))
        self._text = ""  # what has come and is not settled
        self._at = 0  # so far it has been read
        self._settled = 0  # how often something was settled
        self._ended = False
        self._found: list[Content] = []
        self._calls = 0
        self._open = False  # a call was started and has not ended
        self._complete = False  # its arguments are complete
        self._after_call = False  # nothing but white space has come since the last call
        self._said = False  # the answer has text
        self._refused = 0
        self._begun = False  # of what was refused last, a part was settled
        self._reading = self._read()

    # An OutputParser --------------------------------------------------------------------------------------------------

    def feed(self, text: str) -> Sequence[Content]:
        return self._advance(text)

    def control(self, name: str) -> Sequence[Content]:
        return self._advance(self._stand_in[name])

    def finish(self) -> Sequence[Content]:
        self._ended = True
        return self._advance("")

    def _advance(self, text: str) -> Sequence[Content]:
        self._text += text
        next(self._reading, None)
        found, self._found = self._found, []
        return found

    # What formats implement -------------------------------------------------------------------------------------------

    @abstractmethod
    def calls(self) -> Reading[None]:
        """Read one call, or several that belong together. An opener comes next."""

    def may_open(self) -> bool:
        """Whether the opener that comes next may begin a call."""
        return True

    # What formats read with -------------------------------------------------------------------------------------------

    def mark(self, name: str) -> str:
        """A mark as it comes in the text."""
        return self._stand_in.get(name, name)

    def peek(self) -> Reading[str]:
        """The next character; nothing at the end of the answer."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, pattern: re.Pattern[str]) -> str:
        """As much as matches of what has come; more of it may come later."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def spaces(self) -> Reading[str]:
        """Skip white space; the character after it."""
        while (character := (yield from self.peek())).isspace():
            self.take(_SPACES)
        return character

    def follows(self, mark: str) -> Reading[bool]:
        """Whether this comes next; if so, it is read."""
        mark = self.mark(mark)
        while True:
            here = self._text[self._at : self._at + len(mark)]
            if here == mark:
                self._at += len(mark)
                return True
            if self._ended or not mark.startswith(here):
                return False
            yield

    def expect(self, *marks: str) -> Reading[str]:
        """One of these comes next; which."""
        for mark in marks:
            if (yield from self.follows(mark)):
                return mark
        raise NotACall

    def until(self, *marks: str, most: int | None = None, pass_on: Callable[[str], None] | None = None) -> Reading[str]:
        """The text before the first of the marks, which is not read. With `pass_on` it is passed on as it comes, and
        settled. Raises `Cut` where the answer ends before.
        """
        spelt = [self.mark(mark) for mark in marks]
        pattern = re.compile("|".join(map(re.escape, spelt)))
        begin = scanned = self._at
        while True:
            found = pattern.search(self._text, scanned)
            if found is not None:
                scanned = found.start()
            else:
                scanned = len(self._text) if self._ended else max(scanned, len(self._text) - max(map(len, spelt)) + 1)
            if most is not None and scanned - begin > most:
                raise NotACall
            text = self._text[begin:scanned]
            self._at = scanned
            if pass_on is not None:
                self.settle()
                begin = scanned = 0
                pass_on(text)
            if found is not None:
                return text
            if self._ended:
                raise Cut
            yield

    def name(self, *marks: str) -> Reading[str]:
        """The name of a tool, before one of the marks."""
        return (yield from self.until(*marks, most=2 * LONGEST_NAME)).strip()

    # What formats tell ------------------------------------------------------------------------------------------------

    @property
    def said_nothing(self) -> bool:
        """Whether the answer has neither text nor calls so far."""
        return not self._said and not self._calls

    def settle(self) -> None:
        """What has been read will not come back as text."""
        self._text = self._text[self._at :]
        self._at = 0
        self._settled += 1

    def check_name(self, name: str) -> None:
        """Raises `NotACall` if no tool can have this name."""
        if not _NAME.fullmatch(name) and (name not in self.tools or _HALF.search(name)):
            raise NotACall

    def start(self, name: str) -> None:
        """A call begins. From now on it is one, whatever follows."""
        self.check_name(name)
        self._found.append(ToolCallStart(self._calls, self._new_id(), name, self._name))
        self._open, self._complete = True, False
        self.settle()

    def argue(self, text: str) -> None:
        """The next piece of its arguments."""
        if not text:
            return
        text, last = self._spelt(text), self._found[-1] if self._found else None
        if isinstance(last, ToolCallArguments):
            self._found[-1] = ToolCallArguments(self._calls, last.text + text)
        else:
            self._found.append(ToolCallArguments(self._calls, text))

    def argue_whole(self, text: str) -> None:
        """All of its arguments, or what is left of them."""
        self.argue(text)
        self._complete = True

    def end(self) -> None:
        """The call has ended."""
        self._found.append(ToolCallEnd(self._calls))
        self._calls += 1
        self._open, self._after_call = False, True
        self.settle()

    def say(self, text: str) -> None:
        """Text of the answer."""
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._said = self._said or not text.isspace()
            self._found.append(Text(self._spelt(text)))

    # Text and calls ---------------------------------------------------------------------------------------------------

    def _read(self) -> Reading[None]:
        """The whole answer."""
        tried = 0  # the opener before this place was tried and begins no call
        while True:
            opener = self._opener.search(self._text, tried) if self._refused < MOST_REFUSED else None
            if opener is not None:
                spaces = self._say_before(opener.start(), tried)
                self._at = spaces
                if (yield from self._call()):
                    tried = 0
                    continue
                if self._open:  # cut off inside its arguments
                    self.argue(self._text)
                    return
                tried = 0 if self._begun else spaces + len(opener[0])
                continue
            certain = len(self._text) if self._ended else self._undecided(tried)
            if certain:
                self.say(self._text[:certain])
                self._at = certain
                self.settle()
                tried = max(0, tried - certain)
            if self._ended:
                return
            yield

    def _say_before(self, at: int, certain: int) -> int:
        """Text before an opener; how much white space is between them, which is undecided."""
        kept = max(certain, len(self._text[:at].rstrip()))
        self.say(self._text[:kept])
        self._at = kept
        self.settle()
        return at - kept

    def _call(self) -> Reading[bool]:
        """Whether what comes next are calls."""
        settled = self._settled
        try:
            if not self.may_open():
                raise NotACall
            yield from self.calls()
        except (NotACall, Cut):
            self._at = 0
            self._refused += 1
            self._begun = self._settled > settled
            if self._open and (self._complete or not self._ended):
                self.end()
            return False
        self.settle()
        return True

    def _undecided(self, begin: int) -> int:
        """Where what may become an opener begins, with the white space before it."""
        text, longest = self._text, max(map(len, self._openers))
        at = len(text)
        for start in range(max(begin, len(text) - longest + 1), len(text)):
            if any(opener.startswith(text[start:]) for opener in self._openers):
                at = start
                break
        return max(begin, len(text[:at].rstrip()))

    def _spelt(self, text: str) -> str:
        return _STAND_IN.sub(lambda found: self._spelling[found[0]], text) if self._spelling else text
