"""How long a step takes by its number of rows, on this machine with this model: learned from every step of decode.

Attention is counted apart, because it grows with what lies before the rows; the rest depends on their number alone. Of
numbers of rows that were not measured lately, the time is taken from those that were, by the shape of a first guess.
"""

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
        self._measured: dict[
            int, tuple[float, int]
        ] = {}  # rows: seconds without attention, step of the last measurement
        self._curve: list[float] = []  # by rows; empty: has to be worked out
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
            self._curve = []

    def seconds(self, rows: int, depth: int) -> float:
        """What a step takes; only if something is known."""
        return self._rows_s(rows) + self._attention_s * depth

    def _rows_s(self, rows: int) -> float:
        if not self._curve:
            self._work_out()
        if rows <= MOST_ROWS:
            return self._curve[rows]
        return self._curve[MOST_ROWS] * rows / MOST_ROWS

    def _work_out(self) -> None:
        """Between two numbers of rows that were measured, and beyond them, the guess is stretched to fit."""
        self._age = 0
        oldest = self._steps - _FRESH_STEPS
        fresh = {rows: known for rows, known in self._measured.items() if known[1] >= oldest}
        self._measured = fresh or self._measured
        points = [(rows, known[0] / _guess(rows)) for rows, known in sorted(self._measured.items())]
        curve, at = [0.0], 0
        for rows in range(1, MOST_ROWS + 1):
            while at + 1 < len(points) and points[at + 1][0] <= rows:
                at += 1
            low, factor = points[at]
            if rows > low and at + 1 < len(points):
                high, above = points[at + 1]
                factor += (above - factor) * (rows - low) / (high - low)
            curve.append(factor * _guess(rows))
        self._curve = curve
