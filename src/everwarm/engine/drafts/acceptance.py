"""How often the next token of a draft is right, learned from what was sampled.

What matters is how many tokens before it are the same in the text and in the place that the draft is read from, and how
many such places agree. Every token teaches, also where nothing was computed for a draft: so it costs nothing to learn
that drafts are bad, or that they have become good.
"""

FROM = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Matches from so many tokens on belong to one class."""
_FIRST = (0.15, 0.25, 0.4, 0.55, 0.65, 0.75, 0.82, 0.88, 0.92, 0.95)
"""How often they are right while nothing is known."""
_AGREE = (1.0, 1.05, 0.6, 0.25)
"""The same, by support: one place says so, several and all of them, at least half of them, fewer."""
LONGEST = 64
SUPPORTS = len(_AGREE)
CLASS = [SUPPORTS * max(0, sum(match >= begin for begin in FROM) - 1) for match in range(LONGEST + 1)]
"""The class of a match by its length. A token's kind is its class plus its support."""

_TRUST = 4.0
"""What is known of all sequences counts as much as so many tokens of this one."""
_MOST_OWN, _MOST_SHARED = 32.0, 512.0
"""Of so many tokens at most: what was learned long ago fades."""


class Acceptance:
    """Of one sequence, or of all of them together."""

    def __init__(self, shared: "Acceptance | None" = None) -> None:
        self._shared = shared
        self._most = _MOST_OWN if shared is not None else _MOST_SHARED
        first = [min(0.98, chance * agree) for chance in _FIRST for agree in _AGREE]
        self._tried = [0.0 if shared is not None else _TRUST for _ in first]
        self._right = [0.0 if shared is not None else _TRUST * chance for chance in first]

    def chance(self, kind: int) -> float:
        """That a token of this kind is right, if those before it are."""
        right, tried = self._right[kind], self._tried[kind]
        if self._shared is None:
            return right / tried
        return (_TRUST * self._shared.chance(kind) + right) / (_TRUST + tried)

    def learn(self, kind: int, right: bool) -> None:
        """A token of this kind was right, or it was not."""
        self._tried[kind] += 1.0
        self._right[kind] += right
        if self._tried[kind] > self._most:
            self._tried[kind] *= 0.5
            self._right[kind] *= 0.5
        if self._shared is not None:
            self._shared.learn(kind, right)
