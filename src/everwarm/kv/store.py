"""The agent store: agents of one model, whose KV is hot (in memory), warm (on disk) or cold (not there).

    turn = store.open_turn("alice")       waits until alice has no other turn; her history is in `turn.history`
    receipt = turn.acquire(tokens)        blocks of the longest prefix that is known: hot, or read from disk
    ... compute behind turn.kv; turn.append(tokens) after each step ...
    turn.commit(...)                      the history is saved; `receipt.committed` says so
    turn.release()

Three layers, each of which knows only those below it: agents and turns (this package), the warm tier over a
`BlockStore` (`kv.warm`), the index in memory (`kv.index`).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from everwarm.errors import StoreError, UnknownAgentError
from everwarm.kernels.backend import BlockMemory
from everwarm.kv.agent import Agent, check_name
from everwarm.kv.agents import Agents
from everwarm.kv.expiry import Expiry
from everwarm.kv.histories import Histories, History
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.manifest import Manifest
from everwarm.kv.marks import Marks
from everwarm.kv.resaving import Resaving
from everwarm.kv.stats import StoreStats
from everwarm.kv.strips import Prefix, Strip, shared_prefixes, strip
from everwarm.kv.turn import Turn, TurnContext
from everwarm.kv.warm.blocks import ModelBlocks
from everwarm.kv.warm.blockstore import BlockStore, ObjectId
from everwarm.kv.warm.restore import Restorer
from everwarm.kv.warm.shared import SharedStore, share, unshare
from everwarm.kv.warm.tenants import DEFAULT_TENANT
from everwarm.kv.warm.tier import WarmTier
from everwarm.kv.warm.writer import Writer
from everwarm.kv.whereabouts import Warmed, Whereabouts, warm_up, whereabouts
from everwarm.waiting import Cancellation

_log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20


class AgentStore:
    """All agents of one model."""

    def __init__(
        self,
        index: Index,
        ids: ModelIds,
        store: BlockStore | None,
        *,
        quota: int = 0,
        most_age_s: float | None = None,
        durability: str = "turn",
        restore: str = "auto",
        exact: bool = True,
        writing: bool = True,
        clock: Callable[[], float] = time.time,
        vocab_size: int | None = None,
        message_ends: frozenset[int] = frozenset(),
        owns_store: bool = False,
    ) -> None:
        """`store` None keeps everything in memory. Where another process writes, nothing can be written or nothing
        shall be (`writing`), the store only reads: `read_only` says why. `vocab_size`: of the model, if it is known; a
        history with other tokens is refused at import, and can't be read if it is there already. `message_ends`: tokens
        with which messages end. `owns_store`: the store is closed with this.
        """
        self.index = index
        self.ids = ids
        self._closed = False
        self._owned = store if owns_store else None
        self.before_removal: Callable[[str, str], None] | None = None
        """Told the tenant and the name of an agent that a user removes: whoever computes for it has to end that."""
        self.shared, damaged = _opened(store, ids, quota, writing)
        try:
            budget = index.budget
            # What waits to be written can't be dropped from memory, so it must not fill it.
            self.writer = Writer(min(QUEUE_BYTES, QUEUE_BYTES if budget is None else budget // 4))
            self.agents = Agents(index, clock)
            self.warm = None
            if store is not None:
                self.warm = WarmTier(index, ModelBlocks(store, ids), self.shared, self.agents)
            index.save_with(self.writer, self.read_only)
            index.counts.events["corrupt"] += damaged
            self.histories = Histories(
                index,
                self.agents,
                self.warm,
                self.shared.tenants,
                self.writer,
                ids,
                read_only=self.read_only,
                vocab_size=vocab_size,
                clock=clock,
            )
            self.restorer = Restorer(index, self.warm, always=restore == "always")
            many = store is not None and store.many_writers
            self.expiry = Expiry(self.histories, None if many else most_age_s, clock)
            self.resaving = Resaving(self.histories) if many else None
            marks = Marks.of(ids.layout, message_ends)
            self._context = TurnContext(self.histories, self.restorer, self.expiry, exact, durability, marks)
            if self.warm is not None:
                if many:  # others change it all the time: agents are looked up when they are needed
                    self.histories.find_roots()
                else:
                    self.histories.find_all()
                self.shared.attach(self.warm)
                self.expiry.look_at_start()
        except BaseException:
            unshare(self.shared, ids.directory)
            raise

    @property
    def read_only(self) -> str:
        """Why nothing is saved; empty if it is."""
        return self.shared.read_only

    @property
    def counters(self) -> Counter[str]:
        """Events since the store was opened."""
        return self.index.counts.events + self.shared.counters

    @property
    def memory(self) -> BlockMemory:
        """Where hot blocks are, for benchmarks of it."""
        return self.index.pool.memory

    def stats(self) -> StoreStats:
        index, warm = self.index, self.warm
        with index.lock:
            by_tenant = Counter(tenant for tenant, _ in self.agents.by_name)
            kept = len(index.hot)
        return StoreStats(
            agents=by_tenant.total(),
            agents_by_tenant=by_tenant,
            read_only=self.read_only,
            hot_bytes=index.bytes_in_use,
            hot_budget=index.budget,
            blocks_in_use=sum(pool.in_use for pool in index.pools.values()),
            blocks_kept=kept,
            warm_bytes=warm.bytes if warm is not None else 0,
            other_bytes=self.shared.used - (warm.bytes if warm is not None else 0),
            warm_quota=self.shared.quota,
            quarantined=warm.quarantine.count if warm is not None else 0,
            events=self.counters,
            seconds=dict(index.counts.seconds),
        )

    def secret(self, tenant: str) -> bytes:
        """Bytes that only this store has for a tenant, the same after a restart."""
        return self.shared.tenants.secret(tenant or DEFAULT_TENANT)

    # Turns ------------------------------------------------------------------------------------------------------------

    def open_turn(
        self,
        name: str | None,
        capacity: int,
        tenant: str = "",
        cancelled: Cancellation | None = None,
        group: str = "",
        parent: str | None = None,
    ) -> Turn:
        """Wait for the agent's turn; it may grow to `capacity` tokens. Without a name, the conversation gets one from
        its content. `parent`: a new agent goes on from the history of another, which stays as it is. Raises
        UnknownAgentError if there is no such parent, StoreError if the agent is a point of a history.
        """
        tenant = check_name(tenant or DEFAULT_TENANT, "tenant")
        if name is None:
            return Turn(self._context, None, tenant, capacity, check_name(group, "group") if group else "")
        origin = None if parent is None else self.find(parent, tenant)
        agent = self.agents.enter(check_name(name, "agent"), tenant, cancelled)
        try:
            self.histories.begin(agent, cancelled)
            if agent.final:
                raise StoreError(
                    f"agent {name!r} is a point of a history and never changes: continue it with previous_response_id"
                )
            return Turn(self._context, agent, tenant, capacity, parent=origin)
        except BaseException:
            self.histories.end(agent)
            self.agents.leave(agent)
            raise

    def open_ahead(self, agent: Agent, capacity: int) -> Turn:
        """A turn that computes what an agent's next one will need, and leaves the agent as it is."""
        return Turn(self._context, None, agent.tenant, capacity, parent=agent)

    # Agents -----------------------------------------------------------------------------------------------------------

    def find(self, name: str, tenant: str = "") -> Agent:
        """Raises UnknownAgentError."""
        try:
            return self.agents.find(name, tenant)
        except UnknownAgentError:
            self.histories.look_up(name, tenant or DEFAULT_TENANT)
            return self.agents.find(name, tenant)

    def listed(self, tenant: str) -> list[Agent]:
        """A tenant's agents that have a history, the latest used first."""
        self.histories.look_around()
        found = [agent for agent in self.agents.all() if agent.tenant == tenant and agent.known]
        return sorted(found, key=lambda agent: -agent.used)

    def history(self, agent: Agent) -> History:
        return self.histories.read(agent)

    def peek(self, agent: Agent) -> History | None:
        """The same of an agent that somebody may talk to; None if it is gone or can't be read."""
        return self.histories.peek(agent)

    def manifest(self, agent: Agent) -> Manifest:
        """All that is kept of an agent, with its text. Raises StoreError."""
        return self.histories.manifest(agent)

    def whereabouts(self, agent: Agent) -> Whereabouts:
        return whereabouts(self.histories, agent)

    def strip(self, agent: Agent) -> Strip:
        """Its blocks in order, for people who look at it."""
        return strip(self.histories, agent)

    def shared_prefixes(self, agents: Iterable[Agent]) -> list[Prefix]:
        """What the histories of these agents have in common."""
        return shared_prefixes(self.histories, agents)

    def locations(self, agent: Agent) -> list[str]:
        """Where an agent's blocks and its manifest are on disk, for people and benchmarks."""
        if self.warm is None:
            return []
        blocks = self.warm.blocks
        blobs = [blocks.blob(ObjectId(node.key, node.kind)) for node in agent.owned() if node.on_disk]
        return [blocks.store.where(blob) for blob in (*blobs, blocks.manifest_blob(agent.tenant, agent.name))]

    def evict(self, name: str, tenant: str = "") -> int:
        """Drop an agent's blocks from memory, those that no other agent owns; bytes that were freed. What is not saved
        is saved first; if that fails, everything stays and StoreError says why.
        """
        with self._turn_of(self.find(name, tenant)) as agent:
            self.writer.flush()
            if (unsaved := agent.unsaved) is not None and self.warm is not None:
                self.histories.save(agent, unsaved, agent.chain()).result()
            freed = 0
            with self.index.lock:
                for node in (*agent.beside, *reversed(agent.chain())):
                    if node.named + node.anonymous == 1 and self.index.cool(node):
                        freed += self.index.pool_of(node).block_bytes
            return freed

    def warm_up(self, name: str, tenant: str = "") -> Warmed:
        """Bring an agent's blocks into memory ahead of its next turn."""
        return warm_up(self.histories, self.restorer, self.find(name, tenant))

    def fork(self, name: str, new: str, tenant: str = "") -> None:
        """Another agent with the same history, which may go on from it. Costs one manifest."""
        check_name(new, "agent")
        with self._turn_of(self.find(name, tenant)) as agent:
            now = self.histories.clock()
            manifest = replace(
                self.histories.manifest(agent),
                name=new,
                generation=1,
                created=now,
                used=now,
                anonymous=False,
                group="",
                pinned=False,
                final=False,
                record=None,
            )
            self.histories.look_up(new, agent.tenant)
            copy = self.agents.claim_new(new, agent.tenant, "remove it first")  # nobody talks as it before it is whole
            try:
                self.histories.change(copy, manifest, agent.chain())
            except StoreError:
                self.histories.withdraw(copy)
                raise
            finally:
                self.agents.leave(copy)

    def pin(self, name: str, pinned: bool = True, tenant: str = "") -> None:
        """A pinned agent's blocks stay on disk; in memory, too, unless those who talk need all of it."""
        with self._turn_of(self.find(name, tenant)) as agent:
            before = self.histories.manifest(agent)
            changed = before.as_next(pinned=pinned)
            try:
                self.histories.change(agent, changed, agent.chain())
            except StoreError:
                # It is as it was, and saved with the next turn.
                self.agents.own(agent, changed.as_next(pinned=before.pinned), agent.chain())
                raise

    def delete(self, name: str, tenant: str = "") -> None:
        """Remove an agent and the blocks that nobody else owns. Raises StoreError if it could not be removed, or if it
        was and some of its files could not be: they are tried again.
        """
        with self._turn_of(self.find(name, tenant)) as agent:
            if self.before_removal is not None:
                self.before_removal(agent.tenant, agent.name)
            self.histories.remove(agent)

    @contextmanager
    def _turn_of(self, agent: Agent) -> Iterator[Agent]:
        """A turn that is not for talking."""
        self.agents.enter_known(agent)
        try:
            self.histories.begin(agent)
            if not agent.known:
                raise UnknownAgentError(f"no such agent: {agent.name!r}")
            yield agent
        finally:
            self.histories.end(agent)
            self.agents.leave(agent)

    # Life -------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything that was handed over is on disk."""
        self.writer.flush()

    def close(self) -> None:
        """Write what is left; free the memory; let others write."""
        if self._closed:
            return
        self._closed = True
        self.expiry.wait()
        if self.resaving is not None:
            self.resaving.close()
        try:
            self.histories.save_again()
            if (warm := self.warm) is not None and not self.read_only:
                self.writer.submit(warm.delete_doomed).result()
        finally:
            self.writer.close()
            if self.warm is not None and self.warm.leases is not None:
                self.warm.leases.close()
            self.index.drop_all()
            unshare(self.shared, self.ids.directory)
            if self._owned is not None:
                self._owned.close()


def _opened(store: BlockStore | None, ids: ModelIds, quota: int, writing: bool) -> tuple[SharedStore, int]:
    """The store, ready for this model; and how many damaged records there were. If it can't be made ready, it is only
    read.
    """
    shared = share(store, quota, ids.directory, writing=writing)
    if store is None or shared.read_only:
        return shared, 0
    try:
        return shared, ModelBlocks(store, ids).prepare()
    except (OSError, StoreError) as error:
        _log.warning("agents are not saved: %s", error)
        unshare(shared, ids.directory)
        return SharedStore(store, quota, str(error)), 0
    except BaseException:
        unshare(shared, ids.directory)
        raise
