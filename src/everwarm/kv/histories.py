"""What agents have heard and said: read when a turn begins, saved when it ends, removed when nobody wants it.

Between the agents in memory (`Agents`) and the warm tier. Everything that changes files is a job for the writer.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everwarm.errors import EverwarmError, StoreError, TurnLostError, UnknownAgentError
from everwarm.kv.agent import Agent
from everwarm.kv.agents import Agents
from everwarm.kv.believable import check_tokens
from everwarm.kv.chain import token_bytes
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.index.tree import Node
from everwarm.kv.last_turn import LastTurn
from everwarm.kv.manifest import Manifest, merged
from everwarm.kv.receipt import Cause, Why
from everwarm.kv.warm.blockstore import AwayError
from everwarm.kv.warm.manifests import NotRemovedError
from everwarm.kv.warm.others import elsewhere
from everwarm.kv.warm.tenants import Tenants
from everwarm.kv.warm.tier import WarmTier
from everwarm.kv.warm.writer import Writer
from everwarm.types import AnswerPlace, Run
from everwarm.waiting import Cancellation

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class History:
    """What an agent has heard and said until now."""

    tokens: bytes = b""  # big-endian
    kv_tokens: int = 0
    runs: tuple[Run, ...] = ()  # neighbouring texts merged
    messages: tuple[Any, ...] | None = None
    generation: int = 0
    lost: str = ""  # why it can't be read
    record: Mapping[str, Any] | None = None  # what else is kept with it
    answers: tuple[AnswerPlace, ...] = ()  # what of it the model has said
    last: LastTurn | None = None  # what its last request has reused
    positions: tuple[int, ...] = ()  # where it can be gone on from, unless that is everywhere

    @staticmethod
    def of(manifest: Manifest) -> "History":
        return History(
            token_bytes(manifest.tokens),
            manifest.kv_tokens,
            merged(manifest.runs),
            manifest.messages,
            manifest.generation,
            record=manifest.record,
            answers=manifest.answers,
            last=manifest.last,
            positions=manifest.positions,
        )

    @property
    def ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.tokens, ">u4").tolist()
        return ids


class Histories:
    """The histories of one model's agents."""

    def __init__(
        self,
        index: Index,
        agents: Agents,
        tier: WarmTier | None,
        tenants: Tenants,
        writer: Writer,
        ids: ModelIds,
        *,
        read_only: str = "",
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.index, self.agents, self.tier, self.ids = index, agents, tier, ids
        self.writer = writer
        self.read_only = read_only
        self.clock = clock
        self._tenants = tenants
        self._when_not_saved: Callable[[], None] = _nothing
        self.vocab_size = vocab_size

    def tell_when_not_saved(self, tell: Callable[[], None]) -> None:
        """Call this whenever a history could not be saved."""
        self._when_not_saved = tell

    @property
    def _saved(self) -> WarmTier | None:
        """The warm tier, if something can be written there."""
        return None if self.read_only else self.tier

    # Reading ----------------------------------------------------------------------------------------------------------

    def find_roots(self) -> None:
        """Where the histories of known tenants begin."""
        for salt in self._tenants.salts():
            self.root(salt)

    def find_all(self) -> None:
        """Look through what was saved: manifests, the listing of blocks, headers of blocks that no manifest names."""
        assert self.tier is not None
        started = time.perf_counter()
        self.find_roots()
        for manifest, blob in self.tier.manifests.find():
            chain = self.chain(manifest)
            covered = chain[-1].end if chain else 0
            if len(chain) < len(manifest.blocks) or covered < manifest.kv_tokens:
                # A conversation is never thrown away because its cache is odd.
                _log.warning(
                    "%s: it names %d blocks for %d tokens, %d of them fit; tokens and text are kept, the rest is "
                    "computed again", self.tier.blocks.store.where(blob), len(manifest.blocks), manifest.kv_tokens,
                    len(chain),
                )  # fmt: skip
                self.index.counts.events["odd_manifests"] += 1
                manifest = replace(manifest, kv_tokens=covered, blocks=manifest.blocks[: len(chain)])
            self.agents.found(manifest, chain)
        self.tier.find_blocks()
        self.agents.found_all()
        _log.info(
            "agent store %s: %d agents, %d blocks, %d bytes, %d quarantined, %.0f ms",
            self.tier.blocks.store.where(), len(self.agents.by_name), len(self.index.warm), self.tier.bytes,
            self.tier.quarantine.count, 1000 * (time.perf_counter() - started),
        )  # fmt: skip

    def read(self, agent: Agent) -> History:
        """What it has heard and said, with the text."""
        if (unsaved := agent.unsaved) is not None:  # the writer may save it just now
            return History.of(unsaved)
        if agent.generation == 0 or self.tier is None:
            return History()
        who = agent.tenant, agent.name
        leased = None if self.tier.leases is None else self.tier.leases.history(who)
        try:
            manifest = leased or self.tier.manifests.load(who)
        except AwayError as error:
            self.index.counts.events["read_errors"] += 1
            return History(lost=f"manifest: {_words(error)}")
        except (OSError, StoreError) as error:
            self.index.counts.events["corrupt"] += 1
            _log.error("agent %s: its manifest can't be read: %s", agent.name, error)
            return History(lost=f"manifest: {_words(error)}")
        try:
            check_tokens(manifest.tokens, self.vocab_size)
        except StoreError as error:  # imported where the model was not known
            self.index.counts.events["corrupt"] += 1
            _log.error("agent %s: its tokens can't be used: %s", agent.name, error)
            self.tier.manifests.refuse(who, str(error))
            return History(messages=manifest.messages, lost=f"manifest: {error}")
        return History.of(manifest)

    # Where many processes write ---------------------------------------------------------------------------------------

    def begin(self, agent: Agent, cancelled: Cancellation | None = None) -> None:
        """A turn of the agent, which is owned here, begins: own it among all processes, and learn what others have
        saved. If the storage is away, the turn goes on with what is known; whether it can be saved shows at its end.
        """
        tier = self._saved
        if tier is None or tier.leases is None:
            return
        try:
            self._save_first(agent)
            stored = tier.leases.take(self._blank(agent), cancelled)
        except (OSError, StoreError) as error:
            self.index.counts.events["lease_errors"] += 1
            _log.warning("agent %s: its turn goes on without a lease: %s", agent.name, _words(error))
            return
        self._adopt(agent, stored)

    def _save_first(self, agent: Agent) -> None:
        """What could not be saved of an agent, whose turn is owned. Raises StoreError if it still can't be; if somebody
        else has gone on meanwhile, it is given up.
        """
        if agent.unsaved is not None:
            self.writer.flush()
        if (unsaved := agent.unsaved) is not None:
            try:
                self.save(agent, unsaved, agent.chain()).result()
            except TurnLostError as error:
                _log.warning("%s", error)

    def end(self, agent: Agent) -> None:
        """The turn is over; if nothing was saved, others may have it now."""
        tier = self._saved
        if tier is not None and tier.leases is not None and (held := tier.leases.drop((agent.tenant, agent.name))):
            leases = tier.leases
            self.writer.submit(lambda: leases.give_back(held))

    def look_up(self, name: str, tenant: str) -> None:
        """An agent that is not known here may have been saved by somebody else."""
        tier = self.tier
        if tier is None or tier.leases is None:
            return
        try:
            stored, size = tier.blocks.load_sized(tenant, name)
        except (OSError, StoreError):
            return
        self._adopt_idle(stored, size)

    def look_around(self) -> None:
        """Learn of all agents that somebody else has saved, or changed. Those that talk here are left alone."""
        tier = self.tier
        if tier is None or tier.leases is None:
            return
        try:
            for found, size in tier.blocks.changed():
                self._adopt_idle(found, size)
        except OSError as error:
            _log.warning("%s: can't be listed: %s", tier.blocks.store.where(), _words(error))

    def _adopt_idle(self, stored: Manifest, size: int) -> None:
        with self.index.lock:
            known = self.agents.by_name.get((stored.tenant, stored.name))
            assert self.tier is not None
            if stored.is_empty and known is None:
                self.tier.manifests.saw(stored, size)  # an agent of this name takes its place
                return
            if known is not None and (known.unsaved is not None or known.generation >= stored.generation):
                return
            agent = known or self.agents.new(stored.tenant, stored.name)
            if not self.agents.claim(agent):
                return
        try:
            self.tier.manifests.saw(stored, size)
            self._adopt(agent, stored)
        finally:
            self.agents.leave(agent)

    def _adopt(self, agent: Agent, stored: Manifest) -> None:
        """An agent, whose turn is owned, is as somebody has saved it."""
        assert self.tier is not None
        if stored.is_empty:
            if agent.known:
                self.agents.disown(agent)
            return
        with self.index.lock:
            chain = self.chain(stored)
            self.agents.found(stored, chain)
            self.tier.found(stored, agent.owned())

    def _blank(self, agent: Agent) -> Manifest:
        """The manifest of an agent that was never saved."""
        ids = self.ids
        return Manifest(
            tenant=agent.tenant,
            name=agent.name,
            generation=0,
            salt=self.tenant_salt(agent.tenant).hex(),
            weights_id=ids.weights_id,
            numerics_id=ids.numerics_id,
            layout=ids.layout.digest,
            model=ids.name,
            kv_type=ids.kv_type,
            tokens=np.empty(0, np.uint32),
            kv_tokens=0,
            blocks=(),
            runs=(),
            created=self.clock(),
            used=self.clock(),
        )

    def peek(self, agent: Agent) -> History | None:
        """What somebody else's agent has heard and said, as of its last turn; None if it is gone or can't be read."""
        try:
            return History.of(self.manifest(agent)) if agent.known else None
        except EverwarmError:
            return None

    def manifest(self, agent: Agent) -> Manifest:
        """All that is known of an agent, from disk if it is there. Raises StoreError."""
        if (unsaved := agent.unsaved) is not None:
            return unsaved
        assert self.tier is not None
        try:
            return self.tier.blocks.load(agent.tenant, agent.name)
        except (OSError, StoreError) as error:
            if not agent.generation or isinstance(error, FileNotFoundError):  # removed meanwhile, or just now
                raise UnknownAgentError(f"no such agent: {agent.name!r}") from None
            raise StoreError(f"agent {agent.name!r}: its manifest can't be read: {_words(error)}") from None

    def root(self, salt: bytes) -> Node:
        """Where the histories of one salt begin."""
        return self.index.root(self.ids.root(salt))

    def chain(self, manifest: Manifest) -> list[Node]:
        """The nodes of a manifest's blocks."""
        tokens = token_bytes(manifest.tokens)[: 4 * manifest.kv_tokens]
        return self.index.chain(self.ids.root(bytes.fromhex(manifest.salt)), tokens, manifest.blocks)

    def salts(self, tenant: str, agent: Agent | None) -> list[bytes]:
        """With what a history may begin: the agent's own salt (of an import), its tenant's. A new tenant's is saved:
        don't ask with the index's lock held.
        """
        own = [agent.salt] if agent is not None and agent.salt else []
        return list(dict.fromkeys([*own, self._tenants.salt(tenant)]))

    def tenant_salt(self, tenant: str) -> bytes:
        return self._tenants.salt(tenant)

    def why_unknown(self, tenant: str, agent: Agent | None) -> Why:
        """Why nothing is known of a history: perhaps it belongs to another model."""
        if agent is None:
            return Why(Cause.NEW, "no prefix of it is known")
        if self.tier is None:
            return Why(Cause.NEW, "no such agent")
        if why := self.tier.manifests.refusal((tenant, agent.name)):
            return Why(Cause.INCOMPATIBLE, f"its manifest {why}")
        found = elsewhere(self.tier.blocks.store, self.tier.model, tenant, agent.name)
        if found is None:
            return Why(Cause.NEW, "no such agent")
        if found.weights_id != self.ids.weights_id:
            return Why(Cause.INCOMPATIBLE, f"other model: its history is of {found.model}")
        if found.kv_type != self.ids.kv_type:
            here = self.ids.kv_type
            return Why(
                Cause.INCOMPATIBLE,
                f"other kv type: its history is in {found.kv_type}, this model runs with {here}",
            )
        return Why(Cause.INCOMPATIBLE, "other numerics: its history was computed by other kernels or settings")

    # Saving -----------------------------------------------------------------------------------------------------------

    def save_block(self, node: Node, wait: bool = True) -> None:
        """Have a block written. If the writer is far behind: wait, or leave it to the commit."""
        tier = self._saved
        block = self.index.begin_write(node) if tier is not None else None
        if tier is None or block is None:
            return
        queued = None
        try:
            size = self.index.pool_of(node).block_bytes
            queued = self.writer.try_submit(lambda: tier.write(node, block), size, wait=wait)
        finally:
            if queued is None:
                self.index.end_write(node, block)

    def save(self, agent: Agent, manifest: Manifest, chain: list[Node]) -> "Future[int]":
        """The agent has this history from now on; the future tells when it is on disk, and how many bytes that took
        just now.
        """
        tier = self._saved
        if tier is None:
            self.agents.own(agent, manifest, chain)
            refused: Future[int] = Future()
            refused.set_exception(StoreError(f"agent {agent.name!r} was not saved: {self.read_only}"))
            self._not_saved(agent, manifest)
            return refused
        size = manifest.tokens.nbytes + sum(len(run.text) for run in manifest.runs)
        self.writer.wait_for_room(size)
        with self.index.lock:  # what the stored manifest names stays until this one is stored
            tier.supersede(manifest, self.agents.own(agent, manifest, chain, until_stored=True))
            return self.writer.enqueue(lambda: self._save(tier, agent, manifest, chain), size)

    def _save(self, tier: WarmTier, agent: Agent, manifest: Manifest, chain: list[Node]) -> int:
        try:
            if agent.generation < manifest.generation:
                self.index.counts.events["save_errors"] += 1
                tier.give_up(agent.tenant, agent.name)
                why = "it was given up: too many conversations could not be saved"
                raise StoreError(f"agent {agent.name!r} was not saved: {why}")
            written = tier.commit(manifest, chain)
        except TurnLostError:  # what is stored is somebody else's: it is read when the next turn begins
            tier.give_up(agent.tenant, agent.name)
            self.agents.disown(agent)
            raise
        except StoreError:
            self._not_saved(agent, manifest)
            raise
        self.agents.saved(agent, manifest.generation)
        return written

    def drop_unowned(self, nodes: list[Node]) -> None:
        """What a turn has kept on its way and its agent does not need now goes, if nobody else does."""
        tier = self._saved
        with self.index.lock:
            unowned = [node for node in nodes if not node.owned]
        if tier is not None and unowned:
            self.writer.submit(lambda: tier.delete_unowned(unowned))

    def _not_saved(self, agent: Agent, manifest: Manifest) -> None:
        self._when_not_saved()
        stored = 0 if self.tier is None else self.tier.manifests.size((agent.tenant, agent.name))
        if not stored:
            self.index.counts.events["given_up"] += self.agents.not_saved(agent, manifest)

    def change(self, agent: Agent, manifest: Manifest, chain: list[Node]) -> None:
        """Save a history now. Raises StoreError."""
        if self.tier is not None:
            self.check_writable()
            self.save(agent, manifest, chain).result()
        else:
            self.agents.own(agent, manifest, chain)

    def save_again(self) -> None:
        """What could not be saved at the end of its turn: perhaps the disk is well by now."""
        if self._saved is None:
            return
        self.writer.flush()
        for agent in self.agents.all():
            if (unsaved := agent.unsaved) is not None:
                try:
                    self.save(agent, unsaved, agent.chain()).result()
                except StoreError as error:
                    _log.error("%s", error)

    def save_idle(self) -> bool:
        """Save what could not be saved, of agents that don't talk just now. Whether nothing is left to be saved."""
        left = False
        for agent in self.agents.all():
            if agent.unsaved is None:
                continue
            if not self.agents.claim(agent):
                left = True
                continue
            try:
                if (unsaved := agent.unsaved) is not None:
                    self.save(agent, unsaved, agent.chain()).result()
            except StoreError as error:
                _log.debug("%s", error)
                left = left or agent.unsaved is not None
            finally:
                self.agents.leave(agent)
        return not left

    def withdraw(self, agent: Agent) -> None:
        """An agent, whose turn is owned, is not to be, after all."""
        if (tier := self._saved) is not None:
            self.writer.submit(lambda: tier.withdraw(agent.tenant, agent.name)).result()
        self.agents.disown(agent)

    def remove(self, agent: Agent) -> None:
        """Remove an agent whose turn is owned, and the blocks that nobody else owns. Raises StoreError if it could not
        be removed, or if it was and some of its files could not be: they are tried again.
        """
        left = ""
        if (tier := self.tier) is not None:
            self.check_writable()
            chain, beside = agent.chain(), agent.beside
            try:
                left = self.writer.submit(lambda: tier.remove(agent.tenant, agent.name, chain, beside)).result()
            except NotRemovedError as error:
                if error.unsaved is not None:
                    self.agents.keep_unsaved(agent, error.unsaved)
                raise
        self.agents.disown(agent)
        if left:
            raise StoreError(left)

    def remove_if(self, agent: Agent, condition: Callable[[Agent], bool]) -> bool:
        """Remove an agent if nobody talks to it and the condition holds once its turn is owned; whether it did."""
        if not self.agents.claim(agent):
            return False
        try:
            if not agent.known or not condition(agent):
                return False
            self.remove(agent)
            return True
        finally:
            self.agents.leave(agent)

    def check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"agents can't be changed: {self.read_only}")


def _nothing() -> None:
    """Nobody wants to know."""


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
