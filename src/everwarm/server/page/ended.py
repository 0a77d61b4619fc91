"""What became of requests in the last hour, for those who look at the page: a bounded ring.

A request is written down when it is over, which takes microseconds; nothing happens while tokens are computed.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from everwarm.server.log import Line

KEPT_S = 3600.0
MOST_KEPT = 4000
"""Requests of all tenants together."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that generated something."""

    at: float  # seconds since 1970
    tenant: str
    agent: str
    route: str
    status: int
    tier: str
    cause: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float
    between_s: float | None  # median of the times between two tokens
    slow_s: float | None  # that 95 of 100 of them are below

    def as_json(self) -> dict[str, Any]:
        return {
            "at": round(self.at, 3),
            "agent": self.agent,
            "route": self.route,
            "status": self.status,
            "tier": self.tier,
            "cause": self.cause,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_s": _rounded(self.ttft_s),
            "total_s": _rounded(self.total_s),
            "between_s": _rounded(self.between_s),
            "slow_s": _rounded(self.slow_s),
        }


class EndedRequests:
    """The last hour, the oldest first. Used on the event loop only."""

    def __init__(self) -> None:
        self._kept: deque[Ended] = deque(maxlen=MOST_KEPT)
        self.number = 0  # how many there have been
        self.written: Counter[str] = Counter()  # tokens of answers, by tenant
        self.computed: Counter[str] = Counter()  # tokens of prompts that were not cached

    def observe(self, line: Line) -> None:
        """A request is over."""
        outcome = line.outcome
        if outcome is None or outcome.joined:
            return
        times = sorted(outcome.inter_token_s)
        ended = Ended(
            time.time(),
            outcome.tenant,
            outcome.agent,
            line.route,
            line.status,
            outcome.tier,
            outcome.cause,
            outcome.prompt_tokens,
            outcome.cached_tokens,
            outcome.completion_tokens,
            outcome.ttft_s,
            outcome.total_s,
            times[len(times) // 2] if times else None,
            times[int(len(times) * 0.95)] if times else None,
        )
        self._kept.append(ended)
        self.number += 1
        self.written[ended.tenant] += ended.completion_tokens
        self.computed[ended.tenant] += ended.prompt_tokens - ended.cached_tokens

    def of(self, tenant: str, since: int = 0) -> list[dict[str, Any]]:
        """A tenant's requests of the last hour; only those after the first `since` of all."""
        oldest, new = time.time() - KEPT_S, self.number - since
        found: Iterable[Ended] = self._kept if new >= len(self._kept) else list(self._kept)[-new:] if new else ()
        return [ended.as_json() for ended in found if ended.tenant == tenant and ended.at >= oldest]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
