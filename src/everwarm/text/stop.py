"""Stop strings in a stream: nothing that might be the beginning of one is let through before that is settled.

In: pieces of text, cut anywhere. Out: the text up to the first stop string, none of which is ever emitted.
"""

from collections.abc import Sequence


class StopMatcher:
    """Watches one stream of text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be emitted now. Once `matched` is set, the stream is over."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        self._held += text
        # The match that is complete first wins, of two that end together the longer: so pieces don't matter.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            emit, self._held = self._held[:at], ""
            return emit
        keep = self._undecided()
        emit, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return emit

    def flush(self) -> str:
        """The stream has ended: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
