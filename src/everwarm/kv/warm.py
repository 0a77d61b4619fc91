"""The warm tier of one model: what is on disk, under the quota of the whole store.

`write`, `commit`, `remove` and `make_room` run on the writer's thread, one after the other. Files are touched without
the store's lock.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from everwarm.errors import StoreError
from everwarm.kv.chain import Key
from everwarm.kv.disk import BlockName, CorruptError
from everwarm.kv.manifest import Manifest
from everwarm.kv.others import directory_bytes, shrink_others
from everwarm.kv.recency import Recency
from everwarm.kv.tree import Node

if TYPE_CHECKING:
    from everwarm.kv.store import Agent, AgentStore

_log = logging.getLogger(__name__)


class WarmTier:
    """Bytes on disk, and who goes first when they are too many."""

    def __init__(self, store: "AgentStore", quota: int) -> None:
        self._store = store
        self.quota = quota
        self.bytes = 0  # of this model
        self.other_bytes = 0  # of other models, and in quarantine
        self.recency = Recency()
        self.quarantined = 0

    # Saving -----------------------------------------------------------------------------------------------------------

    def write(self, node: Node, block: int) -> None:
        """Write one block, which is held for this. What goes wrong is told when the turn is committed."""
        try:
            if not node.on_disk:
                self._put(node, block)
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
                    written += self._put(node, block)
                finally:
                    store.pool.drop([block])
            disk.sync_blocks()
            size = disk.commit(manifest, lambda size: self.make_room(size - agent.manifest_bytes))
        except (OSError, StoreError) as error:
            store.counters["save_errors"] += 1
            raise StoreError(f"agent {agent.name!r} was not saved: {error}") from None
        with store.lock:
            self.bytes += size - agent.manifest_bytes
            agent.manifest_bytes = size
            if agent.generation == manifest.generation:
                agent.unsaved = None
        store.counters["commits"] += 1
        store.counters["manifest_bytes"] += size
        store.seconds["save"] += time.perf_counter() - started
        if superseded is not None:
            self._delete_superseded(superseded)
        return written + size

    def remove(self, agent: "Agent") -> None:
        """Delete an agent's manifest, then the blocks that nobody else owns."""
        store = self._store
        assert store.disk is not None
        try:
            store.disk.remove(agent.tenant, agent.name)
        except OSError as error:
            raise StoreError(f"agent {agent.name!r} was not removed: {error}") from None
        with store.lock:
            self.bytes -= agent.manifest_bytes
            agent.manifest_bytes = 0
            alone = [node for node in reversed(agent.chain()) if node.named + node.anonymous == 1 and not node.claims]
        self.delete(alone)

    def delete(self, nodes: list[Node], why: str = "") -> int:
        """Delete files of blocks; bytes that were freed."""
        store, freed = self._store, 0
        assert store.disk is not None
        for node in nodes:
            with store.lock:
                if not node.on_disk:
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
        excess -= self._evict(excess, named=False)
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

    def _put(self, node: Node, block: int) -> int:
        store = self._store
        assert store.disk is not None
        assert node.parent is not None
        started = time.perf_counter()
        self.make_room(store.disk.block_file_bytes)
        size = store.disk.put(BlockName(node.key, node.parent.key, node.tokens), [store.pool.data(block)])
        with store.lock:
            node.on_disk, node.lost = True, ""
            self.bytes += size
            self.recency.touch([node])
        full = len(node.tokens) == 4 * store.pool.block_tokens
        store.counters["saved_blocks"] += 1
        store.counters["saved_bytes" if full else "saved_tail_bytes"] += size
        store.seconds["save"] += time.perf_counter() - started
        return size

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

    def _delete_superseded(self, node: Node) -> None:
        """The end of a history that has grown into another block: of no use any more, unless someone else's history
        ends there.
        """
        store = self._store
        with store.lock:
            if node.owned or node.claims:
                return
            store.cool(node)
        self.delete([node])

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
            else:
                self._quarantine(path, str(found))
        strangers = []
        for key, size in disk.blocks():
            if size != disk.block_file_bytes:
                self._quarantine(disk.block_path(key), f"{size:,} bytes, expected {disk.block_file_bytes:,}")
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
        expired = 0 if most_age_s is None else self._expire(store.clock() - most_age_s)
        _log.info(
            "agent store %s: %d agents, %d blocks, %d bytes, %d quarantined, %d expired, %.0f ms",
            disk.path, len(store.agents), len(self.recency), self.bytes, self.quarantined, expired,
            1000 * (time.perf_counter() - started),
        )  # fmt: skip

    def _found_agent(self, manifest: Manifest, path: Path, size: int) -> None:
        store = self._store
        chain = store.chain_of(manifest)
        if chain is None:
            self._quarantine(path, "its blocks have other names than its tokens")
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
                self._quarantine(store.disk.block_path(key), str(error))
                self.bytes -= store.disk.block_file_bytes
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
        self.garbage = [name.key for names in left.values() for name in names]

    def _expire(self, before: float) -> int:
        old = [agent for agent in self._store.agents.values() if agent.used < before and not agent.pinned]
        if self._store.read_only:
            return 0
        for agent in old:
            self._store.delete(agent.name, agent.tenant)
        return len(old)

    def _quarantine(self, path: Path, why: str) -> None:
        _log.error("%s: %s; moved to quarantine", path, why)
        self.quarantined += 1
        self._store.counters["corrupt"] += 1
        if not self._store.read_only and self._store.disk is not None:
            self._store.disk.quarantine(path)
