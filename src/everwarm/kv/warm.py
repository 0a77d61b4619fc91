"""The warm tier of one model: what is on disk, under the quota of the whole store.

`write`, `put`, `commit`, `remove` and `make_room` run on the writer's thread, one after the other. Files are touched
without the store's lock.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from everwarm.errors import StoreError
from everwarm.kv.agent import Agent
from everwarm.kv.chain import Key
from everwarm.kv.container import Array, VersionError
from everwarm.kv.disk import BlockName, CorruptError, UnreadableError
from everwarm.kv.manifest import Manifest, file_name
from everwarm.kv.others import OtherModels
from everwarm.kv.recency import Recency, rank_on_disk
from everwarm.kv.tree import Node

if TYPE_CHECKING:
    from everwarm.kv.store import AgentStore

_log = logging.getLogger(__name__)


def alone_with(agent: Agent) -> list[Node]:
    """Blocks that nobody else owns or uses, children first: of its chain, and of what once branched off from them."""
    found: list[Node] = []
    left = [node for node in agent.chain() if node.named + node.anonymous == 1 and not node.claims][:1]
    while left:
        node = left.pop()
        found.append(node)
        left += node.children
    return found[::-1]


BATCH_BLOCKS = 64
"""Blocks that go at a time when the quota is full, if that is a small part of it."""
PLAN_AHEAD = 0.9
"""How full the quota is when we begin to look for what other models could give up."""
DOOMED_AT_ONCE = 64
MOST_UNSYNCED = 1024


class WarmTier:
    """Bytes on disk, and who goes first when they are too many."""

    def __init__(self, store: "AgentStore", quota: int) -> None:
        self._store = store
        self.quota = quota
        self.bytes = 0  # of this model
        self.others: OtherModels | None = None  # other models and quarantine; None until the first scan
        self.recency = Recency(rank_on_disk)
        self.quarantined = 0
        self.garbage: set[Key] = set()  # on disk, but no chain of parents leads to them: deleted when space is needed
        self.doomed: set[Key] = set()  # should be deleted and could not be: counted, and tried again at each save
        self.doomed_manifests: dict[tuple[str, str], int] = {}  # likewise, with their bytes
        self.other_versions: dict[str, str] = {}  # files that are left alone, and why
        self._unsynced: list[Node] = []  # renamed into place since the directory was last synced

    @property
    def other_bytes(self) -> int:
        """Of other models, and in quarantine."""
        return self.others.bytes if self.others is not None else 0

    # Saving -----------------------------------------------------------------------------------------------------------

    def write(self, node: Node, block: int) -> None:
        """Write one block, which is held for this. What goes wrong is told when the turn is committed."""
        try:
            if not node.safe:
                self.put(node, self._store.pool.read(block))
        except (OSError, StoreError) as error:
            self._store.counters["save_errors"] += 1
            _log.debug("block %s was not saved: %s", node.key.hex(), error)
        finally:
            with self._store.lock:
                node.writing = False
                self._store.pool.drop([block])
                self._store.tree.forget(node)

    def commit(self, agent: Agent, manifest: Manifest, chain: list[Node], superseded: Node | None) -> int:
        """Make a history durable: its blocks, then its manifest; the bytes written for it now. Raises StoreError."""
        store = self._store
        disk = store.disk
        assert disk is not None
        started = time.perf_counter()
        try:
            if agent.generation < manifest.generation:
                raise StoreError("it was given up: too many conversations could not be saved")
            if why := self.other_versions.get(file_name(manifest.tenant, manifest.name)):
                raise StoreError(f"its manifest {why}; take another name, or remove that file")
            self.delete_doomed()
            saved, written = self._save_blocks(chain)
            self._sync_blocks()
            # The manifest counts what is there: blocks may have been given up when memory was short, or have come back.
            blocks = chain[:saved]
            manifest = replace(
                manifest, blocks=tuple(node.key for node in blocks), kv_tokens=blocks[-1].end if blocks else 0
            )
            # A manifest of this name that should have been deleted is replaced: it counts as this agent's from now on.
            agent.manifest_bytes += self.doomed_manifests.pop((agent.tenant, agent.name), 0)
            if agent.unreadable:
                self._set_aside(agent)
            try:
                size = disk.commit(manifest, lambda size: self.make_room(size - agent.manifest_bytes))
            except OSError:
                self._count_manifest(agent)  # the new one may be in place, though not for sure
                raise
        except (OSError, StoreError) as error:
            store.counters["save_errors"] += 1
            agent.superseded += [superseded] if superseded else []
            store.not_saved(agent, manifest)
            raise StoreError(f"agent {agent.name!r} was not saved: {error}") from None
        with store.lock:
            self.bytes += size - agent.manifest_bytes
            agent.manifest_bytes = size
            if agent.generation == manifest.generation:
                agent.unsaved = None
                store.unsaved.discard(agent)
        store.counters["commits"] += 1
        store.counters["manifest_bytes"] += size
        store.seconds["save"] += time.perf_counter() - started
        self._delete_superseded(agent, superseded)
        return written + size

    def remove(self, agent: Agent) -> str:
        """Delete an agent's manifest, then the blocks that nobody else owns. Raises StoreError if the agent stays as it
        was. Returns what could not be deleted, in words: it counts, and is tried again.
        """
        store = self._store
        disk = store.disk
        assert disk is not None
        self.delete_doomed()
        before = None
        with suppress(OSError, StoreError):  # then there is nothing to put back
            before = disk.load(agent.tenant, agent.name)
        try:
            disk.remove(agent.tenant, agent.name)
        except OSError as error:
            store.counters["save_errors"] += 1
            if before is not None:
                self._put_back(agent, before)
            raise StoreError(f"agent {agent.name!r} was not removed: {error}") from None
        with store.lock:
            self.bytes -= agent.manifest_bytes
            agent.manifest_bytes = 0
            alone = alone_with(agent)
        problem = self.delete([*alone, *self._unused(agent)])[1]
        try:
            self._sync_blocks()  # what was said is not to come back
        except OSError as error:
            problem = problem or error
        if problem is None:
            return ""
        store.counters["save_errors"] += 1
        left = sum(node.key in self.doomed for node in alone)
        what = (
            f"{left} files with parts of its history could not be deleted" if left else "a power loss may bring it back"
        )
        return f"agent {agent.name!r} was removed, but {what}: {problem}; it is tried again at the next save"

    def withdraw(self, agent: Agent) -> None:
        """A new agent is not to be, after all: its manifest goes, if it is there."""
        assert self._store.disk is not None
        if not agent.manifest_bytes:
            return
        at, size = (agent.tenant, agent.name), agent.manifest_bytes
        agent.manifest_bytes = 0
        self.doomed_manifests[at] = size
        self.delete_doomed()

    def delete(self, nodes: list[Node], why: str = "") -> tuple[int, OSError | None]:
        """Delete files of blocks; the bytes that were freed, and what went wrong with one of them, if anything did."""
        store, freed = self._store, 0
        assert store.disk is not None
        problem: OSError | None = None
        for node in nodes:
            with store.lock:
                if not node.on_disk or node.claims:  # a turn may have begun to use it since it was chosen
                    continue
                self.gone(node, why, file_stays=True)
                self.doomed.add(node.key)
                store.tree.forget(node)
            try:
                freed += self._delete_file(node.key, self.doomed)
            except OSError as error:
                problem = error
                _log.warning("block %s can't be deleted: %s", node.key.hex(), error)
        return freed, problem

    def delete_doomed(self) -> None:
        """Try again what could not be deleted. What still can't be is left for the next time."""
        assert self._store.disk is not None
        try:
            for key in list(self.doomed)[:DOOMED_AT_ONCE]:
                self._delete_file(key, self.doomed)
            for (tenant, name), size in list(self.doomed_manifests.items())[:DOOMED_AT_ONCE]:
                self._store.disk.remove(tenant, name)
                del self.doomed_manifests[tenant, name]
                self.bytes -= size
        except OSError as error:
            _log.warning("files that should go are still there: %s", error)

    def make_room(self, size: int) -> None:
        """Let go of blocks until `size` more bytes fit. Raises StoreError if they can't. When something must go, a
        little more does: what it takes to find it is shared by the next blocks.
        """
        used = self.bytes + self.other_bytes + size
        if self.others is not None and used > PLAN_AHEAD * self.quota:
            self.others.plan_ahead()
        excess = used - self.quota
        if excess <= 0:
            return
        assert self._store.disk is not None
        more = min(BATCH_BLOCKS * self._store.disk.block_file_bytes, self.quota // 256)
        for let_go in (
            self._delete_garbage,
            self._remove_anonymous_without_blocks,
            lambda wanted: self._evict(wanted, 0),
            self._remove_anonymous,
            self.others.free if self.others is not None else lambda wanted: 0,
            lambda wanted: self._evict(wanted, 1),
        ):
            excess -= let_go(excess + more)
            if excess <= 0:
                return
        raise StoreError(
            f"the quota of {self.quota:,} bytes is full, {size:,} more are needed and nothing else can go: "
            "give a larger --warm-quota, unpin or remove agents"
        )

    def gone(self, node: Node, why: str, *, file_stays: bool = False) -> None:
        """A block is not to be had from disk any more. With `file_stays` its bytes still count. With `lock` held."""
        assert self._store.disk is not None
        node.on_disk, node.suspect, node.lost = False, False, why
        self.recency.discard(node)
        self._store.hot.refile(node)
        if not file_stays:
            self.bytes -= self._store.disk.block_file_bytes

    def touch(self, chain: list[Node]) -> None:
        self.recency.touch(node for node in reversed(chain) if node.on_disk)

    def put(self, node: Node, data: Array) -> int:
        """Write one block; its bytes on disk. Raises OSError, StoreError."""
        store = self._store
        assert store.disk is not None
        assert node.parent is not None
        started = time.perf_counter()
        if not self._counted(node):
            self.make_room(store.disk.block_file_bytes)
        size = store.disk.put(BlockName(node.key, node.parent.key, node.tokens), [data])
        with store.lock:
            self.bytes += 0 if self._counted(node) else size
            node.on_disk, node.suspect, node.lost = True, False, ""
            self.garbage.discard(node.key)
            self.doomed.discard(node.key)
            self.recency.touch([node])
            store.hot.refile(node)
        self._unsynced.append(node)
        if len(self._unsynced) >= MOST_UNSYNCED:  # of turns that were never committed
            self._sync_blocks()
        full = len(node.tokens) == 4 * store.pool.block_tokens
        store.counters["saved_blocks"] += 1
        store.counters["saved_bytes" if full else "saved_tail_bytes"] += size
        store.seconds["save"] += time.perf_counter() - started
        return size

    def _counted(self, node: Node) -> bool:
        """Whether a file of this name is there and counts already."""
        return node.on_disk or node.key in self.garbage or node.key in self.doomed

    def _save_blocks(self, chain: list[Node]) -> tuple[int, int]:
        """Write what is not safe yet; how many blocks from the beginning on are on disk, and the bytes written."""
        written = 0
        for number, node in enumerate(chain):
            if node.safe:
                continue
            with self._store.lock:
                block = None if node.block is None else self._store.pool.hold(node.block)
            try:
                data = self._store.pool.read(block) if block is not None else self._read_back(node)
                if data is None:  # given up when memory was short: the history stays, its KV ends here
                    return number, written
                written += self.put(node, data)
            finally:
                if block is not None:
                    self._store.pool.drop([block])
        return len(chain), written

    def _read_back(self, node: Node) -> Array | None:
        """The bytes of a block that is on disk but suspect."""
        assert self._store.disk is not None
        if not node.on_disk or node.parent is None:
            return None
        data = np.empty(self._store.pool.block_bytes, np.uint8)
        try:
            self._store.disk.get(BlockName(node.key, node.parent.key, node.tokens), [data])
        except (OSError, StoreError):
            return None
        return data

    def _sync_blocks(self) -> None:
        """Make the names of new blocks safe. If that fails, the system may have forgotten them although a later sync
        succeeds: each has to be written again before a manifest may rely on it.
        """
        assert self._store.disk is not None
        unsynced, self._unsynced = self._unsynced, []
        try:
            self._store.disk.sync_blocks()
        except OSError:
            with self._store.lock:
                for node in unsynced:
                    node.suspect = node.on_disk
                    self._store.hot.refile(node)
            raise

    def _set_aside(self, agent: Agent) -> None:
        """Its manifest can't be read. It goes to quarantine, not away: somebody may be able to read it."""
        assert self._store.disk is not None
        self.quarantine(self._store.disk.manifest_path(agent.tenant, agent.name), agent.unreadable)
        agent.unreadable = ""
        self._count_manifest(agent)

    def _put_back(self, agent: Agent, manifest: Manifest) -> None:
        """A removal was refused: the agent is as it was. If its manifest can't be written, it is saved later."""
        disk = self._store.disk
        assert disk is not None
        if disk.manifest_bytes(agent.tenant, agent.name):
            return
        try:
            disk.commit(manifest, lambda size: None)
        except OSError:
            with self._store.lock:
                agent.unsaved = agent.unsaved or manifest
        self._count_manifest(agent)

    def _count_manifest(self, agent: Agent) -> None:
        """Count the bytes of the manifest that is there now."""
        assert self._store.disk is not None
        size = self._store.disk.manifest_bytes(agent.tenant, agent.name)
        with self._store.lock:
            self.bytes += size - agent.manifest_bytes
            agent.manifest_bytes = size

    def _delete_file(self, key: Key, among: set[Key]) -> int:
        """Delete the file of a block that is no longer in the tree; the bytes that were freed. Raises OSError."""
        disk = self._store.disk
        assert disk is not None
        disk.delete(key)
        with self._store.lock:
            among.discard(key)
            self.bytes -= disk.block_file_bytes
        return disk.block_file_bytes

    def _delete_garbage(self, wanted: int) -> int:
        freed = 0
        for key in list(self.garbage) if self.garbage else ():
            if freed >= wanted:
                break
            with suppress(OSError):
                freed += self._delete_file(key, self.garbage)
        return freed

    def _remove_anonymous_without_blocks(self, wanted: int) -> int:
        """Manifests of conversations without a name whose own blocks are gone: else they would fill the quota one day.
        The longest unused lose theirs first, so the first that has some ends the search.
        """
        return self._remove_unused(wanted, lambda agent: not any(node.available for node in alone_with(agent)))

    def _remove_anonymous(self, wanted: int) -> int:
        """Conversations without a name as a whole, the longest unused first."""
        return self._remove_unused(wanted, lambda agent: True)

    def _remove_unused(self, wanted: int, may_go: Callable[[Agent], bool]) -> int:
        """Those that are being talked to, saved or pinned stay."""
        store, freed = self._store, 0
        passed: list[Agent] = []
        while freed < wanted:
            with store.lock:
                agent = next(iter(store.unnamed.values()), None)
                if agent is None or not may_go(agent):
                    break
                del store.unnamed[id(agent)]
                if agent.unsaved is not None or agent.pinned or not store.claim(agent):
                    passed.append(agent)
                    continue
            before = self.bytes
            try:
                self.remove(agent)
                store.disown(agent)
            except StoreError as error:
                _log.warning("%s", error)
                passed.append(agent)
            finally:
                store.end_turn(agent)
            freed += before - self.bytes
        with store.lock:
            for agent in passed:
                if agent.anonymous:
                    store.unnamed[id(agent)] = agent
        return freed

    def _evict(self, wanted: int, rank: int) -> int:
        assert self._store.disk is not None
        freed = 0
        while freed < wanted:
            count = -(-(wanted - freed) // self._store.disk.block_file_bytes)
            with self._store.lock:
                nodes = self.recency.oldest(rank, min(count, BATCH_BLOCKS), lambda node: node.claims > 0)
            if not nodes:
                break
            freed += self.delete(nodes, "evicted by quota")[0]
            self._store.counters["warm_evictions"] += len(nodes)
        return freed

    def _unused(self, agent: Agent, last: Node | None = None) -> list[Node]:
        """Ends of a history that has grown into other blocks: of no use any more, unless someone else's history ends
        there.
        """
        nodes = [*agent.superseded, *([last] if last else [])]
        agent.superseded = []
        with self._store.lock:
            unused = [node for node in nodes if not node.owned and not node.claims]
            for node in unused:
                self._store.cool(node)
        return unused

    def _delete_superseded(self, agent: Agent, last: Node | None) -> None:
        self.delete(self._unused(agent, last))

    # Finding ----------------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Look at the directory: manifests, the listing of blocks, and headers of blocks that no manifest names."""
        store = self._store
        disk = store.disk
        assert disk is not None
        started = time.perf_counter()
        for salt in store.tenants.salts():
            store.root(salt)
        for found, path, size in disk.manifests():
            if isinstance(found, Manifest):
                self._found_agent(found, path, size)
            elif isinstance(found, UnreadableError):
                self.left_alone(path, f"can't be read: {found}")
                store.counters["read_errors"] += 1
            elif isinstance(found, VersionError):
                self.left_alone(path, f"is of {found}")
                self.bytes += size
            else:
                self.bytes += 0 if self.quarantine(path, str(found)) else size
        strangers = []
        for key, size in disk.blocks():
            if size != disk.block_file_bytes:
                try:
                    disk.check_version(key)
                except VersionError as error:
                    self.left_alone(disk.block_path(key), f"is of {error}")
                    self.bytes += size
                else:
                    why = f"{size:,} bytes, expected {disk.block_file_bytes:,}"
                    self.bytes += 0 if self.quarantine(disk.block_path(key), why) else size
                continue
            self.bytes += size
            node = store.tree.nodes.get(key)
            if node is not None and node.parent is not None:
                node.on_disk, node.lost = True, ""
            else:
                strangers.append(key)
        self._found_strangers(strangers)
        for agent in sorted(store.agents.values(), key=lambda agent: agent.used):
            self.touch(agent.chain())
            if agent.anonymous:
                store.unnamed[id(agent)] = agent
        self.others = OtherModels(disk.root, disk.path.name, disk.files)
        _log.info(
            "agent store %s: %d agents, %d blocks, %d bytes, %d quarantined, %.0f ms",
            disk.path, len(store.agents), len(self.recency), self.bytes, self.quarantined,
            1000 * (time.perf_counter() - started),
        )  # fmt: skip

    def _found_agent(self, manifest: Manifest, path: Path, size: int) -> None:
        store = self._store
        chain = store.chain_of(manifest)
        covered = chain[-1].end if chain else 0
        if len(chain) < len(manifest.blocks) or covered < manifest.kv_tokens:
            # A conversation is never thrown away because its cache is odd.
            _log.warning(
                "%s: it names %d blocks for %d tokens, %d of them fit; tokens and text are kept, the rest is computed",
                path, len(manifest.blocks), manifest.kv_tokens, len(chain),
            )  # fmt: skip
            store.counters["odd_manifests"] += 1
            manifest = replace(manifest, kv_tokens=covered, blocks=manifest.blocks[: len(chain)])
        agent = store.new_agent(manifest.tenant, manifest.name)
        store.own(agent, manifest, chain)
        agent.unsaved = None
        agent.manifest_bytes = size
        self.bytes += size

    def _found_strangers(self, keys: list[Key]) -> None:
        """Blocks of turns that were never committed: as good as any, if their parents are known."""
        store = self._store
        assert store.disk is not None
        left: dict[Key, list[BlockName]] = {}
        for key in keys:
            try:
                name = store.disk.describe(key)
            except CorruptError as error:
                if self.quarantine(store.disk.block_path(key), str(error)):
                    self.bytes -= store.disk.block_file_bytes
            except VersionError as error:
                self.left_alone(store.disk.block_path(key), f"is of {error}")
            except OSError:
                self.bytes -= store.disk.block_file_bytes
            else:
                left.setdefault(name.parent, []).append(name)
        ready = [key for key in left if key in store.tree.nodes]
        while ready:
            parent = store.tree.nodes[ready.pop()]
            for name in left.pop(parent.key, []):
                node = store.tree.child(parent, name.tokens)
                if node.key == name.key:
                    node.on_disk = True
                    self.recency.touch([node])
                    if node.key in left:
                        ready.append(node.key)
        self.garbage = {name.key for names in left.values() for name in names}

    def expire(self, before: float) -> int:
        """Remove agents that were not used since then; how many. One that talks just now, or has, stays."""
        store = self._store
        if store.read_only:
            return 0
        with store.lock:
            everyone = list(store.agents.values())
        expired = 0
        for agent in everyone:
            if self._expired(agent, before):
                try:
                    expired += store.delete_if(agent, lambda agent: self._expired(agent, before))
                except StoreError as error:
                    _log.warning("%s", error)
        if expired:
            _log.info("%d agents were not used for too long and are removed", expired)
        return expired

    def _expired(self, agent: Agent, before: float) -> bool:
        return bool(agent.generation) and agent.used < before and not agent.pinned

    def left_alone(self, path: Path, why: str) -> None:
        """A file is not ours to read: it stays where it is."""
        _log.warning("%s %s; it is left alone", path, why)
        self.other_versions[path.name] = why

    def quarantine(self, path: Path, why: str) -> bool:
        """A file is not what it should be: count it and, where we may write, move it out of the way; whether it was."""
        _log.error("%s: %s; moved to quarantine", path, why)
        assert self._store.disk is not None
        moved, size = (None, 0) if self._store.read_only else self._store.disk.quarantine(path)
        if moved is not None and self.others is not None:
            self.others.quarantined(moved, size)
        with self._store.lock:
            self.quarantined += 1
            self._store.counters["corrupt"] += 1
        return moved is not None
