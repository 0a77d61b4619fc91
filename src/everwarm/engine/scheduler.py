"""Which rows are computed in the next step.

Everyone who decodes gets one row. The rest is prefill, of whoever has had least of it so far, the more important first:
a short prompt does not wait for a long one. While someone decodes, a step takes no longer than `STEP_S`: the chunk of
prefill follows the speed that was measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from everwarm.engine.sequence import Sequence

MOST_ROWS = 512
"""Of prefill in one step: products run at full speed, activations stay small."""

LEAST_ROWS = 32
TILE_ROWS = 8
"""What the kernels compute at a time: fewer take as long."""

STEP_S = 0.115
"""A person reads on without noticing; a chunk this long still runs near full speed."""


class Kind(Enum):
    """What a part of a step is for."""

    PREFILL = "prefill"  # tokens that are known
    DECODE = "decode"  # the token that was sampled last, and perhaps a draft of what follows it


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence in a step: tokens that it has, then those of a draft."""

    sequence: Sequence
    kind: Kind
    known: int  # rows of tokens that the sequence has
    logits_rows: int = 0  # rows, from the end, after which a token is sampled
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.known + len(self.draft)


def decode(sequence: Sequence) -> Part:
    draft = tuple(sequence.draft())
    return Part(sequence, Kind.DECODE, 1, 1 + len(draft), draft)


def prefill(sequence: Sequence, most: int) -> Part:
    rows = min(most, sequence.pending)
    return Part(sequence, Kind.PREFILL, rows, int(rows == sequence.pending))


class Scheduler:
    """Chooses, and learns how long a row of prefill takes."""

    def __init__(self, most_rows: int = MOST_ROWS, step_s: float = STEP_S) -> None:
        self._most_rows = most_rows
        self._step_s = step_s
        self._row_s: float | None = None

    def choose(self, running: Iterable[Sequence]) -> list[Part]:
        ready = sorted(running, key=lambda one: (-one.priority, one.computed, one.arrival))
        batch = [decode(one) for one in ready if one.pending == 1]
        room = self._room(bool(batch))
        for one in ready:
            if one.pending > 1 and room > 0:
                batch.append(prefill(one, room))
                room -= batch[-1].rows
        return batch

    def took(self, batch: list[Part], seconds: float) -> None:
        """A step is over."""
        rows = sum(part.rows for part in batch if part.kind is Kind.PREFILL)
        if rows >= LEAST_ROWS:
            each = seconds / rows
            self._row_s = each if self._row_s is None else 0.5 * self._row_s + 0.5 * each

    def _room(self, someone_decodes: bool) -> int:
        if not someone_decodes or self._row_s is None:
            return self._most_rows if not someone_decodes else min(self._most_rows, 4 * LEAST_ROWS)
        rows = int(self._step_s / self._row_s) // TILE_ROWS * TILE_ROWS
        return max(LEAST_ROWS, min(self._most_rows, rows))
