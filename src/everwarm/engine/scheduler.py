"""Which rows are computed in the next step.

Everyone who decodes gets one row. The rest is prefill, of whoever has had least of it so far, the more important first:
a short prompt does not wait for a long one. While someone decodes, a step takes no longer than `STEP_S`: the chunk of
prefill follows the speed that was measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from everwarm.engine.sequence import Sequence

MOST_ROWS = 512
"""Of prefill in one step: products run at full speed, activations stay small."""

LEAST_ROWS = 32
TILE_ROWS = 8
"""What the kernels compute at a time: fewer take as long."""

STEP_S = 0.115
"""A person reads on without noticing; a chunk this long still runs near full speed."""


@dataclass(frozen=True, slots=True)
class Part:
    """So many rows of a sequence."""

    sequence: Sequence
    rows: int

    @property
    def reaches_end(self) -> bool:
        """Whether a token can be sampled after these rows."""
        return self.rows == self.sequence.pending


class Scheduler:
    """Chooses, and learns how long a row of prefill takes."""

    def __init__(self, most_rows: int = MOST_ROWS, step_s: float = STEP_S) -> None:
        self._most_rows = most_rows
        self._step_s = step_s
        self._row_s: float | None = None

    def choose(self, running: Iterable[Sequence]) -> list[Part]:
        ready = sorted(running, key=lambda one: (-one.priority, one.computed, one.arrival))
        batch = [Part(one, 1) for one in ready if one.pending == 1]
        room = self._room(bool(batch))
        for one in ready:
            if one.pending > 1 and room > 0:
                batch.append(Part(one, min(room, one.pending)))
                room -= batch[-1].rows
        return batch

    def took(self, batch: list[Part], seconds: float) -> None:
        """A step is over."""
        rows = sum(part.rows for part in batch if part.rows > 1)
        if rows >= LEAST_ROWS:
            each = seconds / rows
            self._row_s = each if self._row_s is None else 0.5 * self._row_s + 0.5 * each

    def _room(self, someone_decodes: bool) -> int:
        if not someone_decodes or self._row_s is None:
            return self._most_rows if not someone_decodes else min(self._most_rows, 4 * LEAST_ROWS)
        rows = int(self._step_s / self._row_s) // TILE_ROWS * TILE_ROWS
        return max(LEAST_ROWS, min(self._most_rows, rows))
