"""Which rows are computed in the next step.

Everyone who decodes gets one row, and more if a draft is worth its time. The rest is prefill, of whoever has had least
of it so far, the more important first. Prompts that are nearly done (most of them were in the cache) go before all
others: they take little, and their first
token is what somebody waits for.

The budget of a step is a time, because what a row takes differs a hundredfold between models: so long, and no longer,
does a newcomer wait for the step that runs. The chunk of prefill follows the speed that was measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from everwarm.engine.drafts.plan import MOST_DRAFT, STEP_S, lengths
from everwarm.engine.drafts.row_cost import RowCost
from everwarm.engine.sequence import Sequence

MOST_ROWS = 512
"""Of prefill in one step: products run at full speed, activations stay small."""

ALONE_S = 0.25
"""Of a step in which nobody but those who prefill waits. A chunk this long runs at full speed on all but the largest
models; a newcomer hardly notices."""
LEAST_ALONE = 32
"""Rows of such a step, however long they take: a large model computes fewer hardly sooner."""
FULL_ROWS = 32
"""Steps of twice as many or more are a multiple of it: what kernels and blocks leave over at the end of a chunk costs
up to 3 %."""

LEAST_ROWS = 16
"""Of prefill in a step in which someone decodes, which takes `STEP_S`."""
TILE_ROWS = 8
"""What the kernels compute at a time: fewer take as long."""

FIRST_ROWS = 128
"""Of the first step, while nothing is known."""
MEASURED_ROWS = 16
"""A step with fewer says little about the time of a row."""

IDLE_S = 0.05
"""Of a step that is computed ahead, while nobody waits for anything; a single row may take longer."""

FEW_ROWS = 64
"""A prompt with so little left goes first. It counts as somebody who waits for a token."""


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


def decode(sequence: Sequence, draft: tuple[int, ...] = ()) -> Part:
    return Part(sequence, Kind.DECODE, 1, 1 + len(draft), draft)


def prefill(sequence: Sequence, most: int) -> Part:
    rows = min(most, sequence.in_one_step)
    return Part(sequence, Kind.PREFILL, rows, int(rows == sequence.pending))


class Scheduler:
    """Chooses, and learns how long rows take."""

    def __init__(self, most_rows: int = MOST_ROWS, step_s: float = STEP_S, alone_s: float = ALONE_S) -> None:
        self._most_rows = most_rows
        self._step_s = step_s
        self._alone_s = alone_s
        self._row_s: float | None = None
        self._idle_rows = TILE_ROWS
        self._row_cost = RowCost()

    def choose(self, running: Iterable[Sequence]) -> list[Part]:
        there = list(running)
        busy = [one for one in there if not one.idle]
        if there and not busy:
            return [prefill(there[0], self._idle_rows)]
        ready = sorted(busy, key=lambda one: (-one.priority, one.computed, one.arrival))
        batch = [decode(one) for one in ready if one.pending == 1]
        waiting = [one for one in ready if one.pending > 1]
        nearly = [one for one in waiting if one.pending <= FEW_ROWS]
        left = self._rows(someone_waits=bool(batch) or (len(nearly) < len(waiting) and bool(nearly)))
        left -= sum(part.rows for part in batch) % TILE_ROWS  # a tile that is begun takes as long as a whole one
        # At most half of a step for those who are nearly done: a stream of them can't starve the others.
        first = max(left // 2, FEW_ROWS) if len(nearly) < len(waiting) else left
        for one in nearly:
            if one.pending <= first:
                batch.append(prefill(one, first))
                first -= batch[-1].rows
                left -= batch[-1].rows
        chosen = {id(part.sequence) for part in batch}
        for one in waiting:
            if left > 0 and id(one) not in chosen:
                batch.append(prefill(one, left))
                left -= batch[-1].rows
        return self._with_drafts(batch)

    def _with_drafts(self, batch: list[Part]) -> list[Part]:
        """Those who decode, with as much of their drafts as is worth its time."""
        proposals = [
            (part.sequence.turn.kv.length, part.sequence.proposal(MOST_DRAFT))
            for part in batch
            if part.kind is Kind.DECODE
        ]
        if not any(proposal.tokens for _, proposal in proposals):
            return batch
        other_rows = sum(part.rows for part in batch if part.kind is Kind.PREFILL)
        chosen = lengths(proposals, other_rows, self._row_cost)
        drafted = [
            decode(part.sequence, tuple(proposal.tokens[:count])) if count else part
            for part, (_, proposal), count in zip(batch, proposals, chosen, strict=False)
        ]
        return drafted + batch[len(drafted) :]

    def took(self, batch: list[Part], seconds: float, attention_s: float = 0.0) -> None:
        """A step is over, of which attention took a part."""
        if batch[0].sequence.idle:
            if seconds > IDLE_S:
                self._idle_rows = max(1, self._idle_rows // 2)
            elif seconds < IDLE_S / 2 and batch[0].rows == self._idle_rows:
                self._idle_rows = min(self._most_rows, 2 * self._idle_rows)
            return
        rows = sum(part.rows for part in batch if part.kind is Kind.PREFILL)
        if not rows:
            rows = sum(part.rows for part in batch)
            depth = sum(part.rows * part.sequence.turn.kv.length for part in batch)
            self._row_cost.took(rows, depth, seconds, attention_s)
        elif rows >= MEASURED_ROWS:
            each = seconds / rows
            self._row_s = each if self._row_s is None else 0.5 * self._row_s + 0.5 * each

    def _rows(self, *, someone_waits: bool) -> int:
        """Rows of prefill in a step. `someone_waits` for a token: the step has to be short."""
        least, seconds = (LEAST_ROWS, self._step_s) if someone_waits else (LEAST_ALONE, self._alone_s)
        if self._row_s is None:
            return min(self._most_rows, FIRST_ROWS)
        rows = int(seconds / self._row_s)
        tile = TILE_ROWS if someone_waits or rows < 2 * FULL_ROWS else FULL_ROWS
        return max(least, min(self._most_rows, rows // tile * tile))
