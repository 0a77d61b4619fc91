"""One or more answers to one request, as they come, and what is remembered of them for the log and the metrics."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from everwarm.kv.receipt import Receipt
from everwarm.llm import End, Event, Generation
from everwarm.server.serving import Done, Serving


class Answers:
    """The choices of one request. The first belongs to the agent; the others begin once its prompt is computed and are
    not kept.
    """

    def __init__(
        self, serving: Serving, route: str, generations: Sequence[Generation], agent: str, tenant: str
    ) -> None:
        self._serving = serving
        self._generations = generations
        self._started = self._last = time.perf_counter()
        self.done = Done(uuid.uuid4().hex, route, agent, tenant)
        self.receipt: Receipt | None = None  # of the first choice, as far as it is known

    async def events(self) -> AsyncGenerator[tuple[int, Event | End]]:
        """Which choice, and what happened to it."""
        happened: asyncio.Queue[tuple[int, Event | End | BaseException | None]] = asyncio.Queue()

        async def follow(number: int) -> None:
            try:
                async with contextlib.aclosing(self._serving.events(self._generations[number])) as events:
                    async for event in events:
                        happened.put_nowait((number, event))
                happened.put_nowait((number, None))
            except BaseException as error:
                happened.put_nowait((number, error))
                if isinstance(error, asyncio.CancelledError):
                    raise

        tasks: list[asyncio.Task[None]] = []
        left = len(self._generations)
        try:
            with self._serving.admitted():
                tasks.append(asyncio.create_task(follow(0)))
                while left:
                    number, event = await happened.get()
                    if isinstance(event, BaseException):
                        raise event
                    if event is None:
                        left -= 1
                        continue
                    if len(tasks) < len(self._generations):
                        tasks += [asyncio.create_task(follow(other)) for other in range(1, len(self._generations))]
                    self._count(number, event)
                    yield number, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._finish()

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
            done.tier, done.reason = self.receipt.tier, self.receipt.reason
        self._serving.on_done(done)
