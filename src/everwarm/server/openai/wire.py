"""Answers as OpenAI writes them, streamed or whole, for chat and for plain completions."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from everwarm.events import (
    Answer,
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
from everwarm.server.serving import Serving
from everwarm.server.timings import Timings
from everwarm.server.wire import Json, ServerEvent, ServerEvents

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for less: JSON has no infinity."""


@dataclass(slots=True)
class LoggedToken:
    """A token of an answer, for a client that asked for logprobs."""

    event: Event
    offset: int = 0  # of its text in the answer


@dataclass(slots=True)
class Choice:
    """One answer as far as it is known."""

    answer: Answer = field(default_factory=Answer)
    chars: int = 0  # of its text, and the prompt's for plain completions; counted for logprobs
    finish: FinishReason | None = None
    logged: list[LoggedToken] = field(default_factory=list)
    held: list[LoggedToken] = field(default_factory=list)  # tokens whose text is not out yet


class ChatWire:
    """Chat completions."""

    chunk_object, whole_object, prefix = "chat.completion.chunk", "chat.completion", "chatcmpl-"

    def __init__(
        self,
        serving: Serving,
        count: int,
        *,
        logprobs: bool,
        usage: bool,
        timings: bool | None = False,
        progress: bool | None = False,
    ) -> None:
        """`usage`: a chunk of its own at the end of a stream says what was used. `timings`: every chunk of a stream has
        them, not only the last. `progress`: chunks before the first token say how far the prompt is.
        """
        self._tokenizer = serving.llm.tokenizer
        self._logprobs, self._usage, self._timed, self.wants_progress = logprobs, usage, bool(timings), bool(progress)
        self._timings = Timings()
        self._prompt = Usage()
        self._head = {
            "id": self.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": f"everwarm-{serving.llm.model.numerics_id[:8]}",
        }
        self._choices = [Choice() for _ in range(count)]

    def waiting(self) -> ServerEvent | None:
        return None

    def begin(self, usage: Usage) -> ServerEvents:
        self._prompt = usage
        return self._first_chunks()

    def _first_chunks(self) -> ServerEvents:
        first = {"role": "assistant", "content": ""}
        return [self._chunk([self._part(number, first)]) for number in range(len(self._choices))]

    def progress(self, report: Json) -> ServerEvents:
        return [self._chunk([self._part(0, {})], {"prompt_progress": report})]

    def add(self, event: Event | End) -> ServerEvents:
        choice = self._choices[event.choice]
        if isinstance(event, End):
            choice.finish = event.finish_reason
            return []
        self._timings.token()
        logged = self._released(choice, event) if self._logprobs else []
        choice.answer.add(event.content)
        choice.logged += logged
        deltas = [delta for part in event.content if (delta := self._delta(part)) is not None]
        if logged and not deltas:
            deltas = [{"content": ""}]
        written = []
        more = {"timings": self._timings.told(self._prompt)} if self._timed and deltas else {}
        for delta in deltas:
            written.append(self._chunk([self._part(event.choice, delta, logged=logged)], more))
            logged = []
        return written

    def end(self, usage: Usage, receipt: Json | None) -> ServerEvents:
        """The finish reasons, now that the turn is safe; usage if it was asked for; timings and the receipt come with
        the last.
        """
        more = self._more(usage, receipt)
        events = []
        for number, choice in enumerate(self._choices):
            last = number == len(self._choices) - 1 and not self._usage
            events.append(self._chunk([self._part(number, {}, choice.finish)], more if last else {}))
        if self._usage:
            events.append(self._chunk([], {"usage": _usage(usage)} | more))
        return [*events, ServerEvent("[DONE]")]

    def error(self, error: ApiError) -> ServerEvents:
        return [ServerEvent(body(error, "")), ServerEvent("[DONE]")]

    def whole(self, usage: Usage, receipt: Json | None) -> Json:
        choices = [
            {
                "index": number,
                **self._message(choice.answer),
                "finish_reason": choice.finish,
                "logprobs": self._spelt(choice.logged) if self._logprobs else None,
            }
            for number, choice in enumerate(self._choices)
        ]
        more = self._more(usage, receipt)
        return self._head | {"object": self.whole_object, "choices": choices, "usage": _usage(usage)} | more

    def _more(self, usage: Usage, receipt: Json | None) -> Json:
        """What OpenAI's API does not have."""
        return {"timings": self._timings.told(usage)} | ({"everwarm": receipt} if receipt else {})

    def _message(self, answer: Answer) -> Json:
        return {"message": answer.message() | {"refusal": None}}

    def _delta(self, part: Content) -> Json | None:
        match part:
            case Text():
                return {"content": part.text}
            case Reasoning():
                return {"reasoning_content": part.text}
            case ToolCallStart():
                function = {"name": part.name, "arguments": ""}
                return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
            case ToolCallArguments():
                return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
            case ToolCallEnd():
                return None

    def _part(
        self, number: int, delta: Json, finish: str | None = None, logged: list[LoggedToken] | None = None
    ) -> Json:
        return {
            "index": number,
            "delta": delta,
            "finish_reason": finish,
            "logprobs": self._spelt(logged) if logged else None,
        }

    def _chunk(self, choices: list[Json], more: Json | None = None) -> ServerEvent:
        usage = {"usage": None} if self._usage else {}
        return ServerEvent(self._head | {"object": self.chunk_object, "choices": choices} | usage | (more or {}))

    def _released(self, choice: Choice, event: Event) -> list[LoggedToken]:
        """Tokens whose text is out, or will never be. Never the end token, nor those of a stop string."""
        ended = event.finish_reason in ("stop", "tool_calls")
        if not (ended and event.token in self._tokenizer.eog_ids):
            choice.held.append(LoggedToken(event))
        if not event.content and (not event.finish_reason or (ended and event.stop)):
            return []
        released, choice.held = choice.held, []
        at, end = choice.chars, choice.chars + len(event.text)
        for one in released:
            one.offset = min(at, end)
            at += len(self._bytes(one.event.token).decode("utf-8", "ignore"))
        choice.chars = end
        return released

    def _spelt(self, logged: list[LoggedToken]) -> Json:
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
        return self._tokenizer.token_bytes(token, special=True)


class TextWire(ChatWire):
    """Plain completions. Offsets of tokens count from the beginning of the prompt."""

    chunk_object, whole_object, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(
        self,
        serving: Serving,
        count: int,
        *,
        prompt_chars: Sequence[int],
        logprobs: bool,
        usage: bool,
        timings: bool | None = False,
        progress: bool | None = False,
    ) -> None:
        """`count` choices for each prompt, which has so many characters."""
        super().__init__(
            serving, count * len(prompt_chars), logprobs=logprobs, usage=usage, timings=timings, progress=progress
        )
        for number, choice in enumerate(self._choices):
            choice.chars = prompt_chars[number // count]

    def _first_chunks(self) -> ServerEvents:
        return []

    def _message(self, answer: Answer) -> Json:
        return {"text": answer.text}

    def _part(
        self, number: int, delta: Json, finish: str | None = None, logged: list[LoggedToken] | None = None
    ) -> Json:
        return {
            "index": number,
            "text": delta.get("content", ""),
            "finish_reason": finish,
            "logprobs": self._spelt(logged) if logged else None,
        }

    def _spelt(self, logged: list[LoggedToken]) -> Json:
        """The most likely tokens, and always the one that was chosen."""
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
            "text_offset": [one.offset for one in logged],
        }

    def _name(self, token: int) -> str:
        """Part of a character is spelt in bytes, so that no two tokens have the same name."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _usage(usage: Usage) -> Json:
    details = {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    } | (details if usage.reasoning_tokens else {})
