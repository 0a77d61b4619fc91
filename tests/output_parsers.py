"""A small parser of outputs, and a model that is made to say a given text: the real parsers have tests of their own."""

from collections.abc import Sequence

import numpy as np

from everwarm.engine.processors import Bitmask, packed
from everwarm.events import Content, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart

ANSWER = '<think>hm, ä?</think>Let me see. <call>add {"a": 1, "b": [2]}</call> and <call>now {}</call>'
"""What `TagParser` reads as reasoning, text and two calls."""

CONTENT = [
    Reasoning("hm, ä?"),
    Text("Let me see. "),
    ToolCallStart(0, "call-0", "add"),
    ToolCallArguments(0, '{"a": 1, "b": [2]}'),
    ToolCallEnd(0),
    Text(" and "),
    ToolCallStart(1, "call-1", "now"),
    ToolCallArguments(1, "{}"),
    ToolCallEnd(1),
]


class TagParser:
    """`<think>...</think>` is reasoning, `<call>name arguments</call>` a call. `<|im_start|>` begins reasoning, too."""

    control_tokens = frozenset({"<|im_start|>"})

    def __init__(self) -> None:
        self._inside = ""  # `think`, `call`, or nothing
        self._held = ""  # may become a tag
        self._name: str | None = None  # of the call, as far as it is known; None once it has begun
        self._calls = 0

    def feed(self, text: str) -> Sequence[Content]:
        self._held += text
        found: list[Content] = []
        while (tag := self._next_tag()) is not None:
            before, _, self._held = self._held.partition(tag)
            found += [*self._part(before), *self._leave()]
            self._inside = "" if tag.startswith("</") else tag[1:-1]
            self._name = "" if tag == "<call>" else None
        settled = len(self._held) - self._undecided()
        found += self._part(self._held[:settled])
        self._held = self._held[settled:]
        return found

    def control(self, name: str) -> Sequence[Content]:
        self._inside = "think"
        return ()

    def finish(self) -> Sequence[Content]:
        held, self._held = self._held, ""
        return [*self._part(held), *([Text("<call>" + self._name)] if self._name is not None else [])]

    def _leave(self) -> list[Content]:
        if self._inside != "call":
            return []
        if self._name is not None:  # it has no arguments: no call
            return [Text(f"<call>{self._name}</call>")]
        self._calls += 1
        return [ToolCallEnd(self._calls - 1)]

    def _part(self, text: str) -> list[Content]:
        if not text:
            return []
        if self._inside != "call":
            return [Reasoning(text) if self._inside else Text(text)]
        if self._name is None:
            return [ToolCallArguments(self._calls, text)]
        name, space, arguments = (self._name + text).partition(" ")
        self._name = None if space else name
        return [ToolCallStart(self._calls, f"call-{self._calls}", name), *self._part(arguments)] if space else []

    def _tags(self) -> list[str]:
        return [f"</{self._inside}>"] if self._inside else ["<think>", "<call>"]

    def _next_tag(self) -> str | None:
        found = [(self._held.find(tag), tag) for tag in self._tags() if tag in self._held]
        return min(found)[1] if found else None

    def _undecided(self) -> int:
        """Characters at the end that may become a tag."""
        lengths = range(1, min(len(self._held), 8) + 1)
        return max((n for n in lengths if any(tag.startswith(self._held[-n:]) for tag in self._tags())), default=0)


def joined(content: Sequence[Content]) -> list[Content]:
    """Neighbouring pieces of the same kind as one."""
    out: list[Content] = []
    for part in content:
        last = out[-1] if out else None
        if isinstance(part, Text | Reasoning) and type(part) is type(last):
            out[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        elif isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments):
            out[-1] = ToolCallArguments(part.index, last.text + part.text)
        else:
            out.append(part)
    return out


class Says:
    """A constraint: these tokens, in this order."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self._ids, self._vocab_size, self._at = ids, vocab_size, 0

    def mask(self) -> Bitmask:
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[self._ids[min(self._at, len(self._ids) - 1)]] = True
        return packed(allowed)

    def advance(self, token: int) -> None:
        self._at += 1

    def rollback(self, count: int) -> None:
        self._at -= count
