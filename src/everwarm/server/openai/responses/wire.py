"""Answers as the Responses API writes them: a stream of named events with a running number, or one object.

Items come one after the other: reasoning, text, calls. Each is added, filled and done before the next begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from everwarm.events import (
    Answer,
    Content,
    End,
    Event,
    FinishReason,
    Reasoning,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from everwarm.server.errors import ApiError
from everwarm.server.openai.responses import output
from everwarm.server.openai.responses.output import ItemIds
from everwarm.server.seals import Seals
from everwarm.server.wire import Json, ServerEvent, ServerEvents


class ResponsesWire:
    """One response."""

    wants_progress = False

    def __init__(self, head: Json, ids: ItemIds) -> None:
        """`head`: the response object as far as it is known before the answer."""
        self._head, self._ids = head, ids
        self._number = 0  # of the next event
        self._answer = Answer()
        self._items: list[Json] = []  # those that are done
        self._open: _Item | None = None
        self._finish: FinishReason | None = None

    def waiting(self) -> ServerEvent | None:
        return None

    def begin(self, usage: Usage) -> ServerEvents:
        started = self._head | {"status": "in_progress"}
        return [self._event("created", {"response": started}), self._event("in_progress", {"response": started})]

    def progress(self, report: Json) -> ServerEvents:
        return []

    def add(self, event: Event | End) -> ServerEvents:
        if isinstance(event, End):
            self._finish = event.finish_reason
            return []
        self._answer.add(event.content)
        return [written for part in event.content for written in self._part(part)]

    def end(self, usage: Usage, receipt: Json | None) -> ServerEvents:
        cut_off = self._finish == "length"
        events = list(self._close("incomplete" if cut_off else "completed"))
        if not self._items:  # an answer without any content is an empty text
            events += [*self._switch(_Message(self._ids.of("msg", 0))), *self._close("completed")]
        more = {"everwarm": receipt} if receipt else {}
        whole = output.ended(self._head, self._finish, self._items, usage) | more
        return [*events, self._event("incomplete" if cut_off else "completed", {"response": whole})]

    def error(self, error: ApiError) -> ServerEvents:
        told = {"code": error.code or "server_error", "message": str(error)}
        failed = self._head | {"status": "failed", "error": told, "output": self._items}
        return [self._event("failed", {"response": failed})]

    def whole(self, usage: Usage, receipt: Json | None) -> Json:
        items = output.output_items(self._ids, self._answer, cut_off=self._finish == "length")
        more = {"everwarm": receipt} if receipt else {}
        return output.ended(self._head, self._finish, items, usage) | more

    # Items ------------------------------------------------------------------------------------------------------------

    def _part(self, part: Content) -> Iterator[ServerEvent]:
        match part:
            case Reasoning():
                if not isinstance(self._open, _Thoughts):
                    yield from self._switch(_Thoughts(self._ids.of("rs", self._place), self._ids.seals))
            case Text():
                if not isinstance(self._open, _Message):
                    yield from self._switch(_Message(self._ids.of("msg", self._place)))
            case ToolCallStart():
                custom = part.name in self._ids.custom
                call = ToolCall(part.id, part.name)
                yield from self._switch(_Call(self._ids.of("fc", self._place), call, custom))
                return
            case ToolCallEnd():
                yield from self._close("completed")
                return
            case ToolCallArguments():
                pass
        assert self._open is not None
        for name, data in self._open.add(part.text):
            yield self._item_event(name, data)

    @property
    def _place(self) -> int:
        """Of the next item: one that is open will be done before."""
        return len(self._items) + (self._open is not None)

    def _switch(self, item: "_Item") -> Iterator[ServerEvent]:
        yield from self._close("completed")
        self._open = item
        yield self._event("output_item.added", {"output_index": len(self._items), "item": item.json("in_progress")})
        for name, data in item.begin():
            yield self._item_event(name, data)

    def _close(self, status: str) -> Iterator[ServerEvent]:
        if self._open is None:
            return
        item = self._open
        for name, data in item.end():
            yield self._item_event(name, data)
        done = item.json(status)
        yield self._event("output_item.done", {"output_index": len(self._items), "item": done})
        self._items.append(done)
        self._open = None

    def _item_event(self, name: str, data: Json) -> ServerEvent:
        assert self._open is not None
        return self._event(name, {"item_id": self._open.id, "output_index": len(self._items), **data})

    def _event(self, name: str, data: Json) -> ServerEvent:
        kind = f"response.{name}"
        numbered = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return ServerEvent(numbered, kind)


Named = Iterator[tuple[str, Json]]
"""Events of an item: a name, and what it says besides the item."""


class _Item(ABC):
    """An item that is being written."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._text = ""

    def begin(self) -> Named:
        yield from ()

    def add(self, text: str) -> Named:
        self._text += text
        yield from ()

    def end(self) -> Named:
        yield from ()

    @abstractmethod
    def json(self, status: str) -> Json:
        """The item as far as it is written."""


class _Message(_Item):
    """The text of the answer."""

    _begun = False

    def begin(self) -> Named:
        self._begun = True
        yield "content_part.added", {"content_index": 0, "part": output.text_part("")}

    def add(self, text: str) -> Named:
        self._text += text
        yield "output_text.delta", {"content_index": 0, "delta": text, "logprobs": []}

    def end(self) -> Named:
        yield "output_text.done", {"content_index": 0, "text": self._text, "logprobs": []}
        yield "content_part.done", {"content_index": 0, "part": output.text_part(self._text)}

    def json(self, status: str) -> Json:
        return output.message_item(self.id, self._text if self._begun else None, status)


class _Thoughts(_Item):
    """Reasoning."""

    def __init__(self, item_id: str, seals: Seals | None) -> None:
        super().__init__(item_id)
        self._seals = seals

    def begin(self) -> Named:
        yield "content_part.added", {"content_index": 0, "part": {"type": "reasoning_text", "text": ""}}

    def add(self, text: str) -> Named:
        self._text += text
        yield "reasoning_text.delta", {"content_index": 0, "delta": text}

    def end(self) -> Named:
        yield "reasoning_text.done", {"content_index": 0, "text": self._text}
        yield "content_part.done", {"content_index": 0, "part": {"type": "reasoning_text", "text": self._text}}

    def json(self, status: str) -> Json:
        return output.reasoning_item(self.id, self._text, status, self._seals if status != "in_progress" else None)


class _Call(_Item):
    """A tool call. The input of a tool that takes free text is known when the call is whole."""

    def __init__(self, item_id: str, call: ToolCall, custom: bool) -> None:
        super().__init__(item_id)
        self._call, self._custom = call, custom

    def add(self, text: str) -> Named:
        self._call.arguments += text
        if not self._custom:
            yield "function_call_arguments.delta", {"delta": text}

    def end(self) -> Named:
        if self._custom:
            given = output.free_text(self._call.arguments)
            yield "custom_tool_call_input.delta", {"delta": given}
            yield "custom_tool_call_input.done", {"input": given}
        else:
            yield "function_call_arguments.done", {"name": self._call.name, "arguments": self._call.arguments}

    def json(self, status: str) -> Json:
        return output.call_item(self.id, self._call, self._custom, status)
