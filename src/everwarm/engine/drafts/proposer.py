"""What proposes the next tokens of a sequence: its constraint, its caller, or what was said before."""

from collections.abc import Callable
from dataclasses import dataclass

from everwarm.engine.drafts.lookup import Lookup
from everwarm.engine.drafts.proposal import NOTHING, Proposal
from everwarm.engine.sampler import Sampler

Drafter = Callable[[list[int]], list[int]]
"""Given the tokens so far, proposes some that may come next; on the engine's thread, so it must be quick."""


@dataclass(slots=True)
class Proposer:
    """Of one sequence. Forced tokens come first: they are certain. A caller's own drafter has the next word. The lookup
    may come later, from another thread.
    """

    sampler: Sampler
    drafter: Drafter | None = None
    lookup: Lookup | None = None

    def propose(self, tokens: list[int], most: int) -> Proposal:
        forced = self._forced()[:most]
        if self.drafter is not None and not forced:
            forced = self.drafter(tokens)[:most]
        further = NOTHING
        lookup = self.lookup
        if lookup is not None and len(forced) < most:
            further = lookup.propose(tokens, forced, most - len(forced))
        if not forced:
            return further
        return Proposal(forced + further.tokens, [1.0] * len(forced) + further.chances, len(forced))

    def accepted(self, tokens: list[int]) -> None:
        lookup = self.lookup
        if lookup is not None:
            lookup.accepted(tokens)

    def _forced(self) -> list[int]:
        try:
            return self.sampler.forced()
        except Exception:  # the sampler will fail in the same way, which ends this sequence and no other
            return []
