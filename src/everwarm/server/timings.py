"""How long an answer took, and how far its prompt is, as llama.cpp's server tells its clients."""

import time
from typing import TYPE_CHECKING

from everwarm.events import Usage
from everwarm.server.wire import Json

if TYPE_CHECKING:
    from everwarm.server.active_request import ActiveRequest


class Timings:
    """The clock of one response. A wire starts it, and tells it of each token."""

    def __init__(self) -> None:
        self._started = self._first = self._last = time.perf_counter()
        self._tokens = 0

    def token(self) -> None:
        """A token has come."""
        self._last = time.perf_counter()
        if not self._tokens:
            self._first = self._last
        self._tokens += 1

    def told(self, usage: Usage) -> Json:
        """`timings`: the prompt takes until the first token, waiting included; the answer takes from then on, so that
        its speed is that of the tokens after the first.
        """
        prompt_ms, predicted_ms = 1e3 * (self._first - self._started), 1e3 * (self._last - self._first)
        computed, decoded = usage.prompt_tokens - usage.cached_tokens, max(0, self._tokens - 1)
        drafts = {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens}
        return {
            "cache_n": usage.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": _ratio(prompt_ms, computed),
            "prompt_per_second": _ratio(1e3 * computed, prompt_ms),
            "predicted_n": self._tokens,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": _ratio(predicted_ms, decoded),
            "predicted_per_second": _ratio(1e3 * decoded, predicted_ms),
        } | (drafts if usage.drafted_tokens else {})


class PromptProgress:
    """What a client is told that asked how far its prompt is (the first, if it sent several)."""

    def __init__(self, active: "ActiveRequest") -> None:
        self._active = active
        self._started = time.perf_counter()
        self._told: int | None = None  # tokens
        self.complete = False

    @property
    def is_known(self) -> bool:
        return self._active.progress is not None and self._active.receipt is not None

    def news(self, begun: bool) -> list[Json]:
        """Reports (`prompt_progress`) that are due; `begun`: the answer has begun, so the whole prompt is computed."""
        progress, receipt = self._active.progress, self._active.receipt
        if self.complete or progress is None or receipt is None:
            return []
        total, cached = progress.prompt_tokens, receipt.cached_tokens
        reached = [cached] if self._told is None else []
        self.complete = begun
        done = total if begun else progress.computed
        if done > (cached if self._told is None else self._told):
            reached.append(done)
        self._told = max(done, cached)
        time_ms = round(1e3 * (time.perf_counter() - self._started))
        return [{"total": total, "cache": cached, "processed": each, "time_ms": time_ms} for each in reached]


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0
