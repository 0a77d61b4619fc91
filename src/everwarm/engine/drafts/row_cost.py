"""How long a step takes by its number of rows, on this machine with this model: learned from every step of decode.

Attention is counted apart, because it grows with what lies before the rows; the rest depends on their number alone. Of
numbers of rows that were not measured lately, the time is taken from those that were, by the shape of a first guess.
"""

import bisect

MOST_ROWS = 128
"""More rows take as long as prefill does: each the same."""

_FRESH_STEPS = 512
"""What was measured longer ago is forgotten, so that one slow step can't rule out its number of rows for ever."""
_SURPRISE = 1.5
"""A step that took so many times as long as expected was held up by something else."""
_WEIGHT = 0.25


def _guess(rows: int) -> float:
    """Time of a step relative to that of one row: reading the weights, then products for each row."""
    return 0.88 + 0.12 * rows if rows <= 8 else 0.04 + 0.225 * rows


class RowCost:
    """Learns, and tells what a step will take."""

    def __init__(self) -> None:
        # By rows: seconds without attention, and the step of the last measurement.
        self._measured: dict[int, tuple[float, int]] = {}
        self._known_rows: list[int] = []  # those that were measured, in order
        self._factors: list[float] = []  # what each of them took relative to the guess
        self._worked_out: dict[int, float] = {}  # seconds by rows
        self._age = 0  # steps since then
        self._steps = 0
        self._attention_s = 0.0  # of a row for each token before it

    @property
    def known(self) -> bool:
        return bool(self._measured)

    def took(self, rows: int, depth: int, seconds: float, attention_s: float) -> None:
        """A step of decode alone is over. `depth`: tokens that lay before its rows, added up over the rows."""
        self._steps += 1
        self._age += 1
        if rows > MOST_ROWS:
            return
        each = attention_s / max(depth, 1)
        self._attention_s = each if self._steps == 1 else self._attention_s + _WEIGHT * (each - self._attention_s)
        rest = max(seconds - attention_s, 0.0)
        if self._measured:
            expected = self._rows_s(rows)
            rest = min(max(rest, expected / _SURPRISE), expected * _SURPRISE)
            known = self._measured.get(rows)
            mean = expected if known is None else known[0]
            weight = 0.5 if known is None else _WEIGHT
            rest = mean + weight * (rest - mean)
        self._measured[rows] = rest, self._steps
        if self._age >= 8 or len(self._measured) < 3:
            self._refresh()

    def seconds(self, rows: int, depth: int) -> float:
        """What a step takes; only if something is known."""
        return self._rows_s(rows) + self._attention_s * depth

    def _rows_s(self, rows: int) -> float:
        if rows > MOST_ROWS:
            return self._rows_s(MOST_ROWS) * rows / MOST_ROWS
        if (seconds := self._worked_out.get(rows)) is None:
            seconds = self._worked_out[rows] = self._factor(rows) * _guess(rows)
        return seconds

    def _factor(self, rows: int) -> float:
        """Between two numbers of rows that were measured, and beyond them, the guess is stretched to fit."""
        above = bisect.bisect_left(self._known_rows, rows)
        if above == len(self._known_rows):
            return self._factors[-1]
        if above == 0 or self._known_rows[above] == rows:
            return self._factors[above]
        low, high = self._known_rows[above - 1], self._known_rows[above]
        first, last = self._factors[above - 1], self._factors[above]
        return first + (last - first) * (rows - low) / (high - low)

    def _refresh(self) -> None:
        self._age = 0
        oldest = self._steps - _FRESH_STEPS
        self._measured = {rows: known for rows, known in self._measured.items() if known[1] >= oldest}
        self._known_rows = sorted(self._measured)
        self._factors = [self._measured[rows][0] / _guess(rows) for rows in self._known_rows]
        self._worked_out = {}
