"""What a draft is before it is known how many of its rows are worth their time."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next, and how likely each is right."""

    tokens: list[int]
    chances: list[float]  # that a token and all before it are right: never rising
    sure: int = 0  # so many of the first are computed whatever they cost


NOTHING = Proposal([], [])


class Proposes(Protocol):
    """Proposes the next tokens of one sequence. All calls come from the engine's thread, so they must be quick."""

    def propose(self, tokens: list[int], most: int) -> Proposal:
        """What may follow all tokens of the sequence so far, at most so many tokens."""

    def accepted(self, tokens: list[int]) -> None:
        """These tokens were sampled: one or more of them, since the last call."""
