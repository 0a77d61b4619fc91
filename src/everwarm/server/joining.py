"""A request that is sent again while the same one still runs: it joins the answer that is being made, if it may.

The same: tenant, agent, group, path and body are equal. It may: the answer would be the same anyway (greedy or seeded),
or the client says that it tries again (`Idempotency-Key` as before, or `x-stainless-retry-count`). All others run on
their own. Clients that give up on a long prompt and send it again cost nothing twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import Request

from everwarm.llm import Generation
from everwarm.server.serving import Serving
from everwarm.server.shared_answer import SharedAnswer
from everwarm.server.wire import Wire


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who asks."""

    tenant: str
    agent: str
    group: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An answer, and what writes it for one client: a new wire for each."""

    answer: SharedAnswer
    wire: Callable[[], Wire]
    key: str  # `Idempotency-Key` of the first who asked


class Joins:
    """The answers that are being made for the routes of one API."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._running: dict[tuple[Speaker, str, bytes], list[Opened]] = {}

    async def open(
        self, request: Request, speaker: Speaker, generations: Sequence[Generation], wire: Callable[[], Wire]
    ) -> Opened:
        """The answer to a request: one that is being made, or else a new one by these generations. Begin it before
        anything else is awaited.
        """
        asked = speaker, request.scope["path"], await request.body()
        key = request.headers.get("idempotency-key", "")
        same = self._running.setdefault(asked, [])
        again = generations[0].repeatable or _retries(request) > 0
        for opened in reversed(same):
            differs = key and opened.key and key != opened.key
            if opened.answer.can_be_joined and not differs and (again or (key and key == opened.key)):
                return opened
        opened = Opened(SharedAnswer(self._serving, generations), wire, key)
        same.append(opened)
        opened.answer.when_over(lambda: self._forget(asked, opened))
        return opened

    def _forget(self, asked: tuple[Speaker, str, bytes], opened: Opened) -> None:
        same = self._running[asked]
        same.remove(opened)
        if not same:
            del self._running[asked]


def _retries(request: Request) -> int:
    """How often the client says that it has tried before."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isascii() and count.isdecimal() and len(count) < 10 else 0
