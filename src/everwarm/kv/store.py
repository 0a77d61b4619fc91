"""The agent store: who owns which history, and in which tier its blocks are.

    turn = store.open_turn("alice")       waits until alice has no other turn; her history is in `turn.history`
    receipt = turn.acquire(tokens)        blocks of the longest prefix that is known: hot, or read from disk
    ... compute behind turn.kv; turn.append(tokens) after each step ...
    turn.commit(...)                      the history is saved; `receipt.committed` says so
    turn.release()

Invariants: a block in the tree is never written again. A node is dropped from memory only when it is on disk, or when
nothing can be written. `lock` guards the tree, the counts and the agents; no file is touched under it.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from everwarm.errors import AgentExistsError, CancelledError, StoreError, UnknownAgentError
from everwarm.kv.agent import MOST_NAME, Agent, check_name
from everwarm.kv.believable import check_tokens
from everwarm.kv.chain import root_key, token_bytes
from everwarm.kv.disk import DirectoryStore, ModelIds
from everwarm.kv.files import Files, make_directories
from everwarm.kv.manifest import Manifest, file_name
from everwarm.kv.others import elsewhere
from everwarm.kv.owner import DEFAULT_TENANT, StoreLock, Tenants
from everwarm.kv.pool import BlockPool
from everwarm.kv.receipt import Receipt
from everwarm.kv.recency import Recency, rank_on_disk
from everwarm.kv.restore import Speed
from everwarm.kv.tree import NODE_BYTES, Node, Tree
from everwarm.kv.turn import History, Turn
from everwarm.kv.unsaved import Unsaved
from everwarm.kv.warm import WarmTier, alone_with
from everwarm.kv.writer import Writer
from everwarm.waiting import Cancellation

if TYPE_CHECKING:
    from everwarm.kv.export import Moved
    from everwarm.kv.tiers import Warmed

_log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
EXPIRY_S = 3600.0


class AgentStore:
    """All agents of one model."""

    def __init__(
        self,
        pool: BlockPool,
        ids: ModelIds,
        root: Path | None,
        *,
        quota: int = 0,
        most_age_s: float | None = None,
        durability: str = "turn",
        restore: str = "auto",
        exact: bool = True,
        writing: bool = True,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        vocab_size: int | None = None,
    ) -> None:
        """`root` None keeps everything in memory. Where another process writes, nothing can be written or nothing shall
        be (`writing`), the store only reads: `read_only` says why. `vocab_size`: of the model, if it is known; a
        history with other tokens is refused at import, and can't be read if it is there already.
        """
        self.pool = pool
        self.ids = ids
        self.exact = exact
        self.durability = durability
        self.restore = restore
        self.clock = clock
        self.vocab_size = vocab_size
        self.lock = pool.lock
        self.tree = Tree(pool.block_tokens)
        self.agents: dict[tuple[str, str], Agent] = {}
        self.by_text: dict[tuple[str, str, str], Agent] = {}  # branches, by tenant, group and digest of text
        self.counters: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.hot = Recency(self._rank_in_memory)
        self.unnamed: OrderedDict[int, Agent] = OrderedDict()  # conversations without a name, the longest unused first
        self.unsaved = Unsaved()
        self._most_age_s = most_age_s
        self._steady = time.monotonic if clock is time.time else clock
        self._looked_for_old = clock(), self._steady()
        self._unused_s = 0.0  # time that does not count as age: nobody could have been used in it
        self.read_speed, self.compute_speed = Speed(), Speed()  # seconds per block; per token
        # What waits to be written can't be dropped from memory, so it must not fill it.
        self.writer = Writer(min(QUEUE_BYTES, QUEUE_BYTES if pool.budget is None else pool.budget // 4))
        self.disk: DirectoryStore | None = None
        self.read_only = "" if root is not None else "the store is switched off"
        self._lock_file: StoreLock | None = None
        self._expiring: threading.Thread | None = None
        files = files or Files()
        if root is not None:
            self.disk = DirectoryStore(root, ids, files)
            if writing:
                self._open(root, files)
            else:
                self.read_only = "it was opened for reading"
        try:
            self.tenants = Tenants(root, files, not self.read_only, self.counters)
            self.warm = WarmTier(self, quota)
            if self.disk is not None:
                self.counters["corrupt"] += self.disk.damaged
                self.warm.scan()
                self._expire_at_start()
        except BaseException:
            self._unlock()
            raise
        pool.index_bytes = lambda: NODE_BYTES * len(self.tree.nodes)
        pool.make_room, pool.wait_for_room = self._make_room, self.writer.wait_for_progress

    def _open(self, root: Path, files: Files) -> None:
        assert self.disk is not None
        try:
            make_directories(files, root)
            self._lock_file = StoreLock(root)
            self.disk.prepare()
        except (OSError, StoreError) as error:
            self.read_only = str(error)
            _log.warning("agents are not saved: %s", error)
            self._unlock()
        except BaseException:
            self._unlock()
            raise

    # Turns ------------------------------------------------------------------------------------------------------------

    def open_turn(
        self,
        name: str | None,
        capacity: int,
        tenant: str = "",
        cancelled: Cancellation | None = None,
        group: str = "",
    ) -> Turn:
        """Wait for the agent's turn; it may grow to `capacity` tokens. Without a name, the conversation gets one from
        its content.
        """
        tenant = check_name(tenant or DEFAULT_TENANT, "tenant")
        if name is None:
            return Turn(self, None, tenant, capacity, check_name(group, "group") if group else "")
        check_name(name, "agent")
        with self.lock:
            agent = self.new_agent(tenant, name)
            agent.waiting += 1
        entered = False
        try:
            entered = agent.turn.enter(None, cancelled=cancelled)
        finally:
            if not entered:
                self._leave(agent)
        if not entered:
            raise CancelledError(f"cancelled while another turn of agent {name!r} went on")
        try:
            return Turn(self, agent, tenant, capacity)
        except BaseException:
            self.end_turn(agent)
            raise

    def new_agent(self, tenant: str, name: str) -> Agent:
        """The agent of this name, made if it is not known; nothing is kept of it unless it says something."""
        with self.lock:
            if (tenant, name) not in self.agents:
                self.agents[tenant, name] = Agent(tenant, name, created=self.clock())
            return self.agents[tenant, name]

    def continue_branch(self, turn: Turn, digests: list[str]) -> None:
        """Let a conversation without a name go on from one whose text is a beginning of its own, the longest first.
        `digests` are those of its beginnings, the shortest first. One that is being continued already is left alone:
        this one forks.
        """
        with self.lock:
            known = (self.by_text.get((turn.tenant, turn.group, digest)) for digest in reversed(digests))
            claimed = next((agent for agent in known if agent is not None and self.claim(agent)), None)
        if claimed is not None:
            turn.adopt(claimed)

    def reserve(self, name: str, tenant: str) -> Agent:
        """A new agent whose turn is owned; nobody else speaks for it. Raises StoreError if there is one already."""
        with self.lock:
            if (tenant, name) in self.agents or file_name(tenant, name) in self.warm.other_versions:
                raise AgentExistsError(f"agent {name!r} exists already; remove it, or give another name (--as)")
            agent = self.new_agent(tenant, name)
            self.claim(agent)
            return agent

    def own_new(self, name: str, tenant: str, group: str) -> Agent:
        """A branch of a group (without one: anonymous) whose turn is owned; of a similar name if that one is busy."""
        with self.lock:
            for number in count():
                agent = self.new_agent(tenant, f"{name}-{number}" if number else name)
                known = agent.generation or agent.unsaved
                if (not known or (agent.anonymous, agent.group) == (not group, group)) and self.claim(agent):
                    agent.anonymous, agent.group = not group, group
                    return agent
        raise AssertionError

    def claim(self, agent: Agent) -> bool:
        """Own the agent's turn if nobody does. With `lock` held."""
        if not agent.turn.try_enter(None):
            return False
        agent.waiting += 1
        return True

    def end_turn(self, agent: Agent) -> None:
        self._leave(agent)
        agent.turn.leave(None)

    def _leave(self, agent: Agent) -> None:
        with self.lock:
            agent.waiting -= 1
            at = agent.tenant, agent.name
            unheard = not agent.waiting and not agent.generation and not agent.unsaved
            if unheard and self.agents.get(at) is agent:
                del self.agents[at]

    def history(self, agent: Agent) -> History:
        """What it has heard and said, with the text. Read from disk: only then is there anything to read."""
        if (unsaved := agent.unsaved) is not None:  # the writer may save it just now
            return History.of(unsaved)
        if agent.generation == 0 or self.disk is None:
            return History()
        try:
            manifest = self.disk.load(agent.tenant, agent.name)
        except (OSError, StoreError) as error:
            self.counters["corrupt"] += 1
            _log.error("agent %s: its manifest can't be read: %s", agent.name, error)
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            agent.unreadable = "" if isinstance(error, FileNotFoundError) else why
            return History(lost=f"manifest: {why}")
        try:
            check_tokens(manifest.tokens, self.vocab_size)
        except StoreError as error:  # imported where the model was not known
            self.counters["corrupt"] += 1
            _log.error("agent %s: its tokens can't be used: %s", agent.name, error)
            agent.unreadable = str(error)
            return History(messages=manifest.messages, lost=f"manifest: {error}")
        return History.of(manifest)

    def count_lookup(self, receipt: Receipt) -> None:
        self.counters[f"lookups_{receipt.tier}"] += 1
        self.counters["cached_tokens"] += receipt.cached_tokens
        self.counters["prompt_tokens"] += receipt.prompt_tokens

    def why_unknown(self, tenant: str, agent: Agent | None) -> str:
        """Why nothing is known of a history: perhaps it belongs to another model."""
        if agent is None:
            return "no prefix of it is known"
        if why := self.warm.other_versions.get(file_name(tenant, agent.name)):
            return f"its manifest {why}"
        found = elsewhere(self.disk, tenant, agent.name) if self.disk is not None else None
        if found is None:
            return "no such agent"
        if found.weights_id != self.ids.weights_id:
            return f"other model: its history is of {found.model}"
        if found.kv_type != self.ids.kv_type:
            return f"other kv type: its history is in {found.kv_type}, this model runs with {self.ids.kv_type}"
        return "other numerics: its history was computed by other kernels or settings"

    def why_lost(self, agent: Agent | None, cached_tokens: int) -> str:
        """Why the block after these tokens is not there."""
        with self.lock:
            for node in agent.chain() if agent is not None else []:
                if node.end > cached_tokens and not node.available:
                    return node.lost or "evicted by quota"
        return ""

    def salts(self, tenant: str, agent: Agent | None) -> list[bytes]:
        """With what a history may begin: the agent's own salt (of an import), its tenant's. A new tenant's is saved:
        don't ask with `lock` held.
        """
        own = [agent.salt] if agent is not None and agent.salt else []
        return list(dict.fromkeys([*own, self.tenants.salt(tenant)]))

    def root(self, salt: bytes) -> Node:
        return self.tree.root(root_key(salt, self.ids.layout.digest, self.ids.weights_id, self.ids.numerics_id))

    def forget_old(self) -> None:
        """Once an hour: remove agents that were not used for too long, on a thread of its own."""
        now, steady = self.clock(), self._steady()
        with self.lock:
            last, last_steady = self._looked_for_old
            if self._most_age_s is None or now < last + EXPIRY_S:
                return
            self._looked_for_old = now, steady
            # The clock was set forward, or the machine slept: agents have not become older by that.
            self._unused_s += max(0.0, (now - last) - (steady - last_steady))
        before = now - self._most_age_s - self._unused_s
        self._expiring = threading.Thread(target=self.warm.expire, args=(before,), name="everwarm-expire", daemon=True)
        self._expiring.start()

    def _expire_at_start(self) -> None:
        """Remove agents that were not used for too long. The time since anybody was used does not count: a wrong clock,
        or a long absence, must not empty the store.
        """
        if self._most_age_s is None:
            return
        now = self.clock()
        latest = max((agent.used for agent in self.agents.values()), default=now)
        self._unused_s = max(0.0, now - latest)
        self.warm.expire(now - self._most_age_s - self._unused_s)

    # Blocks -----------------------------------------------------------------------------------------------------------

    def seal(self, parent: Node, tokens: bytes, block: int) -> tuple[Node, int] | None:
        """Make a block known that will not be written any more. Returns its node and the block to use from now on: if
        the same was computed before, that one. None if the block belongs to another node, of which these tokens are
        only the beginning: two nodes never share a block.
        """
        with self.lock:
            node = self.tree.child(parent, tokens)
            if node.block is None and self.pool.owners(block) > 1:
                self.tree.forget(node)
                return None
            node.lost = ""
            if node.block is None:
                node.block = self.pool.hold(block)
            elif node.block != block:
                self.pool.hold(node.block)
                self.pool.drop([block])
            self.hot.touch([node])
            return node, node.block

    def save_block(self, node: Node, wait: bool = True) -> None:
        """Have a block written. If the writer is far behind: wait, or leave it to the commit."""
        with self.lock:
            if self.read_only or node.safe or node.writing or node.block is None:
                return
            node.writing = True
            block = self.pool.hold(node.block)
        queued = None
        try:
            queued = self.writer.try_submit(lambda: self.warm.write(node, block), self.pool.block_bytes, wait=wait)
        finally:
            if queued is None:
                with self.lock:
                    node.writing = False
                    self.pool.drop([block])

    def _make_room(self, blocks: int) -> None:
        """Let go of so many blocks that no sequence uses and that can come back from disk. If no others are on their
        way there: those of pinned agents; and last, because saving has failed, what can only be computed again.
        """
        with self.lock:
            for rank in (0, 1) if self.writer.busy else (0, 1, 2):
                blocks -= self._cool_oldest(rank, blocks, forced=False)
            for rank in () if self.writer.busy else (0, 3, 4):
                blocks -= self._cool_oldest(rank, blocks, forced=True)

    def _cool_oldest(self, rank: int, blocks: int, *, forced: bool) -> int:
        nodes = self.hot.oldest(rank, blocks, lambda node: not self._may_cool(node, forced)) if blocks > 0 else []
        cooled = sum(self.cool(node, forced) for node in nodes)
        self.counters["hot_evictions"] += cooled
        return cooled

    def _rank_in_memory(self, node: Node) -> int:
        """In which order blocks leave memory: 0 to 2 can come back or are nobody's, 3 to 5 would have to be computed
        again; in each three those of no named agent, of a named one, of a pinned one.
        """
        lasting = node.safe or not node.owned or bool(self.read_only)
        return rank_on_disk(node) + (0 if lasting else 3)

    def _may_cool(self, node: Node, forced: bool) -> bool:
        if node.block is None or self.pool.owners(node.block) > 1:
            return False
        unwanted = not (node.owned or node.claims)
        return node.safe or bool(self.read_only) or unwanted or forced

    def cool(self, node: Node, forced: bool = False) -> bool:
        """Drop a block from memory if nobody computes with it or writes it, and it can come back or nobody wants it."""
        if not self._may_cool(node, forced):
            return False
        assert node.block is not None
        self.pool.drop([node.block])
        node.block = None
        self.hot.discard(node)
        if not node.on_disk:
            node.lost = self.read_only or "dropped from memory before it could be saved"
        self.tree.forget(node)
        return True

    # Agents -----------------------------------------------------------------------------------------------------------

    def find(self, name: str, tenant: str = "") -> Agent:
        agent = self.agents.get((tenant or DEFAULT_TENANT, name))
        if agent is None or not (agent.generation or agent.unsaved):
            raise UnknownAgentError(f"no such agent: {name[:MOST_NAME]!r}")
        return agent

    def evict(self, name: str, tenant: str = "") -> int:
        """Drop an agent's blocks from memory, those that no other agent owns; bytes that were freed. What is not saved
        is saved first; if that fails, everything stays and StoreError says why.
        """
        agent = self.find(name, tenant)
        with self._turn_of(agent):
            self.writer.flush()
            if (unsaved := agent.unsaved) is not None and self.disk is not None:
                self.save(agent, unsaved, agent.chain()).result()
            freed = 0
            with self.lock:
                for node in reversed(agent.chain()):
                    if node.named + node.anonymous == 1 and self.cool(node):
                        freed += self.pool.block_bytes
            return freed

    def warm_up(self, name: str, tenant: str = "") -> "Warmed":
        """Bring an agent's blocks into memory ahead of its next turn."""
        from everwarm.kv.tiers import warm_up

        return warm_up(self, self.find(name, tenant))

    def fork(self, name: str, new: str, tenant: str = "") -> None:
        """Another agent with the same history. Costs one manifest."""
        check_name(new, "agent")
        agent = self.find(name, tenant)
        with self._turn_of(agent):
            now = self.clock()
            manifest = replace(
                self.manifest(agent),
                name=new,
                generation=1,
                created=now,
                used=now,
                anonymous=False,
                group="",
                pinned=False,
            )
            with self.lock:
                if (agent.tenant, new) in self.agents:
                    raise AgentExistsError(f"agent {new!r} exists already; remove it first")
                copy = self.new_agent(agent.tenant, new)
                self.claim(copy)  # nobody talks as the copy before it is whole
            try:
                self._change(copy, manifest, agent.chain())
            except StoreError:
                if self.disk is not None and not self.read_only:
                    self.writer.submit(lambda: self.warm.withdraw(copy)).result()
                self.disown(copy)
                raise
            finally:
                self.end_turn(copy)

    def pin(self, name: str, pinned: bool = True, tenant: str = "") -> None:
        """A pinned agent's blocks stay on disk; in memory, too, unless those who talk need all of it."""
        agent = self.find(name, tenant)
        with self._turn_of(agent):
            before = self.manifest(agent)
            changed = before.as_next(pinned=pinned)
            try:
                self._change(agent, changed, agent.chain())
            except StoreError:
                self.own(agent, changed.as_next(pinned=before.pinned), agent.chain())  # saved with the next turn
                raise

    def delete(self, name: str, tenant: str = "") -> None:
        """Remove an agent and the blocks that nobody else owns. Raises StoreError if it could not be removed, or if it
        was and some of its files could not be: they are tried again.
        """
        agent = self.find(name, tenant)
        with self._turn_of(agent):
            self._delete(agent)

    def delete_if(self, agent: Agent, condition: Callable[[Agent], bool]) -> bool:
        """Remove an agent if nobody talks to it and the condition holds once its turn is owned; whether it did."""
        with self.lock:
            if not self.claim(agent):
                return False
        try:
            if not (agent.generation or agent.unsaved) or not condition(agent):
                return False
            self._delete(agent)
            return True
        finally:
            self.end_turn(agent)

    def _delete(self, agent: Agent) -> None:
        left = ""
        if self.disk is not None:
            self._may_write()
            left = self.writer.submit(lambda: self.warm.remove(agent)).result()
        self.disown(agent)
        if left:
            raise StoreError(left)

    def disown(self, agent: Agent) -> None:
        """The agent, whose turn is owned, has never said anything."""
        with self.lock:
            alone, leaf = alone_with(agent), agent.leaf
            self._count(agent, agent.chain(), -1)
            self._forget_text(agent)
            self.unnamed.pop(id(agent), None)
            self.unsaved.discard(agent)
            agent.leaf, agent.generation, agent.unsaved = None, 0, None
            agent.tokens, agent.kv_tokens, agent.salt, agent.text_digest = 0, 0, b"", ""
            agent.anonymous, agent.pinned, agent.group = False, False, ""
            for node in alone:
                self.cool(node)
                self.tree.forget(node)
            if leaf is not None:
                self.tree.forget(leaf)

    def export(self, name: str, path: Path | str, tenant: str = "") -> "Moved":
        """Write an agent to a file that another machine with the same weights and numerics can import."""
        from everwarm.kv.export import export_agent

        return export_agent(self, name, Path(path), tenant)

    def import_(self, path: Path | str, name: str | None = None, tenant: str = "", *, trust: bool = False) -> "Moved":
        """Take in an agent that was exported. Its blocks are its own, unless the origin of the file is trusted."""
        from everwarm.kv.export import import_agent

        return import_agent(self, Path(path), name, tenant, trust=trust)

    def manifest(self, agent: Agent) -> Manifest:
        """All that is known of an agent, from disk if it is there."""
        if (unsaved := agent.unsaved) is not None:
            return unsaved
        assert self.disk is not None
        try:
            return self.disk.load(agent.tenant, agent.name)
        except (OSError, StoreError) as error:
            raise StoreError(f"agent {agent.name!r}: {error}") from None

    def save(self, agent: Agent, manifest: Manifest, chain: list[Node]) -> "Future[int]":
        """The agent has this history from now on; the future tells when it is on disk, and how many bytes that took
        just now.
        """
        superseded = self.own(agent, manifest, chain)
        if self.read_only:
            refused: Future[int] = Future()
            refused.set_exception(StoreError(f"agent {agent.name!r} was not saved: {self.read_only}"))
            self.not_saved(agent, manifest)
            return refused
        size = manifest.tokens.nbytes + sum(len(run.text) for run in manifest.runs)
        return self.writer.submit(lambda: self.warm.commit(agent, manifest, chain, superseded), size)

    def not_saved(self, agent: Agent, manifest: Manifest) -> None:
        """The agent's last history stays in memory. If there are too many such, the longest unused are given up."""
        with self.lock:
            if agent.manifest_bytes == 0 and agent.generation:
                self.unsaved.add(agent, manifest)
            for one in self.unsaved.excess():
                if self.claim(one):
                    self.disown(one)
                    self.end_turn(one)
                    self.counters["given_up"] += 1

    def _change(self, agent: Agent, manifest: Manifest, chain: list[Node]) -> None:
        if self.disk is not None:
            self._may_write()
            self.save(agent, manifest, chain).result()
        else:
            self.own(agent, manifest, chain)

    def own(self, agent: Agent, manifest: Manifest, chain: list[Node]) -> Node | None:
        """The agent owns this chain from now on, and no longer what it owned before. Returns the partial block that its
        history ended with until now, if nobody owns it any more.
        """
        with self.lock:
            before, owned = agent.leaf, agent.chain()
            same = (agent.anonymous, agent.pinned) == (manifest.anonymous, manifest.pinned)
            kept = _common(owned, chain) if same else 0
            self._count(agent, owned[kept:], -1)
            self._forget_text(agent)
            agent.anonymous, agent.group, agent.pinned = manifest.anonymous, manifest.group, manifest.pinned
            agent.generation, agent.salt = manifest.generation, bytes.fromhex(manifest.salt)
            agent.tokens, agent.kv_tokens = len(manifest.tokens), chain[-1].end if chain else 0
            agent.created, agent.used = manifest.created, manifest.used
            agent.leaf = chain[-1] if chain else None
            agent.unsaved = manifest
            agent.text_digest = manifest.text_digest
            if agent.anonymous or agent.group:
                self.by_text[agent.tenant, agent.group, agent.text_digest] = agent
            self._count(agent, chain[kept:], +1)
            self.unnamed.pop(id(agent), None)
            if agent.anonymous:
                self.unnamed[id(agent)] = agent
            if before is not None:
                self.tree.forget(before)
            self.hot.touch(node for node in reversed(chain) if node.block is not None)
            self.warm.touch(chain)
            partial = before is not None and len(before.tokens) < 4 * self.pool.block_tokens
            return before if partial and before is not None and not before.owned else None

    def chain_of(self, manifest: Manifest) -> list[Node]:
        """The nodes of a manifest's blocks, from the beginning on, as far as these bear the names of its tokens. Nodes
        that are not known are made.
        """
        size = 4 * self.pool.block_tokens
        tokens = token_bytes(manifest.tokens)[: 4 * manifest.kv_tokens]
        node, chain = self.root(bytes.fromhex(manifest.salt)), []
        for number, key in enumerate(manifest.blocks):
            part = tokens[number * size : (number + 1) * size]
            node = self.tree.child(node, part) if part else node
            if not part or node.key != key:
                self.tree.forget(node)
                break
            chain.append(node)
        return chain

    def _count(self, agent: Agent, chain: list[Node], change: int) -> None:
        for node in chain:
            if agent.anonymous:
                node.anonymous += change
            else:
                node.named += change
            node.pinned += change if agent.pinned else 0
            self.hot.refile(node)
            self.warm.recency.refile(node)

    def _forget_text(self, agent: Agent) -> None:
        at = agent.tenant, agent.group, agent.text_digest
        if self.by_text.get(at) is agent:
            del self.by_text[at]

    def _turn_of(self, agent: Agent) -> "_Owned":
        return _Owned(self, agent)

    def _may_write(self) -> None:
        if self.read_only:
            raise StoreError(f"agents can't be changed: {self.read_only}")

    # Life -------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything that was handed over is on disk."""
        self.writer.flush()

    def close(self) -> None:
        """Write what is left; free the memory; let others write."""
        if self._expiring is not None:
            self._expiring.join()
        try:
            self._save_again()
            if self._lock_file is not None:
                self.writer.submit(self.warm.delete_doomed).result()
        finally:
            self.writer.close()
            with self.lock:
                for node in list(self.tree.nodes.values()):
                    if node.block is not None:
                        self.pool.drop([node.block])
                        node.block = None
            self._unlock()

    def _save_again(self) -> None:
        """What could not be saved at the end of its turn: perhaps the disk is well by now."""
        if self._lock_file is None:
            return
        self.flush()
        for agent in list(self.agents.values()):
            if (unsaved := agent.unsaved) is not None:
                try:
                    self.save(agent, unsaved, agent.chain()).result()
                except StoreError as error:
                    _log.error("%s", error)

    def _unlock(self) -> None:
        if self._lock_file is not None:
            self._lock_file.release()
            self._lock_file = None


def _common(one: list[Node], other: list[Node]) -> int:
    """How many blocks two chains have in common from their beginning."""
    short = min(len(one), len(other))
    return next((i for i in range(short) if one[i] is not other[i]), short)


class _Owned:
    """A turn that is not for talking."""

    def __init__(self, store: AgentStore, agent: Agent) -> None:
        self._store, self._agent = store, agent

    def __enter__(self) -> None:
        with self._store.lock:
            self._agent.waiting += 1
        self._agent.turn.enter(None)
        if not (self._agent.generation or self._agent.unsaved):
            self._store.end_turn(self._agent)
            raise UnknownAgentError(f"no such agent: {self._agent.name!r}")

    def __exit__(self, *error: object) -> None:
        self._store.end_turn(self._agent)
