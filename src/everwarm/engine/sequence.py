"""One request being computed: its tokens, how far its KV has come, and where its tokens go.

What is to be computed is `tokens[kv.length:]`: at first the prompt, later the token that was sampled last, after a
preemption what was lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from everwarm.engine.admission import Room
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
    propose: Callable[[], list[int]] | None = None  # a draft: tokens that may come next, verified in one step
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

    def draft(self) -> list[int]:
        """Tokens that may come next, no more than the KV has room for."""
        if self.propose is None or self.turn.kv.state != GONE:  # a state can't be taken back
            return []
        return self.propose()[: max(0, self.turn.kv.capacity - len(self.tokens))]

    @property
    def priority(self) -> int:
        """The greater goes first."""
        return self.room.priority
