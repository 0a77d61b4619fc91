"""Exact replay: an answer that comes back in another dress keeps the tokens that it was sampled with.

Clients send an answer back as a message, which the chat template writes anew: calls are serialised again, ends are
trimmed. That says the same with other tokens, and everything from there on would be computed again. So where a prompt
reaches a place at which an answer was given once, what stands there is read as answers are read. If it says the same,
it gets the answer's own spelling back.

In: the runs of a prompt, and a search for past answers. Out: the runs, respelt. Only the spelling changes: the order of
keys, spaces, escapes, ids, blank ends. A number of another kind, a duplicate key, any edit: the prompt stays as it is.
Reasoning that the client or the template has left out makes another meaning, so it never comes back.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everwarm.events import Answer
from everwarm.kv.answers import Answered
from everwarm.kv.manifest import TextDigest
from everwarm.text.history import wanted_runs
from everwarm.text.output_parser import OutputParser
from everwarm.types import Run, Segment

MOST_LONGER = 64
"""No other spelling is so many times as long: what is longer need not be read."""

Reader = Callable[[Sequence[Segment], bool], OutputParser]
"""Makes a parser for what follows a text. With True it was written by the chat template: there is nothing to be lenient
about.
"""
Spelt = Run | Segment
Meaning = tuple[str, str, tuple[tuple[str, str], ...]]
"""Text, reasoning, and the calls with their arguments in one spelling."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A prompt in which past answers are spelt as they were sampled."""

    runs: list[Segment]
    respelt: int = 0  # answers that came in another spelling
    last: Answered | None = None  # the last answer that was found in it


def replay(
    runs: Sequence[Segment], ends: frozenset[str], find: Callable[[str], Iterable[Answered]], reader: Reader
) -> Replay:
    """`ends` are the control tokens that end an answer. `find` gives the answers behind a text with this digest."""
    out: list[Segment] = []
    found = Replay(out)
    digest, at = TextDigest(), 0
    next_end = [*_next_ends(runs, ends)]
    while at < len(runs):
        end = next_end[at]
        if end is None:  # no answer ends here any more
            out += runs[at:]
            break
        # Where an end token comes next, nothing is said: no spelling could be given back, and nothing read past.
        for answered in find(digest.name) if end > at else ():
            past = _spelt(answered, ends)
            if past is None:
                continue
            said, lead = past
            here = _behind(runs[at:end], lead)
            if here is None or _length(here) > MOST_LONGER * (_length(said) + MOST_LONGER):
                continue
            same = _texts(here) == _texts(said)
            before = [*out, Segment(lead)]
            if same or _says_the_same(here, said, before, reader):
                found = replace(found, respelt=found.respelt + (not same), last=answered)
                spelt = [*([Segment(lead)] if lead else []), *said]
                break
        else:
            spelt = [runs[at]]
            end = at + 1
        for run in wanted_runs(spelt, add_bos=False):
            out.append(run)
            digest.add(run)
        at = end
    return found


class _OddError(ValueError):
    """JSON that readers take for different things."""


def canonical(arguments: str) -> str | None:
    """The arguments of a call in one spelling. What is no JSON has only its own. None if readers may take it for
    different things.
    """
    try:
        value = json.loads(arguments, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)
        return json.dumps(value, sort_keys=True)
    except _OddError:
        return None
    except (ValueError, RecursionError):
        return f"as it is: {arguments}"


def has_odd_calls(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a client sends arguments with duplicate keys: a template writes only one of them."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str) and canonical(arguments) is None:
                return True
    return False


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _OddError("a key comes twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # as any other that is too large
        raise _OddError(f"{text[:20]} is too large")
    return number


def _refuse(name: str) -> object:
    raise _OddError(f"{name} is no JSON")


def _next_ends(runs: Sequence[Segment], ends: frozenset[str]) -> Iterable[int | None]:
    """For each run, which one ends an answer next."""
    found: list[int | None] = []
    next_end = None
    for number in range(len(runs) - 1, -1, -1):
        if runs[number].special and runs[number].text in ends:
            next_end = number
        found.append(next_end)
    return reversed(found)


def _length(runs: Sequence[Segment]) -> int:
    return sum(len(run.text) for run in runs)


def _spelt(answered: Answered, ends: frozenset[str]) -> tuple[list[Segment], str] | None:
    """A past answer as it was sampled, without the token that ended it; and what the prompt wrote before it, behind its
    last control token. None if the history does not have it at that place.
    """
    runs, place = answered.history.runs, answered.place
    said: list[Segment] = []
    for run in runs[place.run :]:
        if run.special and run.text in ends:
            break
        said.append(Segment(run.text, run.special))
    if not place.lead:
        return said, ""
    if not said or said[0].special:
        return None
    lead, text = said[0].text[: place.lead], said[0].text[place.lead :]
    return [*([Segment(text)] if text else []), *said[1:]], lead


def _behind(runs: Sequence[Segment], lead: str) -> list[Segment] | None:
    """The runs behind their first characters, if these are the ones."""
    if not lead:
        return list(runs)
    if not runs or runs[0].special or not runs[0].text.startswith(lead):
        return None
    text = runs[0].text[len(lead) :]
    return [*([Segment(text)] if text else []), *runs[1:]]


def _says_the_same(here: Sequence[Segment], said: Sequence[Segment], before: Sequence[Segment], reader: Reader) -> bool:
    written = _meaning(here, reader(before, True))
    return written is not None and written == _meaning(said, reader(before, False))


def _meaning(runs: Sequence[Segment], parser: OutputParser) -> Meaning | None:
    """What an answer says; None if that can be told from its spelling only: no client sees other control tokens."""
    answer = Answer()
    for run in runs:
        if not run.special:
            answer.add(parser.feed(run.text))
        elif run.text in parser.control_tokens:
            answer.add(parser.control(run.text))
        else:
            return None
    answer.add(parser.finish())
    calls = [(call.name, canonical(call.arguments)) for call in answer.calls]
    known = tuple((name, arguments) for name, arguments in calls if arguments is not None)
    return (answer.text.strip(), answer.reasoning.strip(), known) if len(known) == len(calls) else None


def _texts(runs: Sequence[Spelt]) -> list[tuple[str, bool]]:
    return [(run.text, run.special) for run in runs]
