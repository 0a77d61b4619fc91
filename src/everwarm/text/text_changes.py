"""Two prompts, an old and a new one: where they first differ, which lines are the same behind that, and how many tokens
of the new one a rule or another order of its lines would have saved.

What is saved is an estimate. Lines are aligned as `diff` aligns them; a line counts the share of its run's tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import accumulate, combinations

from everwarm.text.prompt_rules import RULES, Rule
from everwarm.types import Run

MOST_LINES = 4000
"""Lines that are aligned, of each text. What stands behind them counts as different."""
AROUND = 48
"""Characters that are shown before and behind a difference."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Both texts around their first difference, on one line each."""

    character: int  # of the text, where they differ
    line: int  # the same, counted from 1
    old: str
    new: str
    column: int  # of the difference, in `old` and `new`


@dataclass(frozen=True, slots=True)
class Advice:
    """Rules that would have let more be reused, and how many tokens."""

    rules: tuple[str, ...]
    saved_tokens: int


class NewText:
    """The text of a prompt, and how many tokens a part of it has."""

    def __init__(self, runs: Sequence[Run], most_tokens: int) -> None:
        """The first `most_tokens` tokens of these runs."""
        self._begins, self._tokens = [0], [0.0]  # where each run begins
        texts: list[str] = []
        left = most_tokens
        for run in runs:
            if left <= 0:
                break
            share = min(1.0, left / run.tokens) if run.tokens else 1.0
            texts.append(run.text[: round(share * len(run.text))])
            self._begins.append(self._begins[-1] + len(texts[-1]))
            self._tokens.append(self._tokens[-1] + share * run.tokens)
            left -= run.tokens
        self.text = "".join(texts)

    def tokens(self, begin: int, end: int) -> float:
        """Of these characters, about."""
        return self._before(end) - self._before(begin)

    def _before(self, at: int) -> float:
        run = min(max(0, bisect_right(self._begins, at) - 1), len(self._begins) - 2)
        if run < 0:
            return 0.0
        size = self._begins[run + 1] - self._begins[run]
        share = (at - self._begins[run]) / size if size else 1.0
        return self._tokens[run] + min(1.0, share) * (self._tokens[run + 1] - self._tokens[run])


class TextChanges:
    """What differs between an old text and a new prompt."""

    def __init__(self, old: str, new: NewText, user: int | None = None) -> None:
        """`user`: where the first message of the user begins in the new text, if that is known."""
        self.at = common_characters(old, new.text)
        self._old, self._new = old, new
        self._user = len(new.text) if user is None else user
        self._begin = new.text.rfind("\n", 0, self.at) + 1  # of the line that differs, in both
        self._old_lines = old[self._begin :].split("\n")[:MOST_LINES]
        self._new_lines = new.text[self._begin :].split("\n")[:MOST_LINES]

    @property
    def differ(self) -> bool:
        """Whether they part. If one goes on where the other ends, they don't."""
        return self.at < min(len(self._old), len(self._new.text))

    def excerpt(self) -> Excerpt:
        """What stands around the first difference."""
        new, at = self._new.text, self.at
        begin = max(0, at - AROUND)
        before = ("..." if begin else "") + new[begin:at]
        old, new_rest = (
            text[at : at + AROUND] + ("..." if len(text) > at + AROUND else "") for text in (self._old, new)
        )
        line = new.count("\n", 0, at) + 1
        return Excerpt(at, line, one_line(before + old), one_line(before + new_rest), len(before))

    def same_tokens(self) -> int:
        """Tokens behind the first difference whose lines are in the old text as well, in the same order. They would
        have been reused if everything that changes stood behind them.
        """
        return round(sum(self._tokens(number) for tag, _, new in self._steps if tag == "equal" for number in new))

    def advice(self, active: Sequence[str] = ()) -> Advice | None:
        """The fewest rules that save most, of those that are not active."""
        best: Advice | None = None
        names = [name for name in RULES if name not in active]
        for count in range(1, len(names) + 1):
            for chosen in combinations(names, count):
                saved = round(self._saved_by(chosen))
                if saved > (best.saved_tokens if best else 0):
                    best = Advice(chosen, saved)
        return best

    def _saved_by(self, names: Sequence[str]) -> float:
        """Tokens of equal lines from the first difference up to one that these rules don't explain. Moved lines go to
        the user's first message, so nothing from its beginning on is saved.
        """
        old_taken = [any(taken) for taken in zip(*(self._taken[name][0] for name in names), strict=True)]
        new_taken = [any(taken) for taken in zip(*(self._taken[name][1] for name in names), strict=True)]
        saved = 0.0
        for tag, old, new in self._steps:
            if tag != "equal":
                if not all(old_taken[number] for number in old) or not all(new_taken[number] for number in new):
                    break
                continue
            for number in new:
                if self._begins[number] >= self._user:
                    return saved
                saved += 0.0 if new_taken[number] else self._tokens(number)
        return saved

    @cached_property
    def _steps(self) -> list[tuple[str, range, range]]:
        """Lines in their order: those that are equal, and those that are not, of both texts."""
        matcher = SequenceMatcher(None, self._old_lines, self._new_lines)
        return [(tag, range(a, b), range(c, d)) for tag, a, b, c, d in matcher.get_opcodes()]

    @cached_property
    def _taken(self) -> dict[str, tuple[list[bool], list[bool]]]:
        """Which lines each rule takes out, of the old text and of the new one."""
        return {name: (_taken(self._old_lines, rule), _taken(self._new_lines, rule)) for name, rule in RULES.items()}

    @cached_property
    def _begins(self) -> list[int]:
        """Where the lines of the new text begin."""
        return list(accumulate((len(line) + 1 for line in self._new_lines), initial=self._begin))

    def _tokens(self, number: int) -> float:
        begin, end = self._begins[number], self._begins[number + 1]
        return self._new.tokens(max(self.at, begin), min(len(self._new.text), end))


def _taken(lines: list[str], rule: Rule) -> list[bool]:
    """Which lines a rule takes out: among the others, or as a block of its own."""
    return [taken or rule.takes([line])[0] for taken, line in zip(rule.takes(lines), lines, strict=True)]


def common_characters(one: str, other: str) -> int:
    """Characters that two texts have in common from their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # the longest beginning that is equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def one_line(text: str) -> str:
    """A text on one line: characters that would end it, or move on it, are shown as one visible character each."""
    return "".join("↵" if letter == "\n" else letter if letter.isprintable() else "·" for letter in text)
