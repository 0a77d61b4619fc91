"""How long a step takes by its number of rows, on this machine with this model: learned from every step of decode.

Attention is counted apart, because it grows with what lies before the rows. The rest is how fast the machine is at the
moment, which all numbers of rows have in common, times what so many rows take relative to one, which stays. Of numbers
of rows that were never measured, the time is taken from those that were, by the shape of a first guess.
"""

import bisect

MOST_ROWS = 128
"""More rows take as long as prefill does: each the same."""

_SURPRISE = 1.5
"""A step that took more than so many times as long as expected, or as short, counts as such."""
_SPEED_WEIGHT = 0.25
"""A step that was not as expected is first of all a matter of how fast the machine is at the moment."""
_SHAPE_WEIGHT = 0.15
_FIRST_WEIGHT = 0.6
"""And to a smaller part one of its number of rows; the first time to a larger one."""


def _guess(rows: int) -> float:
    """Time of a step relative to that of one row: reading the weights, then products for each row."""
    return 0.88 + 0.12 * rows if rows <= 8 else 0.04 + 0.225 * rows


class RowCost:
    """Learns, and tells what a step will take."""

    def __init__(self) -> None:
        self._speed_s = 0.0  # of one row, now
        self._factors: dict[int, float] = {}  # by rows that were measured: relative to the guess
        self._known_rows: list[int] = []  # these, in order
        self._steps = 0
        self._attention_s = 0.0  # of a row for each token before it

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def took(self, rows: int, depth: int, seconds: float, attention_s: float) -> None:
        """A step of decode alone is over. `depth`: tokens that lay before its rows, added up over the rows."""
        if rows > MOST_ROWS:
            return
        rest, each = max(seconds - attention_s, 1e-9), attention_s / max(depth, 1)
        self._steps += 1
        if self._steps == 1:
            self._speed_s, self._attention_s = rest / _guess(rows), each
            return
        self._attention_s += _SPEED_WEIGHT * (each - self._attention_s)
        surprise = min(max(rest / self._rows_s(rows), 1 / _SURPRISE), _SURPRISE)
        known = rows in self._factors
        self._factors[rows] = self._factor(rows) * surprise ** (_SHAPE_WEIGHT if known else _FIRST_WEIGHT)
        self._speed_s *= surprise**_SPEED_WEIGHT
        if not known:
            bisect.insort(self._known_rows, rows)

    def seconds(self, rows: int, depth: int) -> float:
        """What a step takes; only if something is known."""
        return self._rows_s(rows) + self._attention_s * depth

    def _rows_s(self, rows: int) -> float:
        if rows > MOST_ROWS:
            return self._rows_s(MOST_ROWS) * rows / MOST_ROWS
        return self._speed_s * self._factor(rows) * _guess(rows)

    def _factor(self, rows: int) -> float:
        """Between two numbers of rows that were measured, and beyond them, the guess is stretched to fit."""
        factors, known = self._factors, self._known_rows
        if (factor := factors.get(rows)) is not None:
            return factor
        above = bisect.bisect_left(known, rows)
        if not known:
            return 1.0
        if above in (0, len(known)):
            return factors[known[max(0, above - 1)]]
        low, high = known[above - 1], known[above]
        return factors[low] + (factors[high] - factors[low]) * (rows - low) / (high - low)
