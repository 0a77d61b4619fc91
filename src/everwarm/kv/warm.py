"""The warm tier of one model: what is on disk, under the quota of the whole store.

`write`, `put`, `commit`, `remove` and `make_room` run on the writer's thread, one after the other. Files are touched
without the store's lock.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from everwarm.errors import StoreError
from everwarm.kv.agent import Agent
from everwarm.kv.chain import Key
from everwarm.kv.container import Array, VersionError
from everwarm.kv.disk import BlockName, CorruptError, UnreadableError
from everwarm.kv.manifest import Manifest, file_name
from everwarm.kv.others import directory_bytes, shrink_others
from everwarm.kv.recency import Recency
from everwarm.kv.tree import Node

if TYPE_CHECKING:
    from everwarm.kv.store import AgentStore

_log = logging.getLogger(__name__)


def alone_with(agent: "Agent") -> list[Node]:
    """Blocks that nobody else owns or uses, children first: of its chain, and of what once branched off from them."""
    found: list[Node] = []
    left = [node for node in agent.chain() if node.named + node.anonymous == 1 and not node.claims][:1]
    while left:
        node = left.pop()
        found.append(node)
        left += node.children
    return found[::-1]


class WarmTier:
    """Bytes on disk, and who goes first when they are too many."""

    def __init__(self, store: "AgentStore", quota: int) -> None:
        self._store = store
        self.quota = quota
        self.bytes = 0  # of this model
        self.other_bytes = 0  # of other models, and in quarantine
        self.recency = Recency()
        self.quarantined = 0
        self.garbage: set[Key] = set()  # on disk, but no chain of parents leads to them
        self.other_versions: dict[str, str] = {}  # files that are left alone, and why

    # Saving -----------------------------------------------------------------------------------------------------------

    def write(self, node: Node, block: int) -> None:
        """Write one block, which is held for this. What goes wrong is told when the turn is committed."""
        try:
            if not node.on_disk:
                self.put(node, self._store.pool.data(block))
        except (OSError, StoreError) as error:
            self._store.counters["save_errors"] += 1
            _log.debug("block %s was not saved: %s", node.key.hex(), error)
        finally:
            with self._store.lock:
                node.writing = False
                self._store.pool.drop([block])
                self._store.tree.forget(node)

    def commit(self, agent: "Agent", manifest: Manifest, chain: list[Node], superseded: Node | None) -> int:
        """Make a history durable: its blocks, then its manifest; the bytes written for it now. Raises StoreError."""
        store = self._store
        disk = store.disk
        assert disk is not None
        started, written = time.perf_counter(), 0
        try:
            if why := self.other_versions.get(file_name(manifest.tenant, manifest.name)):
                raise StoreError(f"its manifest {why}; take another name, or remove that file")
            for number, node in enumerate(chain):
                if node.on_disk:
                    continue
                with store.lock:
                    if node.block is None:  # given up when memory was short: the history stays, its KV ends here
                        manifest = replace(
                            manifest, blocks=manifest.blocks[:number], kv_tokens=node.end - len(node.tokens) // 4
                        )
                        break
                    block = store.pool.hold(node.block)
                try:
                    written += self.put(node, store.pool.data(block))
                finally:
                    store.pool.drop([block])
            disk.sync_blocks()
            size = disk.commit(manifest, lambda size: self.make_room(size - agent.manifest_bytes))
        except (OSError, StoreError) as error:
            store.counters["save_errors"] += 1
            agent.superseded += [superseded] if superseded else []
            raise StoreError(f"agent {agent.name!r} was not saved: {error}") from None
        with store.lock:
            self.bytes += size - agent.manifest_bytes
            agent.manifest_bytes = size
            if agent.generation == manifest.generation:
                agent.unsaved = None
        store.counters["commits"] += 1
        store.counters["manifest_bytes"] += size
        store.seconds["save"] += time.perf_counter() - started
        self._delete_superseded(agent, superseded)
        return written + size

    def remove(self, agent: "Agent") -> None:
        """Delete an agent's manifest, then the blocks that nobody else owns."""
        store = self._store
        assert store.disk is not None
        try:
            store.disk.remove(agent.tenant, agent.name)
            with store.lock:
                self.bytes -= agent.manifest_bytes
                agent.manifest_bytes = 0
                alone = alone_with(agent)
            self.delete(alone)
            self._delete_superseded(agent)
            store.disk.sync_blocks()  # what was said is not to come back
        except OSError as error:
            store.counters["save_errors"] += 1
            raise StoreError(f"agent {agent.name!r} was not removed: {error}") from None

    def delete(self, nodes: list[Node], why: str = "") -> int:
        """Delete files of blocks; bytes that were freed."""
        store, freed = self._store, 0
        assert store.disk is not None
        for node in nodes:
            with store.lock:
                if not node.on_disk or node.claims:  # a turn may have begun to use it since it was chosen
                    continue
                node.on_disk, node.lost = False, why
                self.forgotten(node)
                freed += store.disk.block_file_bytes
                store.tree.forget(node)
            try:
                store.disk.delete(node.key)
            except OSError as error:
                _log.warning("block %s can't be deleted: %s", node.key.hex(), error)
        return freed

    def make_room(self, size: int) -> None:
        """Let go of blocks until `size` more bytes fit. Raises StoreError if they can't."""
        excess = self.bytes + self.other_bytes + size - self.quota
        if excess <= 0:
            return
        excess -= self._delete_garbage(excess)
        if excess > 0:
            excess -= self._remove_anonymous(excess, with_blocks=False)
        if excess > 0:
            excess -= self._evict(excess, named=False)
        if excess > 0:
            excess -= self._remove_anonymous(excess, with_blocks=True)
        if excess > 0 and self._store.disk is not None:
            freed = shrink_others(self._store.disk.root, self._store.ids.directory, excess, self._store.disk.files)
            self.other_bytes -= freed
            excess -= freed
        if excess > 0:
            excess -= self._evict(excess, named=True)
        if excess > 0:
            raise StoreError(
                f"the quota of {self.quota:,} bytes is full, {size:,} more are needed and nothing else can go: "
                "give a larger --warm-quota, unpin or remove agents"
            )

    def forgotten(self, node: Node) -> None:
        """Its file is not there any more, or is not what it was."""
        assert self._store.disk is not None
        self.recency.discard(node)
        self.bytes -= self._store.disk.block_file_bytes

    def touch(self, chain: list[Node]) -> None:
        self.recency.touch(node for node in reversed(chain) if node.on_disk)

    def put(self, node: Node, data: Array) -> int:
        """Write one block; its bytes on disk. Raises OSError, StoreError."""
        store = self._store
        assert store.disk is not None
        assert node.parent is not None
        started = time.perf_counter()
        self.make_room(store.disk.block_file_bytes)
        size = store.disk.put(BlockName(node.key, node.parent.key, node.tokens), [data])
        with store.lock:
            node.on_disk, node.lost = True, ""
            self.bytes += 0 if node.key in self.garbage else size
            self.garbage.discard(node.key)
            self.recency.touch([node])
        full = len(node.tokens) == 4 * store.pool.block_tokens
        store.counters["saved_blocks"] += 1
        store.counters["saved_bytes" if full else "saved_tail_bytes"] += size
        store.seconds["save"] += time.perf_counter() - started
        return size

    def _delete_garbage(self, excess: int) -> int:
        store, freed = self._store, 0
        assert store.disk is not None
        while self.garbage and freed < excess:
            try:
                store.disk.delete(self.garbage.pop())
            except OSError:
                continue
            freed += store.disk.block_file_bytes
        self.bytes -= freed
        return freed

    def _remove_anonymous(self, excess: int, *, with_blocks: bool) -> int:
        """Remove conversations without a name, the longest unused first: else their manifests alone would fill the
        quota one day. Those that are being talked to or saved stay.
        """
        store, freed = self._store, 0
        with store.lock:
            agents = sorted((one for one in store.agents.values() if one.anonymous), key=lambda one: one.used)
        for agent in agents if with_blocks else agents[:64]:  # the first to have lost theirs
            if freed >= excess:
                break
            with store.lock:
                dead = with_blocks or not any(node.available for node in alone_with(agent))
                if not dead or agent.unsaved is not None or agent.pinned or not store.claim(agent):
                    continue
            before = self.bytes
            try:
                self.remove(agent)
                store.disown(agent)
            except StoreError as error:
                _log.warning("%s", error)
            finally:
                store.end_turn(agent)
            freed += before - self.bytes
        return freed

    def _evict(self, excess: int, *, named: bool) -> int:
        with self._store.lock:
            victims: list[Node] = []
            for node in self.recency.oldest_first():
                if len(victims) * self._store.disk.block_file_bytes >= excess:  # type: ignore[union-attr]
                    break
                if (node.named > 0) == named and not node.pinned and not node.claims:
                    victims.append(node)
        freed = self.delete(victims, "evicted by quota")
        self._store.counters["warm_evictions"] += len(victims)
        return freed

    def _delete_superseded(self, agent: "Agent", last: Node | None = None) -> None:
        """Ends of a history that has grown into other blocks: of no use any more, unless someone else's history ends
        there.
        """
        nodes = [*agent.superseded, *([last] if last else [])]
        agent.superseded = []
        with self._store.lock:
            unused = [node for node in nodes if not node.owned and not node.claims]
            for node in unused:
                self._store.cool(node)
        self.delete(unused)

    # Finding ----------------------------------------------------------------------------------------------------------

    def scan(self, most_age_s: float | None) -> None:
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
                self.quarantine(path, str(found))
        strangers = []
        for key, size in disk.blocks():
            if size != disk.block_file_bytes:
                try:
                    disk.check_version(key)
                except VersionError as error:
                    self.left_alone(disk.block_path(key), f"is of {error}")
                    self.bytes += size
                else:
                    self.quarantine(disk.block_path(key), f"{size:,} bytes, expected {disk.block_file_bytes:,}")
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
        self.other_bytes = directory_bytes(disk.root, disk.path.name)
        expired = 0 if most_age_s is None else self.expire(store.clock() - most_age_s)
        _log.info(
            "agent store %s: %d agents, %d blocks, %d bytes, %d quarantined, %d expired, %.0f ms",
            disk.path, len(store.agents), len(self.recency), self.bytes, self.quarantined, expired,
            1000 * (time.perf_counter() - started),
        )  # fmt: skip

    def _found_agent(self, manifest: Manifest, path: Path, size: int) -> None:
        store = self._store
        chain = store.chain_of(manifest)
        if chain is None:
            self.quarantine(path, "its blocks have other names than its tokens")
            return
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
                self.quarantine(store.disk.block_path(key), str(error))
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
                    ready.append(node.key) if node.key in left else None
        self.garbage = {name.key for names in left.values() for name in names}

    def expire(self, before: float) -> int:
        """Remove agents that were not used since then; how many."""
        with self._store.lock:
            everyone = list(self._store.agents.values())
        old = [one for one in everyone if one.generation and one.used < before and not (one.pinned or one.waiting)]
        if self._store.read_only:
            return 0
        expired = 0
        for agent in old:
            try:
                self._store.delete(agent.name, agent.tenant)
                expired += 1
            except StoreError as error:
                _log.warning("%s", error)
        return expired

    def left_alone(self, path: Path, why: str) -> None:
        """A file is not ours to read: it stays where it is."""
        _log.warning("%s %s; it is left alone", path, why)
        self.other_versions[path.name] = why

    def quarantine(self, path: Path, why: str) -> None:
        """A file is not what it should be: count it and, where we may write, move it out of the way."""
        _log.error("%s: %s; moved to quarantine", path, why)
        assert self._store.disk is not None
        size = 0 if self._store.read_only else self._store.disk.quarantine(path)
        with self._store.lock:
            self.other_bytes += size
            self.quarantined += 1
            self._store.counters["corrupt"] += 1
