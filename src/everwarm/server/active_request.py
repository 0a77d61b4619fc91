"""A request that is being answered: the generations of its choices, and the one queue that all their events go through.

Threads put events in (the engine's thread for tokens, a thread of the request for its end), the event loop takes them
out. What happens is recorded for the log and the metrics.
"""

import asyncio
import contextlib
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from fastapi import Request

from everwarm.errors import CancelledError
from everwarm.events import End, Event, Failed, Usage
from everwarm.generation.generation import Progress
from everwarm.kv.receipt import Receipt
from everwarm.llm import Generation
from everwarm.server.errors import ApiError
from everwarm.server.progress import ProgressLog
from everwarm.server.serving import OUTCOME, REQUEST_ID, Outcome, Serving, stopping

Item = Event | End | Failed


class LoopQueue:
    """From any thread to the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sent: deque[Item] = deque()  # by threads
        self._called = False  # the loop will be there for what was sent
        self._received: list[Item] = []  # by the loop
        self._arrived = asyncio.Event()

    def put(self, item: Item, /) -> None:
        """Never waits. The loop is called once for all that it has not received yet."""
        self._sent.append(item)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._receive)

    def _receive(self) -> None:
        self._called = False  # before the items are received: what is sent later calls again
        while self._sent:
            self._received.append(self._sent.popleft())
        self._arrived.set()

    def take(self) -> list[Item]:
        """All that has arrived."""
        self._arrived.clear()
        taken, self._received = self._received, []
        return taken

    async def wait(self) -> None:
        """Until something has arrived since the last `take`."""
        await self._arrived.wait()


class ActiveRequest:
    """The choices of one request. The first belongs to the agent; the others begin once its prompt is computed and are
    not kept. A request with several prompts has choices of each, one prompt after the other.
    """

    def __init__(
        self,
        serving: Serving,
        request: Request,
        generations: Sequence[Generation],
        agent: str,
        tenant: str,
        prompts: int = 1,
    ) -> None:
        self._serving = serving
        self._generations = generations
        self._queue = LoopQueue()
        self._failure: BaseException | None = None  # of a choice, while events before it are being read
        self._running: dict[int, Generation] = {}  # by the number of the choice
        self._left = len(generations)
        self._of_a_prompt = len(generations) // prompts  # choices
        self._waiting = deque(range(0, len(generations), self._of_a_prompt))  # choices that can begin
        self._begun: set[int] = set()  # first choices that have said something
        self._closed = False
        self._when_closed: Callable[[], object] | None = None
        self._reasoning_tokens = 0
        self._started = self._last = time.perf_counter()
        self.outcome = Outcome(uuid.uuid4().hex, request.scope["path"], agent, tenant)
        self._progress = ProgressLog(request.scope.get(REQUEST_ID, self.outcome.id), self.outcome.route, agent)
        request.scope[OUTCOME] = self.outcome

    def begin(self) -> None:
        """Have the first choice of each prompt computed. From now on, `close`."""
        self._run_waiting()

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
                    await self._queue.wait()
            except TimeoutError:
                if self.outcome.ttft_s is None:
                    self._progress.write(self._generations[0])

    def when_closed(self, call: Callable[[], object]) -> None:
        """Have a function called when the request is over."""
        self._when_closed = call

    def cancel(self) -> None:
        """End it before its time; whoever reads its answer is told."""
        self._waiting.clear()
        for generation in self._running.values():
            generation.cancel()

    def close(self) -> None:
        """Cancel what has not ended."""
        self._waiting.clear()
        for generation in self._running.values():
            generation.cancel()
            self._serving.ended(generation)
        self._running.clear()
        if not self._closed:
            self._closed = True
            self._record_end()
            if self._when_closed is not None:
                self._when_closed()

    def failed(self, status: int) -> None:
        self.outcome.status = status

    @property
    def usage(self) -> Usage:
        """Of all choices together, so far."""
        prompt = sum(receipt.prompt_tokens for receipt in self.receipts)
        cached = sum(receipt.cached_tokens for receipt in self.receipts)
        return Usage(prompt, cached, self.outcome.completion_tokens, self._reasoning_tokens)

    @property
    def receipt(self) -> Receipt | None:
        """Of the first choice, as far as it is known: whole when that has ended."""
        return self._generations[0].receipt

    @property
    def receipts(self) -> list[Receipt]:
        """Of the first choice of each prompt, as far as they are known."""
        firsts = self._generations[:: self._of_a_prompt]
        return [generation.receipt for generation in firsts if generation.receipt is not None]

    @property
    def progress(self) -> Progress | None:
        """How far the first prompt is; None before its computation has begun."""
        return self._generations[0].progress

    @property
    def has_several_prompts(self) -> bool:
        return self._of_a_prompt < len(self._generations)

    @property
    def keep_alive_s(self) -> float:
        return self._serving.limits.keep_alive_s

    def _run_waiting(self) -> None:
        """As many at once as a request may have choices: others have their turn, too."""
        while self._waiting and len(self._running) < self._serving.limits.most_choices:
            number = self._waiting.popleft()
            self._running[number] = self._generations[number]
            self._serving.run(self._generations[number], self._queue)

    def _take(self) -> list[Event | End]:
        if self._failure is not None:
            raise self._failure
        events: list[Event | End] = []
        for item in self._queue.take():
            if isinstance(item, Failed):
                self._waiting.clear()
                self._end(item.choice)
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
            self._end(event.choice)
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
        if event.choice % self._of_a_prompt == 0 and event.choice not in self._begun:
            self._begun.add(event.choice)
            self._waiting.extendleft(reversed(range(event.choice + 1, event.choice + self._of_a_prompt)))
            self._run_waiting()

    def _end(self, choice: int) -> None:
        self._left -= 1
        self._serving.ended(self._running.pop(choice))
        self._run_waiting()

    def _record_end(self) -> None:
        outcome, receipt = self.outcome, self.receipt
        outcome.total_s = time.perf_counter() - self._started
        if receipt is not None:
            outcome.agent = receipt.agent or outcome.agent
            outcome.prompt_tokens, outcome.cached_tokens = self.usage.prompt_tokens, self.usage.cached_tokens
            outcome.tier, outcome.cause, outcome.reason = receipt.tier, receipt.cause, receipt.reason
