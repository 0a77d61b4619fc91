"""From sampled tokens to events: the detokenizer, the search for stop strings, the parser of the output.

All of it runs on the engine's thread, so that a sequence ends with the very token that ended it. Events go into one
queue, whose reader is on another thread.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from everwarm.engine.sampler import SampledToken
from everwarm.events import Answer, Content, Event, FinishReason, Reasoning, ToolCallEnd
from everwarm.generation.request import Request
from everwarm.text.detokenizer import Detokenizer
from everwarm.text.stop import StopMatcher
from everwarm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine has let go of the sequence."""

    error: BaseException | None


class EventQueue(Protocol):
    """Takes events from any thread; `put` must not wait."""

    def put(self, item: Event, /) -> None: ...


class StopQueue(Protocol):
    """Where it is told that the engine has let go of the sequence."""

    def put(self, item: Stopped, /) -> None: ...


class Output:
    """What the engine tells of one sequence, on the engine's thread: `accept` for each token, then `end`."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, prompt: list[int], continuing: bool, queue: EventQueue,
        stopped: StopQueue,
    ) -> None:  # fmt: skip
        """`continuing`: the answer goes on where text has ended, so a leading space is part of it."""
        self.tokens: list[int] = []
        self.answer = Answer()
        self.finish_reason: FinishReason = "length"
        self.reasoning_tokens = 0
        self._request = request
        self._limit = min(request.max_tokens, request.context - len(prompt))
        self._detokenizer = Detokenizer(tokenizer, continuing=continuing)
        self._matcher = StopMatcher(request.stops)
        self._parser = request.parser()
        known = tokenizer.special_tokens
        self._controls = {known[name]: name for name in self._parser.control_tokens if name in known}
        self._called_enough = False  # the answer has all the calls that the request takes
        self._reasons = False  # the answer is inside reasoning
        self._queue, self._stopped = queue, stopped
        self._ended = False
        self._abandoned: list[ExitStack] = []

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.matched

    def accept(self, sampled: SampledToken) -> bool:
        """The next token; whether it was the last."""
        token, matcher = sampled.token, self._matcher
        self.tokens.append(token)
        text = matcher.push(self._detokenizer.push(token))
        control = self._controls.get(token)
        if control is not None:
            text += self._held_text()
        ends = token in self._request.end_ids or matcher.matched is not None
        last = ends or len(self.tokens) == self._limit
        if last:
            text += self._held_text()
        content = self._content(text, control, last)
        if self._called_enough:
            last = ends = True
        if last:
            self.finish_reason = "length" if not ends else "stop"
            if ends and self.answer.calls and matcher.matched is None:
                self.finish_reason = "tool_calls"
        self._queue.put(
            Event(
                token, sampled.logprob, sampled.top_logprobs, content, self.finish_reason if last else None,
                matcher.matched, self._request.choice,
            )
        )  # fmt: skip
        return last

    def _held_text(self) -> str:
        """The text ends here: what was held back is settled."""
        if self._matcher.matched is not None:
            return ""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()

    def _content(self, text: str, control: str | None, last: bool) -> tuple[Content, ...]:
        parser = self._parser
        content = tuple(parser.feed(text)) if text else ()
        if control is not None:
            content += tuple(parser.control(control))
        if (end := self._last_call(content)) is not None:
            content, self._called_enough = content[: end + 1], True
        elif last:
            content += tuple(parser.finish())
        if content:
            self.answer.add(content)
            self._reasons = isinstance(content[-1], Reasoning)
        self.reasoning_tokens += self._reasons
        return content

    def _last_call(self, content: tuple[Content, ...]) -> int | None:
        """Where the last call ends that the request takes, if it does."""
        most = self._request.most_calls
        if most is None:
            return None
        ends = (at for at, part in enumerate(content) if isinstance(part, ToolCallEnd) and part.index == most - 1)
        return next(ends, None)

    def end(self, error: BaseException | None) -> None:
        """The engine has let go of the sequence."""
        self._ended = True
        self._stopped.put(Stopped(error))
        if self._abandoned:
            self.give_back()

    def abandon(self, held: ExitStack) -> None:
        """The reader has left: what it held is given back once the sequence has ended. Takes no lock."""
        self._abandoned.append(held)

    def give_back(self) -> None:
        """Give back what was abandoned, if the sequence has ended. On the engine's thread, or where it has ended."""
        if self._ended:
            with suppress(IndexError):  # once
                self._abandoned.pop().close()
