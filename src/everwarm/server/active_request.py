"""A client that is being answered: what it has read of its answer, recorded for the log and the metrics."""

import asyncio
import math
import time
import uuid

from fastapi import Request

from everwarm.errors import CancelledError
from everwarm.events import End, Event, Failed, Usage
from everwarm.generation.generation import Progress
from everwarm.kv.receipt import Receipt
from everwarm.server.errors import ApiError
from everwarm.server.progress import ProgressLog
from everwarm.server.serving import OUTCOME, REQUEST_ID, Outcome, Serving, stopping
from everwarm.server.shared_answer import SharedAnswer


class ActiveRequest:
    """One client, and its answer, which others may read as well."""

    def __init__(self, serving: Serving, request: Request, answer: SharedAnswer, agent: str, tenant: str) -> None:
        self._serving, self._answer = serving, answer
        self.joined = answer.begun  # the answer is made for another request, too
        self._reader = answer.read()
        self._left = answer.choices
        self._failure: BaseException | None = None  # of a choice, while events before it are being read
        self._closed = False
        self._reasoning_tokens = 0
        self._started = self._last = time.perf_counter()
        self.outcome = Outcome(uuid.uuid4().hex, request.scope["path"], agent, tenant, joined=self.joined)
        self._progress = ProgressLog(request.scope.get(REQUEST_ID, self.outcome.id), self.outcome.route, agent)
        request.scope[OUTCOME] = self.outcome

    def begin(self) -> None:
        """Have the answer made, unless that is being done. From now on, `close`."""
        self._serving.answering.add(self)
        self._answer.begin()

    @property
    def since_s(self) -> float:
        """Seconds since it was asked."""
        return time.perf_counter() - self._started

    async def next(self, within_s: float | None = None) -> list[Event | End] | None:
        """What has happened since; nothing, if that is so for `within_s`; None when all choices have ended. Raises what
        ended one of them before its time.
        """
        timeout_s = self._serving.limits.timeout_s
        until = math.inf if within_s is None else time.perf_counter() + within_s
        while True:
            now = time.perf_counter()
            left_s = self._started + timeout_s - now
            if left_s <= 0 and self._left:
                raise ApiError(408, f"the request took longer than the limit of {timeout_s:g} s", "timeout_error")
            if (events := self._take()) or not self._left:
                return events or None
            if now >= until:
                return []
            due_s = self._progress.due_s() if self.outcome.ttft_s is None else math.inf
            try:
                async with asyncio.timeout(min(left_s, until - now, due_s)):
                    await self._reader.wait()
            except TimeoutError:
                if self.outcome.ttft_s is None:
                    self._progress.write(self._answer.first)

    def close(self) -> None:
        """Read no more. What nobody else reads is cancelled."""
        self._reader.close()
        self._serving.answering.discard(self)
        if not self._closed:
            self._closed = True
            self._record_end()

    def failed(self, status: int) -> None:
        self.outcome.status = status

    @property
    def usage(self) -> Usage:
        """Of all choices together, so far."""
        prompt = sum(receipt.prompt_tokens for receipt in self.receipts)
        cached = sum(receipt.cached_tokens for receipt in self.receipts)
        drafted = sum(receipt.drafted_tokens for receipt in self.receipts)
        accepted = sum(receipt.accepted_tokens for receipt in self.receipts)
        return Usage(prompt, cached, self.outcome.completion_tokens, self._reasoning_tokens, drafted, accepted)

    @property
    def receipt(self) -> Receipt | None:
        """Of the first choice, as far as it is known: whole when that has ended."""
        return self._answer.receipt

    @property
    def receipts(self) -> list[Receipt]:
        """Of the first choice of each prompt, as far as they are known."""
        return self._answer.receipts

    @property
    def progress(self) -> Progress | None:
        """How far the first prompt is; None before its computation has begun."""
        return self._answer.first.progress

    @property
    def has_several_prompts(self) -> bool:
        return self._answer.has_several_prompts

    @property
    def keep_alive_s(self) -> float:
        return self._serving.limits.keep_alive_s

    def _take(self) -> list[Event | End]:
        if self._failure is not None:
            raise self._failure
        events: list[Event | End] = []
        for item in self._reader.take():
            if isinstance(item, Failed):
                self._left = 0
                stopped = self._serving.draining and isinstance(item.error, CancelledError)
                self._failure = stopping() if stopped else item.error
                break
            self._record(item)
            events.append(item)
        if self._failure is not None and not events:
            raise self._failure
        return events

    def _record(self, event: Event | End) -> None:
        outcome, first = self.outcome, event.choice == 0
        if isinstance(event, End):
            self._left -= 1
            self._reasoning_tokens += event.usage.reasoning_tokens
            if first:
                outcome.finish = event.finish_reason
            return
        now = time.perf_counter()
        outcome.completion_tokens += 1
        if outcome.ttft_s is None:
            outcome.ttft_s = now - self._started
        elif first:
            outcome.inter_token_s.append(now - self._last)
        if first:
            self._last = now
            outcome.finish = event.finish_reason or outcome.finish

    def _record_end(self) -> None:
        outcome, receipt = self.outcome, self.receipt
        outcome.total_s = time.perf_counter() - self._started
        if receipt is not None:
            outcome.agent = receipt.agent or outcome.agent
            outcome.prompt_tokens, outcome.cached_tokens = self.usage.prompt_tokens, self.usage.cached_tokens
            outcome.tier, outcome.cause, outcome.reason = receipt.tier, receipt.cause, receipt.reason
