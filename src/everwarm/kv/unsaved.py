"""Conversations that could not be saved stay in memory, but not without bound.

Where nothing can be saved (the store is read-only or switched off, or its quota is full), every conversation would
stay for ever. Only those that were never saved count here: what has a manifest on disk is bounded by the quota.
"""

from collections import OrderedDict

from everwarm.kv.agent import Agent
from everwarm.kv.manifest import Manifest

MOST_UNNAMED = 1024
"""Conversations without a name."""
MOST_BYTES = 256 << 20
"""Of tokens and text, with names and without."""
AGENT_BYTES = 4096
"""What an agent takes in memory besides its tokens and text, about."""


class Unsaved:
    """Agents that were never saved, the longest unused first. The store's lock guards it."""

    def __init__(self, most_unnamed: int = MOST_UNNAMED, most_bytes: int = MOST_BYTES) -> None:
        self._most_unnamed = most_unnamed
        self._most_bytes = most_bytes
        self._named: OrderedDict[int, Agent] = OrderedDict()
        self._unnamed: OrderedDict[int, Agent] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, agent: Agent, manifest: Manifest) -> None:
        """Its last turn could not be saved."""
        self.discard(agent)
        size = AGENT_BYTES + manifest.tokens.nbytes + sum(len(run.text) for run in manifest.runs)
        self._sizes[id(agent)] = size
        self._bytes += size
        (self._unnamed if agent.anonymous or agent.group else self._named)[id(agent)] = agent

    def discard(self, agent: Agent) -> None:
        """It was saved, or removed."""
        self._bytes -= self._sizes.pop(id(agent), 0)
        self._named.pop(id(agent), None)
        self._unnamed.pop(id(agent), None)

    def excess(self) -> list[Agent]:
        """Who has to go: conversations without a name first."""
        found: list[Agent] = []
        count, left = len(self._unnamed), self._bytes
        for agent in (*self._unnamed.values(), *self._named.values()):
            if left <= self._most_bytes and count <= self._most_unnamed:
                break
            if agent.pinned or (left <= self._most_bytes and id(agent) in self._named):
                continue
            found.append(agent)
            count -= id(agent) in self._unnamed
            left -= self._sizes[id(agent)]
        return found
