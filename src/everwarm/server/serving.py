"""Between HTTP and the engine: who may ask, how many may wait, and generations whose events come to the event loop.

A generation runs on a thread of its own (it waits for turns, memory and disks); its tokens cross from the engine's
thread to the event loop. When the client has gone, it is cancelled, and its memory is free at the engine's next step.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import Request

from everwarm.kv.receipt import Receipt
from everwarm.llm import LLM, End, Event, Generation
from everwarm.server.errors import ApiError
from everwarm.server.keys import Keys
from everwarm.server.redact import without_paths
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


@dataclass(slots=True)
class Done:
    """What became of a request, for its log line and the metrics."""

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


Tell = Callable[[Event | End | BaseException | None], None]


class Serving:
    """One model, served. What all routes share."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        limits: Limits | None = None,
        keys: Keys | None = None,
        on_done: Callable[[Done], None] = lambda done: None,
    ) -> None:
        """Without `keys` everyone may ask, as the default tenant."""
        self.llm = llm
        self.name = name
        self.limits = limits or Limits()
        self.created = int(time.time())
        self.on_done = on_done
        self.active = 0
        self.stopped = Cancellation()  # said when the server is told to end
        self.keys = keys or Keys({})
        self._threads = ThreadPoolExecutor(self.limits.most_queued, "everwarm-request")
        self.texts = Texts()
        self._running: set[Generation] = set()
        self._lock = threading.Lock()

    @property
    def draining(self) -> bool:
        return self.stopped.is_set()

    @property
    def context(self) -> int:
        return min(self.limits.context or self.llm.config.context, self.llm.config.context)

    def tenant(self, request: Request) -> str:
        """Whose key it is. Raises ApiError 401 or 403."""
        return self.keys.tenant(request.headers)

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
        """Raises ApiError if so many messages can't fit: that each is a token at least is known before it is read."""
        if count > self.context:
            raise ApiError(
                400, f"messages: {count:,} of them, the context is {self.context:,} tokens: send fewer",
                code="context_length_exceeded",
            )  # fmt: skip

    def check_priority(self, priority: int) -> None:
        """Raises ApiError if it would let one tenant push aside another."""
        if priority > 0 and len(self.keys.tenants) > 1:
            raise ApiError(400, "everwarm.priority: tenants share this server, so it must not be more than 0")

    @contextlib.contextmanager
    def running(self, generation: Generation, tell: Tell) -> Iterator[None]:
        """Run a generation on a thread. On the event loop `tell` hears each event, then None or the error that ended
        it. Whoever leaves before that cancels it.
        """
        loop, over = asyncio.get_running_loop(), False

        def hear(item: Event | End | BaseException | None) -> None:
            nonlocal over
            over = over or item is None or isinstance(item, BaseException)
            tell(item)

        def post(item: Event | End | BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(hear, item)

        def run() -> None:
            try:
                for item in generation.events(post):
                    post(item)
                post(None)
            except BaseException as error:
                post(error)

        with self._lock:
            self._running.add(generation)
        self._threads.submit(run)
        try:
            yield
        finally:
            if not over:
                generation.cancel()
            with self._lock:
                self._running.discard(generation)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; wait for what runs, then cancel what is left: it has a moment to say so."""
        self.stopped.set()
        if await self._ended(grace_s):
            return
        with self._lock:
            left = list(self._running)
        for generation in left:
            generation.cancel()
        await self._ended(LAST_WORDS_S)

    async def _ended(self, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.active

    def close(self) -> None:
        self.texts.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", "overloaded_error", retry_after=5)


def agent_of(request: Request) -> str | None:
    """Whom the header names. Headers are bytes: what is UTF-8 is read as that."""
    name = request.headers.get("x-agent-id")
    try:
        return name and name.encode("latin-1").decode()
    except UnicodeError:
        return name


def receipt_headers(receipt: Receipt | None) -> dict[str, str]:
    """What is known when the answer begins."""
    if receipt is None:
        return {}
    return {
        "X-Everwarm-Agent": receipt.agent.encode("ascii", "replace").decode(),
        "X-Everwarm-Tier": receipt.tier,
        "X-Everwarm-Cached-Tokens": str(receipt.cached_tokens),
        "X-Everwarm-Prompt-Tokens": str(receipt.prompt_tokens),
        "X-Everwarm-Reason": without_paths(receipt.reason).encode("ascii", "replace").decode().replace("\n", " "),
    }


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    error = None if receipt.error is None else without_paths(receipt.error)
    return asdict(receipt) | {"reason": without_paths(receipt.reason), "error": error}
