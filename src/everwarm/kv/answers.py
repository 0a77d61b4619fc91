"""Answers that were given once, by the digests of the texts that they follow: a turn finds the tokens of an answer that
comes back in another spelling.
"""

from collections import defaultdict
from dataclasses import dataclass

from everwarm.kv.agent import Agent
from everwarm.kv.histories import Histories, History
from everwarm.types import AnswerPlace


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that was given once."""

    agent: Agent
    history: History
    place: AnswerPlace


ByDigest = dict[str, list[Answered]]


def answers_by_digest(agent: Agent, history: History) -> ByDigest:
    """By the digests of the texts that they follow."""
    found = defaultdict[str, list[Answered]](list)
    for place in history.answers:
        found[place.digest].append(Answered(agent, history, place))
    return found


class KnownAnswers:
    """The answers of the agents that one turn has looked at; each history is read once."""

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._found: dict[int, ByDigest] = {}

    def of(self, agent: Agent, history: History | None = None) -> ByDigest:
        """`history`: that of the agent, if it was read already."""
        if id(agent) not in self._found:
            history = history or self._histories.peek(agent)
            self._found[id(agent)] = {} if history is None else answers_by_digest(agent, history)
        return self._found[id(agent)]
