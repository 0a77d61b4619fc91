"""Answers as llama.cpp's `/completion` writes them, streamed or whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from everwarm.events import End, Event, Usage
from everwarm.server.errors import ApiError, body
from everwarm.server.openai.wire import LEAST_LOGPROB
from everwarm.server.serving import Serving
from everwarm.server.timings import Timings
from everwarm.server.wire import Json, ServerEvent, ServerEvents

_STOP_TYPES = {"stop": "eos", "length": "limit", "tool_calls": "eos"}


class _Answer:
    """One choice as far as it is known."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logged: list[Json] = []
        self.timings = Timings()
        self.end: End | None = None


class CompletionWire:
    """One response: an object for each choice."""

    def __init__(
        self,
        serving: Serving,
        count: int,
        *,
        settings: Mapping[str, Any],
        prompts: Sequence[str],
        return_tokens: bool,
        fields: Sequence[str],
        progress: bool,
    ) -> None:
        """`count` choices for each prompt. `settings` is what the client is told of how it was generated; of the last
        object only `fields` are sent, if there are any.
        """
        self._serving, self._settings, self._prompts, self._count = serving, settings, prompts, count
        self._return_tokens, self._fields, self.wants_progress = return_tokens, fields, progress
        self._answers = [_Answer() for _ in range(count * len(prompts))]
        self._prompt = Usage()

    def waiting(self) -> ServerEvent | None:
        return None

    def begin(self, usage: Usage) -> ServerEvents:
        self._prompt = usage
        return []

    def progress(self, report: Json) -> ServerEvents:
        return [ServerEvent(self._chunk(0, "", []) | {"prompt_progress": report})]

    def add(self, event: Event | End) -> ServerEvents:
        answer = self._answers[event.choice]
        if isinstance(event, End):
            answer.end = event
            return []
        answer.timings.token()
        text, ends = event.text, event.finish_reason == "stop" and event.stop is None
        if ends and not text:  # the end token
            return []
        answer.text.append(text)
        answer.tokens.append(event.token)
        chunk = self._chunk(event.choice, text, [event.token])
        if self._settings["n_probs"]:
            answer.logged.append(self._logged(event))
            chunk["completion_probabilities"] = answer.logged[-1:]
        if self._settings["timings_per_token"]:
            chunk["timings"] = answer.timings.told(self._prompt)
        return [ServerEvent(chunk)]

    def end(self, usage: Usage, receipt: Json | None) -> ServerEvents:
        return [ServerEvent(self._last(number, receipt, streamed=True)) for number in range(len(self._answers))]

    def error(self, error: ApiError) -> ServerEvents:
        return [ServerEvent(body(error, ""))]

    def whole(self, usage: Usage, receipt: Json | None) -> Json | list[Json]:
        found = [self._last(number, receipt, streamed=False) for number in range(len(self._answers))]
        return found[0] if len(found) == 1 else found

    def _chunk(self, number: int, text: str, tokens: list[int]) -> Json:
        return {
            "index": number,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self._answers[number].tokens),
            "tokens_evaluated": self._prompt.prompt_tokens,
        }

    def _last(self, number: int, receipt: Json | None, *, streamed: bool) -> Json:
        answer = self._answers[number]
        end, text = answer.end, "".join(answer.text)
        assert end is not None, "all choices have ended"
        tokens = end.usage.prompt_tokens + end.usage.completion_tokens
        told: Json = {
            "index": number,
            "content": "" if streamed else text,
            "tokens": answer.tokens if self._return_tokens and not streamed else [],
            "id_slot": -1,
            "stop": True,
            "model": self._serving.name,
            "tokens_predicted": end.usage.completion_tokens,
            "tokens_evaluated": end.usage.prompt_tokens,
            "generation_settings": self._settings,
            "prompt": self._prompts[number // self._count],
            "has_new_line": "\n" in text,
            "truncated": end.finish_reason == "length" and tokens >= self._serving.context,
            "stop_type": _STOP_TYPES[end.finish_reason] if end.stop is None else "word",
            "stopping_word": end.stop or "",
            "tokens_cached": tokens,
            "timings": answer.timings.told(end.usage),
        }
        if answer.logged and not streamed:
            told["completion_probabilities"] = answer.logged
        if receipt:
            told["everwarm"] = receipt["prompts"][number // self._count] if len(self._prompts) > 1 else receipt
        return {path: _inside(told, path) for path in self._fields if _has(told, path)} if self._fields else told

    def _logged(self, event: Event) -> Json:
        others = [self._entry(token, logprob) for token, logprob in event.top_logprobs]
        return self._entry(event.token, event.logprob) | {"top_logprobs": others}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._serving.llm.tokenizer.token_bytes(token, special=True)
        return {
            "id": token,
            "token": data.decode("utf-8", "ignore"),
            "bytes": list(data),
            "logprob": max(logprob, LEAST_LOGPROB),
        }


def _has(told: Json, path: str) -> bool:
    for name in path.split("/"):
        if not isinstance(told, Mapping) or name not in told:
            return False
        told = told[name]
    return True


def _inside(told: Any, path: str) -> Any:
    for name in path.split("/"):
        told = told[name]
    return told
