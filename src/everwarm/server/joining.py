"""A request that is sent again while the same one still runs: it joins the answer that is being made, if it may.

The same: tenant, agent, group, path and body are equal. It may: the answer would be the same anyway (greedy or seeded),
or the client says that it tries again (`Idempotency-Key` as before, or `x-stainless-retry-count`). All others run on
their own. Clients that give up on a long prompt and send it again cost nothing twice.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked, and by whom."""

    speaker: Speaker
    path: str
    body: bytes  # its digest


class Joins:
    """The answers that are being made for the routes of one API. It does not keep them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._open: dict[_Asked, list[ReferenceType[SharedAnswer]]] = {}

    async def open(
        self,
        request: Request,
        speaker: Speaker,
        generations: Sequence[Generation],
        wire: Callable[[], Wire],
        prompts: int = 1,
    ) -> SharedAnswer:
        """The answer to a request: one that is being made, or else a new one by these generations, the same number for
        each of the `prompts`. Begin it before anything else is awaited. `wire` makes what writes it for a client.
        """
        body = hashlib.blake2b(await request.body(), digest_size=32).digest()
        asked = _Asked(speaker, request.scope["path"], body)
        self._forget_those_that_are_over()
        key = request.headers.get("idempotency-key", "")
        again = generations[0].repeatable or _retries(request) > 0
        same = self._open.setdefault(asked, [])
        for reference in reversed(same):
            if (answer := reference()) is None or not answer.can_be_joined:
                continue
            others_key = answer.idempotency_key
            if (again and not (key and others_key and key != others_key)) or (key and key == others_key):
                return answer
        answer = SharedAnswer(self._serving, generations, wire, key, prompts)
        same.append(ref(answer))
        return answer

    def _forget_those_that_are_over(self) -> None:
        for asked, references in list(self._open.items()):
            references[:] = [one for one in references if (answer := one()) is not None and not answer.over]
            if not references:
                del self._open[asked]


def _retries(request: Request) -> int:
    """How often the client says that it has tried before."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isascii() and count.isdecimal() and len(count) < 10 else 0
