"""Lines in the log for those who wait: when a request begins, and how far a long prompt is.

Whoever starts an agent with 20,000 tokens of instructions on a small machine waits for minutes; the log shows that
something happens, how fast, and how long it will take.
"""

import logging
import time

from everwarm.llm import Generation

_log = logging.getLogger("everwarm.progress")

EVERY_S = 10.0


class ProgressLog:
    """The lines of one request, until its first token."""

    def __init__(self, request_id: str, route: str, agent: str, every_s: float = EVERY_S) -> None:
        self._id, self._every_s = request_id, every_s
        self._next = time.perf_counter() + every_s
        self._last: tuple[float, int] | None = None  # when, and how many tokens had been computed
        _log.info("id=%s begins route=%s agent=%s", request_id[:12], route, _word(agent))

    def due_s(self) -> float:
        """Seconds until the next line."""
        return max(0.0, self._next - time.perf_counter())

    def write(self, generation: Generation) -> None:
        """Say how far the prompt is, if a line is due."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._every_s
        progress = generation.progress
        if progress is None:
            _log.info("id=%s waits for its turn, or for memory", self._id[:12])
            return
        done, total = progress.computed, progress.prompt_tokens
        speed, left = "", ""
        if self._last is not None and done > self._last[1]:
            rate = (done - self._last[1]) / (now - self._last[0])
            speed, left = f" tok_s={rate:.0f}", f" left_s={(total - done) / rate:.0f}"
        self._last = now, done
        _log.info("id=%s prefill tokens=%d of=%d%s%s", self._id[:12], done, total, speed, left)


def _word(name: str) -> str:
    """Names are a client's text: nothing of them may look like another field or line."""
    return name if name.isascii() and name.isprintable() and " " not in name and "=" not in name else repr(name)[:80]
