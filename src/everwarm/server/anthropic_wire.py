"""Answers as Anthropic writes them, streamed or whole.

Usage divides the prompt as the receipt does: `cache_read_input_tokens` were known, `cache_creation_input_tokens` were
computed now and are kept for the next turn, `input_tokens` are neither (all of them where nothing is kept).
"""

import uuid
from typing import Any

from everwarm.llm import Event
from everwarm.server.answers import Answers
from everwarm.server.errors import ApiError, body
from everwarm.server.serving import Serving, receipt_json
from everwarm.server.stream import KEEP_ALIVE, sse

Json = dict[str, Any]


class MessageWire:
    """One message."""

    def __init__(self, serving: Serving, max_tokens: int, *, kept: bool) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": serving.name}
        self._max_tokens = max_tokens
        self._kept = kept
        self._text = ""
        self._tokens = 0
        self._begun = False
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def waiting(self) -> str:
        """A comment before the message begins: its first event must be the start."""
        return sse({"type": "ping"}, "ping") if self._begun else KEEP_ALIVE

    def begin(self, answers: Answers) -> str:
        self._begun = True
        message: Json = self._head | {"content": []} | self._stop | {"usage": self._usage(answers)}
        return _event("message_start", message=message)

    def token(self, number: int, event: Event) -> str:
        self._tokens += 1
        if event.finish_reason:
            self._stop = self._why(event)
        if not event.text:
            return ""
        opening = "" if self._text else self._open()
        self._text += event.text
        return opening + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": event.text})

    def end(self, answers: Answers) -> str:
        receipt = {"everwarm": receipt_json(answers.receipt)} if answers.receipt else {}
        return (
            (_event("content_block_stop", index=0) if self._text else "")
            + _event("message_delta", delta=self._stop, usage=self._usage(answers), **receipt)
            + _event("message_stop")
        )

    def error(self, error: ApiError) -> str:
        return sse(body(error, "/v1/messages"), "error")

    def whole(self, answers: Answers) -> Json:
        content = [{"type": "text", "text": self._text}] if self._text else []
        receipt = {"everwarm": receipt_json(answers.receipt)} if answers.receipt else {}
        return self._head | {"content": content} | self._stop | {"usage": self._usage(answers)} | receipt

    def _open(self) -> str:
        block = {"type": "text", "text": ""}
        return _event("content_block_start", index=0, content_block=block) + _event("ping")

    def _why(self, event: Event) -> Json:
        if event.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": event.stop}
        if event.finish_reason == "stop":
            return {"stop_reason": "end_turn", "stop_sequence": None}
        reached = self._tokens >= self._max_tokens
        return {"stop_reason": "max_tokens" if reached else "model_context_window_exceeded", "stop_sequence": None}

    def _usage(self, answers: Answers) -> Json:
        receipt = answers.looked_up
        prompt, cached = (receipt.prompt_tokens, receipt.cached_tokens) if receipt else (0, 0)
        computed = prompt - cached
        return {
            "input_tokens": 0 if self._kept else computed,
            "cache_creation_input_tokens": computed if self._kept else 0,
            "cache_read_input_tokens": cached,
            "output_tokens": answers.done.completion_tokens,
        }


def _event(kind: str, **fields: object) -> str:
    return sse({"type": kind} | fields, kind)
