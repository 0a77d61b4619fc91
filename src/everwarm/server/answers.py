"""One or more answers to one request, as they come, and what is remembered of them for the log and the metrics."""

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Sequence

from everwarm.errors import CancelledError
from everwarm.kv.receipt import Receipt
from everwarm.llm import End, Event, Generation
from everwarm.server.errors import ApiError
from everwarm.server.serving import Done, Serving, stopping

Batch = list[tuple[int, Event | End]]
"""Which choice, and what happened to it."""


class Answers:
    """The choices of one request. The first belongs to the agent; the others begin once its prompt is computed and are
    not kept.
    """

    def __init__(
        self, serving: Serving, route: str, generations: Sequence[Generation], agent: str, tenant: str
    ) -> None:
        self._serving = serving
        self._generations = generations
        self._left = len(generations)
        self._happened: deque[tuple[int, Event | End | BaseException | None]] = deque()
        self._arrived = asyncio.Event()
        self._work = contextlib.ExitStack()
        self._begun = self._finished = False
        self._started = self._last = time.perf_counter()
        self.done = Done(uuid.uuid4().hex, route, agent, tenant)
        self.receipt: Receipt | None = None  # of the first choice, as far as it is known

    def begin(self) -> None:
        """Have the first choice computed. From now on, `close`."""
        self._follow(0)

    async def next(self, within_s: float | None = None) -> Batch | None:
        """What has happened since; nothing, if that is so for `within_s`; None when all choices are over. Raises what
        ended one of them before its time.
        """
        while True:
            left_s = self._started + self._serving.limits.timeout_s - time.perf_counter()
            if left_s <= 0 and self._left:
                limit = f"{self._serving.limits.timeout_s:g} s"
                raise ApiError(408, f"the request took longer than the limit of {limit}", "timeout_error")
            if (batch := self._take()) or not self._left:
                return batch or None
            try:
                async with asyncio.timeout(left_s if within_s is None else min(left_s, within_s)):
                    await self._arrived.wait()
            except TimeoutError:
                if within_s is not None and within_s < left_s:
                    return []

    def close(self) -> None:
        """What is not over yet is cancelled."""
        self._work.close()
        if not self._finished:
            self._finished = True
            self._finish()

    def _follow(self, number: int) -> None:
        def tell(item: Event | End | BaseException | None) -> None:
            self._happened.append((number, item))
            self._arrived.set()

        self._work.enter_context(self._serving.running(self._generations[number], tell))

    def _take(self) -> Batch:
        self._arrived.clear()
        batch: Batch = []
        while self._happened:
            number, item = self._happened[0]
            if isinstance(item, BaseException):
                if batch:  # the error comes after it
                    break
                raise stopping() if self._serving.draining and isinstance(item, CancelledError) else item
            self._happened.popleft()
            if item is None:
                self._left -= 1
                continue
            if number == 0 and not self._begun:
                self._begun = True
                for other in range(1, len(self._generations)):
                    self._follow(other)
            self._count(number, item)
            batch.append((number, item))
        return batch

    @property
    def looked_up(self) -> Receipt | None:
        """What is known of the receipt before the first token."""
        return self.receipt or self._generations[0].receipt

    def failed(self, status: int) -> None:
        self.done.status = status

    def _count(self, number: int, event: Event | End) -> None:
        done, now = self.done, time.perf_counter()
        if isinstance(event, Event):
            done.completion_tokens += 1
            if done.ttft_s is None:
                done.ttft_s = now - self._started
                self.receipt = self._generations[0].receipt
            elif number == 0:
                done.inter_token_s.append(now - self._last)
            if number == 0:
                self._last = now
                done.finish = event.finish_reason or done.finish
        elif number == 0:
            self.receipt = event.receipt

    def _finish(self) -> None:
        done = self.done
        done.total_s = time.perf_counter() - self._started
        if self.receipt is None:
            self.receipt = self._generations[0].receipt
        if self.receipt is not None:
            done.agent = self.receipt.agent or done.agent
            done.prompt_tokens, done.cached_tokens = self.receipt.prompt_tokens, self.receipt.cached_tokens
            done.tier = self.receipt.tier
            done.cause, done.reason = self.receipt.cause, self.receipt.reason
        self._serving.on_done(done)
