"""Token ids of a prompt that goes on from a history: what was computed keeps its ids, only new text is tokenised.

In: the segments of a prompt, and the runs and ids of what an agent has said and heard so far. Out: ids, their runs, and
where the prompt leaves the history, if it does. Text is split at special tokens only: inside a text, a tokenizer may
join what two turns have written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from everwarm.text.detokenizer import Detokenizer
from everwarm.text.tokenizer import Tokenizer
from everwarm.types import Run, Segment


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt."""

    ids: list[int]
    runs: tuple[Run, ...]
    diverged_at_char: int | None = None  # of the rendered text; None if it goes on from all of the history
    kept_runs: int = 0  # of the history


def tokenise(
    tokenizer: Tokenizer,
    wanted: Sequence[Segment],
    history: Sequence[Run] = (),
    history_ids: Sequence[int] = (),
    most: int | None = None,
) -> Prompt:
    """`wanted` is made by `wanted_runs`; `history` has neighbouring texts merged, too. Once there are more than `most`
    ids, the rest may be left out.
    """
    same = sum(1 for _ in takewhile(_equal, zip(history, wanted, strict=False)))
    runs = list(history[:same])
    ids = list(history_ids[: sum(run.tokens for run in runs)])
    for number in range(same, len(wanted)):
        if most is not None and len(ids) > most:
            break
        left = None if most is None else most - len(ids) + 1  # the token before counts in `_encode`, too
        new = _encode(tokenizer, wanted[number - 1] if number else None, wanted[number], left)
        runs.append(Run(wanted[number].text, wanted[number].special, len(new)))
        ids += new
    diverged = None
    if same < len(history) and not _goes_on(history[same:], wanted[same:]):
        diverged = sum(len(run.text) for run in history[:same])
        if same < len(wanted) and history[same].special == wanted[same].special:
            pairs = zip(history[same].text, wanted[same].text, strict=False)
            diverged += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Prompt(ids, tuple(runs), diverged, same)


def goes_on(history: Sequence[Run], wanted: Sequence[Segment]) -> bool:
    """Whether a prompt begins with all of a history that is not empty."""
    return 0 < len(history) <= len(wanted) and all(map(_equal, zip(history, wanted, strict=False)))


def wanted_runs(segments: Sequence[Segment], add_bos: bool) -> list[Segment]:
    """A prompt as histories spell it: neighbouring texts as one, a BOS that no template wrote as an empty special."""
    out = [Segment("", special=True)] if add_bos else []
    for segment in segments:
        if out and not segment.special and not out[-1].special:
            out[-1] = Segment(out[-1].text + segment.text)
        else:
            out.append(segment)
    return out


def answer_runs(tokenizer: Tokenizer, ids: Sequence[int], continuing: bool) -> tuple[Run, ...]:
    """Runs of generated tokens: control tokens alone, the text between them as one reads it."""
    names = {number: text for text, number in tokenizer.special_tokens.items()}
    runs: list[Run] = []
    start = 0
    for end in range(len(ids) + 1):
        if end < len(ids) and ids[end] not in names:
            continue
        if end > start:
            detokenizer = Detokenizer(tokenizer, continuing=continuing)
            text = "".join(detokenizer.push(token) for token in ids[start:end]) + detokenizer.flush()
            runs.append(Run(text, False, end - start))
        if end < len(ids):
            runs.append(Run(names[ids[end]], True, 1))
        start, continuing = end + 1, False
    return tuple(runs)


def _goes_on(history: Sequence[Run], wanted: Sequence[Segment]) -> bool:
    """Whether the texts that are left of a history and of a prompt differ in length only."""
    if not wanted:
        return True
    if history[0].special or wanted[0].special:
        return False
    old, new = history[0].text, wanted[0].text
    return (len(wanted) == 1 and old.startswith(new)) or (len(history) == 1 and new.startswith(old))


def _equal(pair: tuple[Run, Segment]) -> bool:
    return pair[0].text == pair[1].text and pair[0].special == pair[1].special


def _encode(tokenizer: Tokenizer, before: Segment | None, segment: Segment, most: int | None) -> list[int]:
    """Ids of one segment; what a tokenizer does to a text depends on the special token before it."""
    if segment.special and not segment.text:
        return tokenizer.encode([], add_bos=True)
    if before is None or segment.special:
        return tokenizer.encode([segment], most=most)
    if not before.text:
        return tokenizer.encode([segment], add_bos=True, most=most)[1:]
    return tokenizer.encode([before, segment], most=most)[1:]
