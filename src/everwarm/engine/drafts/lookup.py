"""Drafts for one sequence out of what was said before: in its own prompt and answer, and by its tenant's other agents.

The longest end of the text that was seen before is looked for, and what followed it there is proposed. Each token of a
draft has a chance, by how long the match before it is: a match grows with every token that is right.
"""

from collections.abc import Sequence

import numpy as np

from everwarm.engine.drafts.acceptance import CLASS, LONGEST, Acceptance
from everwarm.engine.drafts.proposal import NOTHING, Proposal
from everwarm.kernels import _native

LEAST_CHANCE = 0.03
"""Tokens that are less likely to be right are not proposed."""


class Lookup:
    """Belongs to one sequence. It is made on any thread, then used on the engine's."""

    def __init__(
        self, prompt: Sequence[int], context: int, acceptance: Acceptance, others: _native.Suffixes | None
    ) -> None:
        """`context`: tokens of prompt and answer, at most. `others`: what other agents have said, if it may be used."""
        self._own = _native.Suffixes(max(1024, 2 * context - 1))
        self._own.extend(np.asarray(prompt, np.int32))
        self._stored = len(prompt)
        self._others = others
        self._acceptance = acceptance
        self._guess: list[int] = []  # what was found last, drafted or not
        self._kinds: list[int] = []
        self._behind = 0  # so many tokens lie between the accepted ones and the guess

    def propose(self, tokens: list[int], ahead: list[int], most: int) -> Proposal:
        """What may follow the tokens and those `ahead`, which are certain."""
        for token in tokens[self._stored :]:
            self._own.append(token)
        self._stored = len(tokens)
        tail = tokens[-LONGEST:] + ahead
        match, found, support = self._own.draft(tail, most)
        if self._others is not None and match < LONGEST:
            theirs = self._others.draft(tail, most)
            if (theirs[0], len(theirs[1])) > (match, len(found)):
                match, found, support = theirs
        self._guess, self._behind = found, len(ahead)
        if not found:
            return NOTHING
        chance_of, chance = self._acceptance.chance, 1.0
        self._kinds = kinds = [CLASS[min(match + at, LONGEST)] + each for at, each in enumerate(support)]
        chances: list[float] = []
        for kind in kinds:
            chance *= chance_of(kind)
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return Proposal(found[: len(chances)], chances)

    def accepted(self, tokens: list[int]) -> None:
        """These tokens follow. They are stored when the next ones are proposed."""
        learn = self._acceptance.learn
        for token, guess, kind in zip(tokens[self._behind :], self._guess, self._kinds, strict=False):
            learn(kind, token == guess)
            if token != guess:
                break
        self._guess = []
