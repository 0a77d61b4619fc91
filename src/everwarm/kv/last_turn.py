"""What an agent's last request has reused, and where it left the history. It is kept with the agent, so that
`everwarm agents why` can explain it later, also after a restart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.types import Run

MOST_KEPT = 1 << 16
"""Characters that are kept of what a history said from a difference on."""
MOST_TOKEN_S = 3600.0
"""Seconds that computing one token can take: what claims more was not measured here."""
MOST_BEFORE = 400
"""Characters that are kept of what stands before it."""


@dataclass(frozen=True, slots=True)
class Left:
    """Where a prompt left the history: characters count from the beginning of the rendered text."""

    at: int  # so many characters are equal
    begin: int  # where `text` begins
    text: str  # of the history as it was until then

    @staticmethod
    def of(runs: Sequence[Run], at: int) -> "Left":
        """`runs`: the history that a prompt has left after `at` characters."""
        begin = max(0, at - MOST_BEFORE)
        return Left(at, begin, "".join(run.text for run in runs)[begin : at + MOST_KEPT])


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a prompt was reused."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The last request of an agent, and the first one."""

    reuse: Reuse
    cause: str  # a `Cause`
    reason: str
    rules: tuple[str, ...] = ()  # those that have changed the prompt
    left: Left | None = None
    first: Reuse | None = None  # of the agent's first request, if that was another one
    token_s: float | None = None  # seconds that computing a token of its prompts took, when many were computed

    def as_json(self) -> dict[str, Any]:
        left, first = self.left, self.first
        return {
            "prompt_tokens": self.reuse.prompt_tokens,
            "cached_tokens": self.reuse.cached_tokens,
            "cause": self.cause,
            "reason": self.reason,
            "rules": list(self.rules),
            "left": None if left is None else [left.at, left.begin, left.text],
            "first": None if first is None else [first.prompt_tokens, first.cached_tokens],
            "token_s": self.token_s,
        }

    @staticmethod
    def from_json(said: object) -> "LastTurn | None":
        """None if it was not kept, or is not what `as_json` gave: it only explains, so a history is read without it."""
        try:
            assert isinstance(said, Mapping)
            left, first = said["left"], said["first"]
            turn = LastTurn(
                Reuse(int(said["prompt_tokens"]), int(said["cached_tokens"])),
                str(said["cause"]),
                str(said["reason"]),
                tuple(str(rule) for rule in said["rules"]),
                None if left is None else Left(int(left[0]), int(left[1]), str(left[2])),
                None if first is None else Reuse(int(first[0]), int(first[1])),
                None if (token_s := said.get("token_s")) is None else float(token_s),
            )
        except (AssertionError, LookupError, TypeError, ValueError, OverflowError):
            return None
        if turn.token_s is not None and not 0 < turn.token_s < MOST_TOKEN_S:
            return None
        if turn.left is not None and not 0 <= turn.left.begin <= turn.left.at:
            return None
        return turn
