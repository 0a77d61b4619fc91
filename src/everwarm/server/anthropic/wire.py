"""Answers as Anthropic writes them, streamed or whole.

Content is a list of blocks: text, thinking, tool_use. A block is open until content of another kind begins.

Usage divides the prompt as the receipt does: `cache_read_input_tokens` were known, `cache_creation_input_tokens` were
computed now and are kept for the next turn, `input_tokens` are neither (all of them where nothing is kept).
"""

import json
import uuid

from everwarm.events import (
    Content,
    End,
    Event,
    FinishReason,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from everwarm.server.errors import ApiError, body
from everwarm.server.wire import Json, ServerEvent, ServerEvents

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
           "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip
"""By the type of a block: the type of its deltas, and the field that holds what is new."""


class MessageWire:
    """One message."""

    wants_progress = False

    def __init__(self, model: str, max_tokens: int, *, kept: bool) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._kept = kept
        self._blocks: list[Json] = []
        self._pieces: list[str] = []  # of the last block
        self._open = False  # the last block may still grow
        self._begun = False
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def waiting(self) -> ServerEvent | None:
        """A comment before the message begins: its first event must be the start."""
        return ServerEvent({"type": "ping"}, "ping") if self._begun else None

    def begin(self, usage: Usage) -> ServerEvents:
        self._begun = True
        message: Json = self._head | {"content": []} | self._stop | {"usage": self._usage(usage)}
        return [_event("message_start", message=message)]

    def progress(self, report: Json) -> ServerEvents:
        return []

    def add(self, event: Event | End) -> ServerEvents:
        if isinstance(event, End):
            self._stop = self._why(event)
            return self._close_block()
        return [written for part in event.content for written in self._add(part)]

    def end(self, usage: Usage, receipt: Json | None) -> ServerEvents:
        more = {"everwarm": receipt} if receipt else {}
        return [_event("message_delta", delta=self._stop, usage=self._usage(usage), **more), _event("message_stop")]

    def error(self, error: ApiError) -> ServerEvents:
        return [ServerEvent(body(error, "/v1/messages"), "error")]

    def whole(self, usage: Usage, receipt: Json | None) -> Json:
        more = {"everwarm": receipt} if receipt else {}
        return self._head | {"content": self._blocks} | self._stop | {"usage": self._usage(usage)} | more

    def _add(self, part: Content) -> ServerEvents:
        match part:
            case Text():
                return [*self._ensure("text", {"text": ""}), *self._delta(part.text)]
            case Reasoning():
                return [*self._ensure("thinking", {"thinking": "", "signature": ""}), *self._delta(part.text)]
            case ToolCallStart():
                return self._open_block("tool_use", {"id": part.id, "name": part.name, "input": {}})
            case ToolCallArguments():
                return self._delta(part.text)
            case ToolCallEnd():
                return self._close_block()

    def _ensure(self, kind: str, fields: Json) -> ServerEvents:
        """Go on in the last block if it is of this kind, else open one."""
        if self._open and self._blocks[-1]["type"] == kind:
            return []
        return self._open_block(kind, fields)

    def _open_block(self, kind: str, fields: Json) -> ServerEvents:
        closing = self._close_block()
        self._blocks.append({"type": kind} | fields)
        self._open = True
        start = _event("content_block_start", index=len(self._blocks) - 1, content_block={"type": kind} | fields)
        return [*closing, start, *([_event("ping")] if len(self._blocks) == 1 else [])]

    def _delta(self, text: str) -> ServerEvents:
        self._pieces.append(text)
        kind, name = _DELTAS[self._blocks[-1]["type"]]
        return [_event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})]

    def _close_block(self) -> ServerEvents:
        if not self._open:
            return []
        block, text = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        self._open = False
        self._pieces.clear()
        return [_event("content_block_stop", index=len(self._blocks) - 1)]

    def _why(self, end: End) -> Json:
        if end.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        reason = _STOP_REASONS[end.finish_reason]
        if end.finish_reason == "length" and end.usage.completion_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, usage: Usage) -> Json:
        computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "input_tokens": 0 if self._kept else computed,
            "cache_creation_input_tokens": computed if self._kept else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _input(arguments: str) -> Json:
    """The arguments of a call, as an object. Text that is none, because it was cut off, is kept inside one."""
    try:
        parsed = json.loads(arguments or "{}", parse_constant=_refuse)
        if "\\u" in arguments:  # an escape may spell half a character, which can't be sent
            parsed = json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}


def _refuse(constant: str) -> None:
    """NaN and infinity are no JSON: clients could not read the answer."""
    raise ValueError(constant)


def _event(kind: str, **fields: object) -> ServerEvent:
    return ServerEvent({"type": kind} | fields, kind)
