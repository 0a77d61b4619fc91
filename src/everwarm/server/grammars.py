"""Grammars of requests, compiled beside the event loop.

Those that are known to compile quickly have a thread of their own, so that nobody waits for a stranger's schema that
takes seconds. What waits for the slow thread is bounded.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from everwarm.engine.processors import Constraint
from everwarm.llm import LLM
from everwarm.server.errors import ApiError
from everwarm.structured.grammar import Grammar

MOST_WAITING = 16
"""Grammars that wait for the slow thread, which takes seconds for each at worst."""


class GrammarThreads:
    """The threads."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._quick = ThreadPoolExecutor(1, "everwarm-grammar")
        self._slow = ThreadPoolExecutor(1, "everwarm-slow-grammar")
        self._waiting = 0

    async def constraint(self, ask: Callable[[], Grammar | None]) -> Callable[[], Constraint] | None:
        """What makes constraints for the grammar that `ask` returns. Raises RequestError for one that can't be
        followed, ApiError 503 while too many others wait.
        """
        loop = asyncio.get_running_loop()
        grammar = await loop.run_in_executor(self._quick, ask)
        if grammar is None:
            return None
        if grammar.quick:
            return await loop.run_in_executor(self._quick, self._llm.grammars.constraint, grammar)
        if self._waiting >= MOST_WAITING:
            raise ApiError(
                503, f"{self._waiting} grammars wait to be compiled, the limit is {MOST_WAITING}: try again",
                "overloaded_error", retry_after=5,
            )  # fmt: skip
        self._waiting += 1
        try:
            return await loop.run_in_executor(self._slow, self._llm.grammars.constraint, grammar)
        finally:
            self._waiting -= 1

    async def options(self, ask: Callable[[], Grammar | None]) -> dict[str, Any]:
        """The same, as arguments of `LLM.start`; none if any answer will do."""
        constraint = await self.constraint(ask)
        return {} if constraint is None else {"constraint": constraint, "after_reasoning": True}

    def close(self) -> None:
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=True, cancel_futures=True)
