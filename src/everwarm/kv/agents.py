"""Who owns which history: all agents of one model, in memory. Saving them is the business of `kv.histories`.

One turn at a time: whoever changes an agent owns its turn. The index's lock guards everything here.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from everwarm.errors import AgentExistsError, CancelledError, StoreError, UnknownAgentError
from everwarm.kv.agent import MOST_NAME, Agent
from everwarm.kv.chain import token_bytes
from everwarm.kv.index.index import Index, Superseded
from everwarm.kv.index.tree import Node
from everwarm.kv.manifest import Manifest
from everwarm.kv.unsaved import Unsaved
from everwarm.kv.warm.manifests import NotRemovedError
from everwarm.kv.warm.tenants import DEFAULT_TENANT
from everwarm.kv.warm.tier import WarmTier
from everwarm.waiting import Cancellation

_log = logging.getLogger(__name__)


MOST_ANSWERED = 8
"""Branches that are looked through for an answer."""


class Agents:
    """The agents that are known."""

    def __init__(self, index: Index, clock: Callable[[], float] = time.time) -> None:
        self._index = index
        self._clock = clock
        self.by_name: dict[tuple[str, str], Agent] = {}  # by tenant and name
        self.by_text: dict[tuple[str, str, str], Agent] = {}  # branches, by tenant, group and digest of text
        self.by_answer: dict[tuple[str, str, str], list[Agent]] = {}  # branches that have answered behind such a text
        self.unnamed: OrderedDict[int, Agent] = OrderedDict()  # conversations without a name, the longest unused first
        self.unsaved = Unsaved()

    def all(self) -> list[Agent]:
        with self._index.lock:
            return list(self.by_name.values())

    def find(self, name: str, tenant: str = "") -> Agent:
        """Raises UnknownAgentError."""
        agent = self.by_name.get((tenant or DEFAULT_TENANT, name))
        if agent is None or not agent.known:
            raise UnknownAgentError(f"no such agent: {name[:MOST_NAME]!r}")
        return agent

    # Turns ------------------------------------------------------------------------------------------------------------

    def enter(self, name: str, tenant: str, cancelled: Cancellation | None) -> Agent:
        """Wait for the turn of an agent, which is made if it is not known. Raises CancelledError."""
        with self._index.lock:
            agent = self._get(tenant, name)
            agent.waiting += 1
        self._wait(agent, cancelled)
        return agent

    def enter_known(self, agent: Agent) -> None:
        """Wait for the turn of an agent that has a history. Raises UnknownAgentError if it has none any more."""
        with self._index.lock:
            agent.waiting += 1
        self._wait(agent, None)
        if not agent.known:
            self.leave(agent)
            raise UnknownAgentError(f"no such agent: {agent.name!r}")

    def _wait(self, agent: Agent, cancelled: Cancellation | None) -> None:
        entered = False
        try:
            entered = agent.turn.enter(None, cancelled=cancelled)
        finally:
            if not entered:
                self._not_waiting(agent)
        if not entered:
            raise CancelledError(f"cancelled while another turn of agent {agent.name!r} went on")

    def claim(self, agent: Agent) -> bool:
        """Own the agent's turn if nobody does."""
        with self._index.lock:
            if not agent.turn.try_enter(None):
                return False
            agent.waiting += 1
            return True

    def leave(self, agent: Agent) -> None:
        """The turn is over. An agent that has no history by now is forgotten."""
        self._not_waiting(agent)
        agent.turn.leave(None)

    def _not_waiting(self, agent: Agent) -> None:
        with self._index.lock:
            agent.waiting -= 1
            at = agent.tenant, agent.name
            if not agent.waiting and not agent.known and self.by_name.get(at) is agent:
                del self.by_name[at]

    def claim_branch(self, tenant: str, group: str, digests: list[str]) -> Agent | None:
        """Own the turn of the branch whose text is the longest of these beginnings, given the shortest first. One that
        is being continued already is left alone.
        """
        with self._index.lock:
            known = (self.by_text.get((tenant, group, digest)) for digest in reversed(digests))
            return next((agent for agent in known if agent is not None and self.claim(agent)), None)

    @property
    def has_answers(self) -> bool:
        return bool(self.by_answer)

    def answered(self, tenant: str, group: str, digest: str) -> list[Agent]:
        """Branches that have given an answer behind a text with this digest, the latest used first; not all."""
        with self._index.lock:
            return self.by_answer.get((tenant, group, digest), [])[: -MOST_ANSWERED - 1 : -1]

    def claim_new(self, name: str, tenant: str, advice: str) -> Agent:
        """A new agent whose turn is owned. Raises AgentExistsError."""
        with self._index.lock:
            if (tenant, name) in self.by_name:
                raise AgentExistsError(f"agent {name!r} exists already; {advice}")
            agent = self._get(tenant, name)
            self.claim(agent)
            return agent

    def claim_unnamed(self, name: str, tenant: str, group: str) -> Agent:
        """A branch of a group (without one: anonymous) whose turn is owned; of a similar name if that one is busy."""
        with self._index.lock:
            for number in count():
                agent = self._get(tenant, f"{name}-{number}" if number else name)
                same = (agent.anonymous, agent.group) == (not group, group)
                if (same or not agent.known) and self.claim(agent):
                    agent.anonymous, agent.group = not group, group
                    return agent
        raise AssertionError

    def new(self, tenant: str, name: str) -> Agent:
        """One that somebody else has made. With the index's lock held, until its turn is owned."""
        return self._get(tenant, name)

    def _get(self, tenant: str, name: str) -> Agent:
        """The agent of this name, made if it is not known; nothing is kept of it unless it gets a history."""
        if (tenant, name) not in self.by_name:
            self.by_name[tenant, name] = Agent(tenant, name, created=self._clock())
        return self.by_name[tenant, name]

    # Histories --------------------------------------------------------------------------------------------------------

    def found(self, manifest: Manifest, chain: list[Node]) -> None:
        """An agent was saved earlier."""
        with self._index.lock:
            agent = self._get(manifest.tenant, manifest.name)
            self.own(agent, manifest, chain)
            agent.unsaved = None

    def found_all(self) -> None:
        """Nobody else was saved: those that are known were used in the order of their last use."""
        with self._index.lock:
            self.unnamed.clear()
            for agent in sorted(self.by_name.values(), key=lambda agent: agent.used):
                self._index.touch(agent.chain())
                if agent.anonymous:
                    self.unnamed[id(agent)] = agent

    def own(self, agent: Agent, manifest: Manifest, chain: list[Node], *, until_stored: bool = False) -> Superseded:
        """The agent owns this chain from now on, with what lies beside it. Returns what it owned before and does not
        need any more: that is given up now or, with `until_stored`, by whoever stores the manifest, because the stored
        one needs it until then.
        """
        index = self._index
        with index.lock:
            owned, beside = agent.chain(), agent.beside
            same = (agent.anonymous, agent.pinned) == (manifest.anonymous, manifest.pinned)
            kept = _common(owned, chain) if same else 0
            before = Superseded([*beside, *reversed(owned[kept:])], agent.anonymous, agent.pinned)
            self._forget_text(agent)
            agent.anonymous, agent.group, agent.pinned = manifest.anonymous, manifest.group, manifest.pinned
            agent.final = manifest.final
            agent.generation, agent.salt = manifest.generation, bytes.fromhex(manifest.salt)
            agent.tokens, agent.kv_tokens = len(manifest.tokens), chain[-1].end if chain else 0
            agent.created, agent.used = manifest.created, manifest.used
            agent.leaf = chain[-1] if chain else None
            agent.beside = index.beside(chain, token_bytes(manifest.tokens), manifest.positions, make=True)
            agent.unsaved = manifest
            agent.text_digest = manifest.text_digest
            if (agent.anonymous or agent.group) and not agent.final:
                self._remember_text(agent, manifest)
            index.add_owner([*chain[kept:], *agent.beside], anonymous=agent.anonymous, pinned=agent.pinned)
            self.unnamed.pop(id(agent), None)
            if agent.anonymous:
                self.unnamed[id(agent)] = agent
            if not until_stored:
                index.give_up(before)
            index.touch(chain)
            return before

    def saved(self, agent: Agent, generation: int) -> None:
        """This generation of its history is on disk."""
        with self._index.lock:
            if agent.generation == generation:
                agent.unsaved = None
                self.unsaved.discard(agent)

    def keep_unsaved(self, agent: Agent, manifest: Manifest) -> None:
        """Its history has to be saved again."""
        with self._index.lock:
            agent.unsaved = agent.unsaved or manifest

    def not_saved(self, agent: Agent, manifest: Manifest) -> int:
        """An agent that was never saved: its last history stays in memory. If there are too many such, the longest
        unused are given up; how many were.
        """
        given_up = 0
        with self._index.lock:
            if agent.generation:
                self.unsaved.add(agent, manifest)
            for other in self.unsaved.excess():
                if self.claim(other):
                    self.disown(other)
                    self.leave(other)
                    given_up += 1
        return given_up

    def disown(self, agent: Agent) -> None:
        """The agent, whose turn is owned, has no history any more."""
        index = self._index
        with index.lock:
            alone, leaf = index.alone(agent.chain(), agent.beside), agent.leaf
            index.remove_owner(agent.owned(), anonymous=agent.anonymous, pinned=agent.pinned)
            self._forget_text(agent)
            self.unnamed.pop(id(agent), None)
            self.unsaved.discard(agent)
            beside, agent.beside = agent.beside, []
            agent.leaf, agent.generation, agent.unsaved = None, 0, None
            agent.tokens, agent.kv_tokens, agent.salt, agent.text_digest = 0, 0, b"", ""
            agent.anonymous, agent.pinned, agent.final, agent.group = False, False, False, ""
            for node in alone:
                index.cool(node)
                index.forget(node)
            for node in beside if leaf is None else [*beside, leaf]:
                index.forget(node)

    def _remember_text(self, agent: Agent, manifest: Manifest) -> None:
        """A branch is found again by its text, or by a text that it has answered."""
        self.by_text[agent.tenant, agent.group, agent.text_digest] = agent
        agent.answers = tuple(place.digest for place in manifest.answers)
        for digest in dict.fromkeys(agent.answers):
            self.by_answer.setdefault((agent.tenant, agent.group, digest), []).append(agent)

    def _forget_text(self, agent: Agent) -> None:
        at = agent.tenant, agent.group, agent.text_digest
        if self.by_text.get(at) is agent:
            del self.by_text[at]
        for digest in dict.fromkeys(agent.answers):
            others = self.by_answer[agent.tenant, agent.group, digest]
            others.remove(agent)
            if not others:
                del self.by_answer[agent.tenant, agent.group, digest]
        agent.answers = ()

    # Conversations without a name go when the quota is full (`WarmTier`) ----------------------------------------------

    def last_conversation(self) -> float | None:
        with self._index.lock:
            first = next(iter(self.unnamed.values()), None)
            return None if first is None else first.used

    def remove_conversations(self, tier: WarmTier, wanted: int, empty: bool) -> int:
        """The longest unused first. Those that are being talked to, saved or pinned stay. With `empty` only those whose
        own blocks are gone, else their manifests would fill the quota one day: the longest unused lose theirs first, so
        the first that has some ends the search.
        """
        freed = 0
        passed: list[Agent] = []
        while freed < wanted:
            with self._index.lock:
                agent = next(iter(self.unnamed.values()), None)
                if agent is None or (
                    empty and any(node.available for node in self._index.alone(agent.chain(), agent.beside))
                ):
                    break
                del self.unnamed[id(agent)]
                if agent.unsaved is not None or agent.pinned or not self.claim(agent):
                    passed.append(agent)
                    continue
            before = tier.bytes
            try:
                tier.remove(agent.tenant, agent.name, agent.chain(), agent.beside)
                self.disown(agent)
            except StoreError as error:
                _log.warning("%s", error)
                if isinstance(error, NotRemovedError) and error.unsaved is not None:
                    self.keep_unsaved(agent, error.unsaved)
                passed.append(agent)
            finally:
                self.leave(agent)
            freed += before - tier.bytes
        with self._index.lock:
            for agent in passed:
                if agent.anonymous:
                    self.unnamed[id(agent)] = agent
        return freed


def _common(one: list[Node], other: list[Node]) -> int:
    """How many blocks two chains have in common from their beginning."""
    short = min(len(one), len(other))
    return next((i for i in range(short) if one[i] is not other[i]), short)
