"""Answers as OpenAI writes them, streamed or whole, for chat and for plain completions."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from everwarm.llm import LLM, Event
from everwarm.server.answers import Answers
from everwarm.server.errors import ApiError, body
from everwarm.server.serving import Serving, receipt_json
from everwarm.server.stream import KEEP_ALIVE, sse

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for less: JSON has no infinity."""


@dataclass(slots=True)
class Logged:
    """A token of an answer, for who asked for logprobs."""

    event: Event
    offset: int = 0  # of its text in the answer


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    text: str = ""
    finish: str | None = None
    logged: list[Logged] = field(default_factory=list)
    held: list[Logged] = field(default_factory=list)  # tokens whose text is not out yet


class ChatWire:
    """Chat completions."""

    chunk_object, whole_object, prefix = "chat.completion.chunk", "chat.completion", "chatcmpl-"

    def __init__(self, serving: Serving, count: int, *, logprobs: bool, usage: bool) -> None:
        """`usage`: a chunk of its own at the end of a stream says what was used."""
        self._llm: LLM = serving.llm
        self._logprobs, self._usage = logprobs, usage
        self._head = {
            "id": self.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": f"everwarm-{serving.llm.model.numerics_id[:8]}",
        }
        self._choices = [Choice() for _ in range(count)]

    def waiting(self) -> str:
        return KEEP_ALIVE

    def begin(self, answers: Answers) -> str:
        first = {"role": "assistant", "content": ""}
        return "".join(self._chunk([self._part(number, first)]) for number in range(len(self._choices)))

    def token(self, number: int, event: Event) -> str:
        choice = self._choices[number]
        logged = self._released(choice, event) if self._logprobs else []
        choice.text += event.text
        choice.logged += logged
        choice.finish = event.finish_reason or choice.finish
        if not event.text and not logged:
            return ""
        return self._chunk([self._part(number, {"content": event.text}, logged=logged)])

    def end(self, answers: Answers) -> str:
        """The reasons, when the turn is safe; usage if it was asked for; the receipt with the last of them."""
        receipt = {"everwarm": receipt_json(answers.receipt)} if answers.receipt else {}
        parts = []
        for number, choice in enumerate(self._choices):
            last = number == len(self._choices) - 1 and not self._usage
            parts.append(self._chunk([self._part(number, {}, choice.finish)], receipt if last else {}))
        if self._usage:
            parts.append(self._chunk([], {"usage": _usage(answers)} | receipt))
        return "".join(parts) + sse("[DONE]")

    def error(self, error: ApiError) -> str:
        return sse(body(error, "")) + sse("[DONE]")

    def whole(self, answers: Answers) -> Json:
        choices = [
            {
                "index": number,
                **self._said(choice.text),
                "finish_reason": choice.finish,
                "logprobs": self._spelt(choice.logged) if self._logprobs else None,
            }
            for number, choice in enumerate(self._choices)
        ]
        receipt = {"everwarm": receipt_json(answers.receipt)} if answers.receipt else {}
        return self._head | {"object": self.whole_object, "choices": choices, "usage": _usage(answers)} | receipt

    def _said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, number: int, delta: Json, finish: str | None = None, logged: list[Logged] | None = None) -> Json:
        return {
            "index": number,
            "delta": delta,
            "finish_reason": finish,
            "logprobs": self._spelt(logged) if logged else None,
        }

    def _chunk(self, choices: list[Json], more: Json | None = None) -> str:
        usage = {"usage": None} if self._usage else {}
        return sse(self._head | {"object": self.chunk_object, "choices": choices} | usage | (more or {}))

    def _released(self, choice: Choice, event: Event) -> list[Logged]:
        """Tokens that can be told now: those of text that is out. Never the end token, nor those of a stop string."""
        ended = event.finish_reason == "stop"
        if not (ended and event.token in self._llm.tokenizer.eog_ids):
            choice.held.append(Logged(event))
        if not event.text and (not event.finish_reason or (ended and event.stop)):
            return []
        released, choice.held = choice.held, []
        at, end = len(choice.text), len(choice.text) + len(event.text)
        for one in released:
            one.offset = min(at, end)
            at += len(self._bytes(one.event.token).decode("utf-8", "ignore"))
        return released

    def _spelt(self, logged: list[Logged]) -> Json:
        return {
            "content": [
                self._entry(one.event.token, one.event.logprob)
                | {"top_logprobs": [self._entry(*other) for other in one.event.top_logprobs]}
                for one in logged
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}

    def _bytes(self, token: int) -> bytes:
        return self._llm.tokenizer.token_bytes(token, special=True)


class TextWire(ChatWire):
    """Plain completions. Offsets of tokens count from the beginning of the prompt."""

    chunk_object, whole_object, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, serving: Serving, count: int, *, logprobs: bool, usage: bool, prompt_chars: int) -> None:
        super().__init__(serving, count, logprobs=logprobs, usage=usage)
        self._prompt_chars = prompt_chars

    def begin(self, answers: Answers) -> str:
        return ""

    def _said(self, text: str) -> Json:
        return {"text": text}

    def _part(self, number: int, delta: Json, finish: str | None = None, logged: list[Logged] | None = None) -> Json:
        return {
            "index": number,
            "text": delta.get("content", ""),
            "finish_reason": finish,
            "logprobs": self._spelt(logged) if logged else None,
        }

    def _spelt(self, logged: list[Logged]) -> Json:
        """The likeliest tokens, and always the one that was taken."""
        events = [one.event for one in logged]
        return {
            "tokens": [self._name(event.token) for event in events],
            "token_logprobs": [max(event.logprob, LEAST_LOGPROB) for event in events],
            "top_logprobs": [
                {
                    self._name(token): max(logprob, LEAST_LOGPROB)
                    for token, logprob in (*event.top_logprobs, (event.token, event.logprob))
                }
                for event in events
            ],
            "text_offset": [self._prompt_chars + one.offset for one in logged],
        }

    def _name(self, token: int) -> str:
        """Part of a character is spelt in bytes, so that no two tokens have one name."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _usage(answers: Answers) -> Json:
    receipt = answers.receipt
    prompt, cached = (receipt.prompt_tokens, receipt.cached_tokens) if receipt else (0, 0)
    said = answers.done.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
