"""One request being computed: its tokens, how far its KV has come, and where its tokens go.

What is to be computed is `tokens[kv.length:]`: at first the prompt, later the token that was sampled last, after a
preemption what was lost.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from everwarm.engine.admission import Room
from everwarm.engine.drafts.proposal import NOTHING, Proposal, Proposes
from everwarm.engine.sampler import SampledToken, Sampler
from everwarm.kv.index.pool import GONE
from everwarm.kv.turn import Alone, Turn

_arrivals = count()


class Output(Protocol):
    """Where the tokens of a sequence go. Called on the engine's thread, so it must be quick."""

    def accept(self, sampled: SampledToken) -> bool:
        """The next token; whether it is the last one."""

    def end(self, error: BaseException | None) -> None:
        """Called once, when the engine lets go of the sequence; by then it has its last token, unless it failed."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Made by whoever asks; from `Engine.submit` until `output.end` it belongs to the engine's thread."""

    turn: Turn | Alone
    room: Room
    tokens: list[int]
    sampler: Sampler
    output: Output
    proposer: Proposes | None = None  # of drafts: tokens that may come next, verified in one step
    most_tokens: int | None = None  # of prompt and answer: no draft goes beyond them
    passes: int = 0  # steps that gave tokens
    drafted: int = 0  # rows that were computed for drafts
    accepted: int = 0  # of these right
    computed: int = 0  # tokens of prefill so far, for fairness
    idle: bool = False  # computed only while nobody else is there
    cancelled: bool = False
    cancelled_at: int = 0  # the engine's step
    arrival: int = field(default_factory=lambda: next(_arrivals))

    @property
    def pending(self) -> int:
        """Tokens that have to be computed before the next one can be sampled."""
        return len(self.tokens) - self.turn.kv.length

    @property
    def in_one_step(self) -> int:
        """Of these, as many as a step may compute at once."""
        stop = self.turn.stop
        return self.pending if stop is None else min(self.pending, stop - self.turn.kv.length)

    def proposal(self, most: int) -> Proposal:
        """Tokens that may come next: no more than the KV has room for, and than can still be asked for."""
        if self.proposer is None or self.turn.kv.state != GONE:  # a state can't be taken back
            return NOTHING
        most = min(most, self.turn.kv.capacity - len(self.tokens))
        if self.most_tokens is not None:
            most = min(most, self.most_tokens - len(self.tokens) - 1)
        return self.proposer.propose(self.tokens, most) if most > 0 else NOTHING

    @property
    def priority(self) -> int:
        """The greater goes first."""
        return self.room.priority
