"""What a generation tells its reader: one `Event` per token, then `End`; or `Failed`, instead of the rest.

An event carries typed content: text, reasoning, or a piece of a tool call. The engine's thread makes events and puts
them into the queue of a request; whoever reads that queue (an iterator, a server's event loop) sees them in this order:

    Event* (End | Failed)          of each choice; events of several choices may alternate

Within one choice content comes in the order of the answer, and a tool call is whole before anything else follows it:
`ToolCallStart`, any number of `ToolCallArguments`, `ToolCallEnd`. Reasoning ends where other content begins. An answer
that is cut off, by the limit of tokens or by the model itself, may end inside a tool call.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from everwarm.kv.receipt import Receipt

FinishReason = Literal["stop", "length", "tool_calls"]
"""An end token or a stop string; the limit of tokens; an end token after at least one tool call."""


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer itself. Whole characters, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers. Whole characters, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model begins to call a tool."""

    index: int  # the calls of an answer count from 0
    id: str
    name: str
    format: str = field(default="", compare=False)  # how it was written: `hermes`, `llama3`, ..., `lenient`


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the arguments of a call. All pieces together are JSON, unless the tool takes free text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete."""

    index: int


Content = Text | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class Event:
    """One generated token, and the content that became certain with it.

    Content may lag behind the tokens: half a character, or what may become a stop string or a tool call, is held back
    until it is settled. So an event may have no content, or that of earlier tokens too.
    """

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most likely first
    content: tuple[Content, ...] = ()
    finish_reason: FinishReason | None = None  # on the last event of a choice
    stop: str | None = None  # the stop string that ended the answer, if one did
    choice: int = 0  # which of the answers to one request

    @property
    def text(self) -> str:
        """The text of the answer in this event; without reasoning and tool calls."""
        return "".join([part.text for part in self.content if isinstance(part, Text)])


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion
    drafted_tokens: int = 0  # computed ahead of the completion: see the receipt
    accepted_tokens: int = 0  # of these right


@dataclass(frozen=True, slots=True)
class End:
    """After the last event of a choice, when its turn is safe: why it ended, what it took, what was reused."""

    receipt: Receipt
    finish_reason: FinishReason
    usage: Usage
    stop: str | None = None
    sampling_s: float = 0.0
    choice: int = 0
    text: str = field(default="", init=False)  # so that a caller that only prints need not tell it from an event


@dataclass(frozen=True, slots=True)
class Failed:
    """A choice ended before its time: cancelled, or an error."""

    error: BaseException
    choice: int = 0


@dataclass(slots=True)
class ToolCall:
    """A call as far as it is known."""

    id: str
    name: str
    arguments: str = ""
    format: str = ""


class Answer:
    """Content, collected into one message of the assistant."""

    __slots__ = ("_pieces", "calls", "parts")

    def __init__(self) -> None:
        self.parts: list[type[Text] | type[Reasoning] | ToolCall] = []  # in the order of the answer
        self._pieces: list[list[str]] = []  # of each part, if it is a text
        self.calls: list[ToolCall] = []

    @property
    def text(self) -> str:
        return "".join(text for kind, text in self.texts() if kind is Text)

    @property
    def reasoning(self) -> str:
        return "".join(text for kind, text in self.texts() if kind is Reasoning)

    def texts(self) -> Iterator[tuple[type[Text] | type[Reasoning] | ToolCall, str]]:
        """Every part with its text; that of a call is empty."""
        for part, pieces in zip(self.parts, self._pieces, strict=True):
            yield part, "".join(pieces)

    def add(self, content: Iterable[Content]) -> None:
        for part in content:
            match part:
                case Text() | Reasoning():
                    if not self.parts or self.parts[-1] is not type(part):
                        self._begin(type(part))
                    self._pieces[-1].append(part.text)
                case ToolCallStart():
                    self.calls.append(ToolCall(part.id, part.name, format=part.format))
                    self._begin(self.calls[-1])
                case ToolCallArguments():
                    self.calls[part.index].arguments += part.text
                case ToolCallEnd():
                    pass

    def _begin(self, part: type[Text] | type[Reasoning] | ToolCall) -> None:
        self.parts.append(part)
        self._pieces.append([])

    def message(self) -> dict[str, Any]:
        """As chat templates and OpenAI's clients read it. Only what the answer has is in it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if reasoning := self.reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message
