"""What all requests to one model share: limits, the queue, threads, and how the server ends.

A generation runs on a thread of its own, because it waits for turns, memory and disks. When its client has gone it is
cancelled, and its memory is free at the engine's next step.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from everwarm.generation.generation import Progress, RequestQueue
from everwarm.kv.receipt import Receipt
from everwarm.llm import LLM, Generation
from everwarm.server.errors import ApiError
from everwarm.server.grammars import GrammarThreads
from everwarm.server.keys import Keys
from everwarm.server.sampling import BUILT_IN
from everwarm.server.texts import Texts
from everwarm.waiting import Cancellation

LAST_WORDS_S = 1.0
"""How long a request that was cancelled at the end may take to tell its client."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take."""

    most_queued: int = 256  # requests at once, running or waiting
    most_body_bytes: int = 16 << 20
    timeout_s: float = 3600.0
    context: int | None = None  # fewer tokens than the model's own context
    keep_alive_s: float = 5.0
    most_choices: int = 16
    most_prompts: int = 128  # of one request; as many as there may be choices are computed at once
    answer_tokens: int | None = None  # of an answer, if its request names no limit


OUTCOME = "everwarm.outcome"
"""Where a request's scope holds its outcome, if something was generated for it."""


REQUEST_ID = "everwarm.request_id"
"""Where a request's scope holds the id that its line in the log has."""


@dataclass(slots=True)
class Outcome:
    """What became of a request that generates, for the log and the metrics; complete when the response has ended."""

    id: str
    route: str
    agent: str = ""
    tenant: str = ""
    status: int = 200
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tier: str = ""
    cause: str = ""
    reason: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    finish: str = ""
    inter_token_s: list[float] = field(default_factory=list)
    joined: bool = False  # its answer was made for another request


class Answering(Protocol):
    """A client that is being answered, as others may look at it. See `active_request`."""

    outcome: Outcome
    joined: bool

    @property
    def since_s(self) -> float: ...

    @property
    def progress(self) -> Progress | None: ...

    @property
    def receipt(self) -> Receipt | None: ...


class Serving:
    """One model, served. What all routes share."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        limits: Limits | None = None,
        keys: Keys | None = None,
        names: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Without `keys` everyone may ask, as the default tenant. `sampling`: what the server's settings say of it."""
        self.llm = llm
        self.name = name
        self.names = tuple(names) or (name,)
        self.limits = limits or Limits()
        self.sampling: dict[str, Any] = {**BUILT_IN, **llm.file_sampling, **(sampling or {})}
        self.created = int(time.time())
        self.active = 0
        self.draining = False  # the server has been told to end
        self.stopped = Cancellation()  # the same, for those who wait for something else meanwhile
        self.keys = keys or Keys({})
        self._threads = ThreadPoolExecutor(self.limits.most_queued, "everwarm-request")
        self.texts = Texts()
        self.grammars = GrammarThreads(llm)
        self._running: set[Generation] = set()
        self.answering: set[Answering] = set()  # clients that are being answered; on the event loop only
        self._lock = threading.Lock()

    @property
    def context(self) -> int:
        return min(self.limits.context or self.llm.config.context, self.llm.config.context)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in. Raises ApiError 429 or 503."""
        with self._lock:
            self.check_queue()
            self.active += 1
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1

    def check_queue(self) -> None:
        """Raises ApiError 429 or 503 if nothing more can be asked."""
        if self.draining:
            raise stopping()
        if self.active >= self.limits.most_queued:
            raise ApiError(
                429, f"{self.active} requests are running or waiting, the limit is {self.limits.most_queued}",
                "rate_limit_error", retry_after=1,
            )  # fmt: skip

    def check_messages(self, count: int) -> None:
        """Raises ApiError if so many messages can't fit: each is at least one token, whatever is in it."""
        if count > self.context:
            raise ApiError(
                400, f"messages: {count:,} of them, the context is {self.context:,} tokens: send fewer",
                code="context_length_exceeded",
            )  # fmt: skip

    def check_priority(self, priority: int) -> None:
        """Raises ApiError if it would let one tenant push aside another."""
        if priority > 0 and len(self.keys.tenants) > 1:
            raise ApiError(400, "everwarm.priority: tenants share this server, so it must not be more than 0")

    def run(self, generation: Generation, queue: RequestQueue) -> None:
        """Have a thread run it; its events go into the queue. Say when it has `ended`."""
        with self._lock:
            self._running.add(generation)
        self._threads.submit(generation.run, queue)

    def ended(self, generation: Generation) -> None:
        """It need not be cancelled any more when the server ends."""
        with self._lock:
            self._running.discard(generation)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; wait for what runs, then cancel what is left and give it a moment to tell its clients."""
        self.draining = True
        self.stopped.set()
        if await self._is_idle_within(grace_s):
            return
        with self._lock:
            left = list(self._running)
        for generation in left:
            generation.cancel()
        await self._is_idle_within(LAST_WORDS_S)

    async def _is_idle_within(self, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.active

    def close(self) -> None:
        self.texts.close()
        self.grammars.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", "overloaded_error", retry_after=5)
