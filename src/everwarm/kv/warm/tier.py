"""The warm tier of one model: what it has saved, under the quota of the whole store.

It tells the index what is on disk and what is gone. It knows no agents, only manifests (`kv.warm.manifests`). What
changes files runs on the writer's thread, with the mutex of the shared store held, and never under the index's lock.
"""

import errno
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np

from everwarm.errors import StoreError, TurnLostError
from everwarm.kernels.backend import FULL
from everwarm.kv.chain import Key, token_bytes
from everwarm.kv.container import Array, VersionError
from everwarm.kv.eviction import Worth
from everwarm.kv.index.index import Index, Superseded
from everwarm.kv.index.tree import Node, is_safe
from everwarm.kv.manifest import Manifest
from everwarm.kv.receipt import Cause, Why
from everwarm.kv.warm.blocks import BlockName, CorruptError, ModelBlocks
from everwarm.kv.warm.blockstore import ConflictError, ObjectId
from everwarm.kv.warm.leases import Leases
from everwarm.kv.warm.manifests import Manifests, Who
from everwarm.kv.warm.quarantine import Quarantine
from everwarm.kv.warm.shared import BATCH_BLOCKS, SharedStore

_log = logging.getLogger(__name__)

DOOMED_AT_ONCE = 64
MOST_UNSYNCED = 1024
SURE_S = 900.0
"""For so long after we have written a block, no collector takes it: see `kv.remote.store`."""
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors that say nothing about the file."""


class Conversations(Protocol):
    """Who owns histories without a name, and gives them up when space is needed. Called on a writer's thread."""

    def last_conversation(self) -> float | None:
        """When the longest unused one was last used; None if there is none."""

    def remove_conversations(self, tier: "WarmTier", wanted: int, empty: bool) -> int:
        """Remove them with `tier.remove`, the longest unused first, until so many bytes are free; how many are."""


class WarmTier:
    """Blocks and manifests on disk."""

    def __init__(self, index: Index, blocks: ModelBlocks, shared: SharedStore, conversations: Conversations) -> None:
        self.blocks = blocks
        self.shared = shared
        self.model = blocks.model
        self.quarantine = Quarantine(shared, index.counts.events)
        self.manifests = Manifests(blocks, shared, self.quarantine, index.counts.events)
        self.leases = Leases(blocks, self.manifests) if blocks.store.many_writers else None
        self.garbage: set[ObjectId] = set()  # on disk, but no chain of parents leads there: deleted for space
        self.doomed: set[ObjectId] = set()  # should be deleted and could not be: counted, and tried again at each save
        self._index = index
        self._conversations = conversations
        self._bytes = 0  # of blocks
        self._superseded: dict[Who, list[tuple[int, Superseded]]] = {}  # until these generations are stored
        self._unsynced: list[Node] = []  # put since the last sync
        self._put_at: dict[ObjectId, float] = {}  # when we have written blocks, where many write

    @property
    def _events(self) -> Counter[str]:
        return self._index.counts.events

    @property
    def bytes(self) -> int:
        """Of this model."""
        return self._bytes + self.manifests.bytes

    @property
    def spare_bytes(self) -> int:
        """What may be saved before something else has to go."""
        return self.shared.quota - self.shared.used

    @property
    def block_bytes(self) -> int:
        """Of one block of the main kind, with its header."""
        return self.blocks.object_bytes()

    def size_of(self, node: Node) -> int:
        """Of its file."""
        return self.blocks.object_bytes(node.kind)

    # Saving -----------------------------------------------------------------------------------------------------------

    def write(self, node: Node, block: int) -> None:
        """Write one block, which is held for this. What goes wrong is told when the turn is committed."""
        try:
            if not node.safe:
                with self.shared.mutex:
                    self.put(node, self._index.pool_of(node).read(block))
        except (OSError, StoreError) as error:
            self._events["save_errors"] += 1
            _log.debug("block %s was not saved: %s", node.key.hex(), error)
        finally:
            self._index.end_write(node, block)

    def commit(self, manifest: Manifest, chain: list[Node]) -> int:
        """Make a history durable: its blocks, then its manifest; the bytes written for it now. Raises StoreError."""
        started = time.perf_counter()
        who = manifest.tenant, manifest.name
        with self.shared.mutex:
            try:
                if why := self.manifests.refusal(who):
                    raise StoreError(f"its manifest {why}; take another name, or remove that file")
                self.delete_doomed()
                saved, written = self._save_blocks(chain)
                blocks = chain[:saved]
                beside = self._index.beside(blocks, token_bytes(manifest.tokens), manifest.positions)
                written += sum(self._save_blocks([node])[1] for node in beside)
                self._sync()
                if self.leases is not None:
                    self._make_sure(who, [*blocks, *beside])
                # The manifest counts what is there: blocks may have been given up when memory was short, or come back.
                end = blocks[-1].end if blocks else 0
                with self._index.lock:
                    positions = tuple(
                        position
                        for position in manifest.positions
                        if self._index.resume(blocks, min(position, end), is_safe).position == position
                    )
                manifest = replace(
                    manifest,
                    blocks=tuple(node.key for node in blocks),
                    kv_tokens=end,
                    positions=positions,
                    ends=self._ends(manifest, blocks, positions),
                )
                size = self._replace_manifest(manifest)
            except (OSError, StoreError) as error:
                self._events["save_errors"] += 1
                if self.leases is not None and isinstance(error, ConflictError):
                    raise TurnLostError(
                        f"agent {manifest.name!r} was not saved: another replica has taken over its turn, or has "
                        "removed it; send the request again"
                    ) from None
                raise StoreError(f"agent {manifest.name!r} was not saved: {error}") from None
            self._events["commits"] += 1
            self._events["manifest_bytes"] += size
            self._index.counts.seconds["save"] += time.perf_counter() - started
            self.delete(self._unused(who, manifest.generation))
        return written + size

    def _replace_manifest(self, manifest: Manifest) -> int:
        """Its bytes. Where many write, the lease ends with that."""
        if self.leases is None:
            return self.manifests.commit(manifest)
        who = manifest.tenant, manifest.name
        with self.leases.changing(who):
            size = self.manifests.commit(manifest)
            self.leases.ended(who)
        return size

    def _make_sure(self, who: Who, nodes: list[Node]) -> None:
        """Where many write, a collector may have taken blocks that we knew: those that no manifest names are looked at,
        unless we have just written them, and written again if need be.
        """
        now, named = time.monotonic(), self.manifests.named(who)
        self._put_at = {found: at for found, at in self._put_at.items() if at > now - SURE_S}
        doubtful = [node for node in nodes if node.key not in named and _id(node) not in self._put_at]
        gone = set(self.blocks.store.missing([self.blocks.blob(_id(node)) for node in doubtful]))
        lost = [node for node in doubtful if self.blocks.blob(_id(node)) in gone]
        if lost:
            self._index.suspect(lost)
            for node in lost:
                self._save_blocks([node])
            self._sync()
        self._put_at |= {_id(node): now for node in doubtful if node not in lost}

    def found(self, manifest: Manifest, nodes: list[Node]) -> None:
        """Somebody else has saved these blocks: a manifest names them."""
        with self._index.lock:
            for node in nodes:
                if not node.on_disk:
                    self._bytes += 0 if self._counted(node) else self.size_of(node)
                    self.garbage.discard(_id(node))
                    self.doomed.discard(_id(node))
                    self._index.saved(node)

    def fetch_ahead(self, nodes: list[Node]) -> None:
        """These are going to be read."""
        if self.blocks.store.many_writers:
            self.blocks.store.fetch_ahead([self.blocks.blob(_id(node)) for node in nodes])

    def _ends(self, manifest: Manifest, chain: list[Node], positions: tuple[int, ...]) -> tuple[Key, ...]:
        """Names of blocks that a history once ended with, beside which something is kept."""
        own = {id(node) for node in chain}
        beside = self._index.beside(chain, token_bytes(manifest.tokens), positions)
        return tuple(node.key for node in beside if id(node.main) not in own)

    def put(self, node: Node, data: Array) -> int:
        """Write one block; its bytes on disk. Raises OSError, StoreError."""
        started = time.perf_counter()
        if not self._counted(node):
            self.shared.make_room(self.size_of(node))
        size = self.blocks.put(_name(node), [data])
        with self._index.lock:
            self._bytes += 0 if self._counted(node) else size
            self._index.saved(node)
            self.garbage.discard(_id(node))
            self.doomed.discard(_id(node))
        self._unsynced.append(node)
        if self.leases is not None:
            self._put_at[_id(node)] = time.monotonic()
        if len(self._unsynced) >= MOST_UNSYNCED:  # of turns that were never committed
            self._sync()
        self._events["saved_blocks"] += 1
        self._events["saved_tail_bytes" if self._index.is_partial(node) else "saved_bytes"] += size
        self._index.counts.seconds["save"] += time.perf_counter() - started
        return size

    def _counted(self, node: Node) -> bool:
        """Whether a file of this name is there and counts already."""
        return node.on_disk or _id(node) in self.garbage or _id(node) in self.doomed

    def _save_blocks(self, chain: list[Node]) -> tuple[int, int]:
        """Write what is not safe yet; how many blocks from the beginning on are on disk, and the bytes written."""
        written = 0
        for number, node in enumerate(chain):
            if node.safe:
                continue
            block = self._index.hold(node)
            try:
                data = self._index.pool_of(node).read(block) if block is not None else self._read_back(node)
                if data is None:  # given up when memory was short: the history stays, its KV ends here
                    return number, written
                written += self.put(node, data)
            finally:
                if block is not None:
                    self._index.drop(node, block)
        return len(chain), written

    def _read_back(self, node: Node) -> Array | None:
        """The bytes of a block that is on disk but suspect."""
        if not node.on_disk:
            return None
        data = np.empty(self._index.pool_of(node).block_bytes, np.uint8)
        try:
            self.blocks.get(_name(node), [data])
        except (OSError, StoreError):
            return None
        return data

    def _sync(self) -> None:
        """Make new blocks safe. If that fails, the system may have forgotten them although a later sync succeeds."""
        unsynced, self._unsynced = self._unsynced, []
        try:
            self.blocks.sync()
        except OSError:
            self._index.suspect(unsynced)
            raise

    # Loading ----------------------------------------------------------------------------------------------------------

    def fetch(self, node: Node, block: int) -> tuple[float, Why | None]:
        """Read a block into memory; the seconds that verifying took, or why it can't be had."""
        try:
            name = _name(node)
            return self._index.pool_of(node).fill(block, lambda buffer: self.blocks.get(name, [buffer])), None
        except FileNotFoundError:
            return 0.0, self._lost(node, node.lost or Why(Cause.LOST, "its file is gone"))
        except CorruptError as error:
            moved = self.quarantine.set_aside(self.blocks.blob(name.id), str(error))
            return 0.0, self._lost(node, Why(Cause.LOST, str(error)), file_stays=not moved)
        except VersionError as error:
            self.quarantine.leave_alone(self.blocks.blob(name.id), f"is of {error}")
            return 0.0, self._lost(node, Why(Cause.INCOMPATIBLE, str(error)), file_stays=True)
        except OSError as error:
            self._events["read_errors"] += 1
            why = Why(Cause.LOST, error.strerror or str(error))
            return 0.0, why if error.errno in PASSING else self._lost(node, why, file_stays=True)

    def _lost(self, node: Node, why: Why, *, file_stays: bool = False) -> Why:
        """The block has to be computed again. What stays of its file counts, and is replaced or deleted later."""
        with self._index.lock:
            if node.on_disk:
                self._index.gone(node, why)
                if file_stays:
                    self.garbage.add(_id(node))
                else:
                    self._bytes -= self.size_of(node)
                self._index.forget(node)
        return why

    # Deleting ---------------------------------------------------------------------------------------------------------

    def remove(self, tenant: str, name: str, chain: list[Node], beside: list[Node]) -> str:
        """Delete an agent's manifest, then the blocks that nobody else owns. Raises StoreError if the agent stays as it
        was. Returns what could not be deleted, in words: it counts, and is tried again.
        """
        with self.shared.mutex:
            self.delete_doomed()
            self._remove_manifest((tenant, name))
            unused = self._unused((tenant, name))
            with self._index.lock:
                alone = self._index.alone(chain, beside)
            problem = self.delete([*alone, *unused])[1]
            try:
                self._sync()  # what was said is not to come back
            except OSError as error:
                problem = problem or error
        if problem is None:
            return ""
        self._events["save_errors"] += 1
        left = sum(_id(node) in self.doomed for node in alone)
        what = (
            f"{left} files with parts of its history could not be deleted" if left else "a power loss may bring it back"
        )
        return f"agent {name!r} was removed, but {what}: {problem}; it is tried again at the next save"

    def _remove_manifest(self, who: Who) -> None:
        if self.leases is None:
            self.manifests.remove(who)
            return
        with self.leases.changing(who):
            self.manifests.remove(who)
            self.leases.ended(who)

    def give_up(self, tenant: str, name: str) -> None:
        """An agent whose history was never stored is not to be, after all."""
        with self.shared.mutex:
            self.delete(self._unused((tenant, name)))

    def withdraw(self, tenant: str, name: str) -> None:
        """A new agent is not to be, after all: its manifest goes, if it is there."""
        with self.shared.mutex:
            self.manifests.withdraw((tenant, name))
            self.delete(self._unused((tenant, name)))
            self.delete_doomed()

    def delete(self, nodes: list[Node], why: Why | None = None) -> tuple[int, OSError | None]:
        """Delete files of blocks; the bytes that were freed, and what went wrong with one of them, if anything did."""
        freed = 0
        problem: OSError | None = None
        for node in nodes:
            with self._index.lock:
                if not node.on_disk or node.claims:  # a turn may have begun to use it since it was chosen
                    continue
                self._index.gone(node, why)
                self.doomed.add(_id(node))
                self._index.forget(node)
            try:
                freed += self._delete_file(_id(node), self.doomed)
            except OSError as error:
                problem = error
                _log.warning("block %s can't be deleted: %s", node.key.hex(), error)
        return freed, problem

    def delete_unowned(self, nodes: list[Node]) -> None:
        """Delete files of blocks that were written and that no agent owns."""
        with self.shared.mutex:
            with self._index.lock:
                alone = [node for node in nodes if not node.owned]
            self.delete(alone)
            for node in alone:
                self._index.cool(node)

    def delete_doomed(self) -> None:
        """Try again what could not be deleted. What still can't be is left for the next time."""
        with self.shared.mutex:
            try:
                for name in list(self.doomed)[:DOOMED_AT_ONCE]:
                    self._delete_file(name, self.doomed)
                self.manifests.delete_doomed(DOOMED_AT_ONCE)
            except OSError as error:
                _log.warning("files that should be deleted are still there: %s", error)

    def _delete_file(self, name: ObjectId, among: set[ObjectId]) -> int:
        """Delete the file of a block that is no longer in the tree; the bytes that were freed. Raises OSError."""
        self.blocks.delete(name)
        size = self.blocks.object_bytes(name.kind)
        with self._index.lock:
            among.discard(name)
            self._bytes -= size
        return size

    def supersede(self, manifest: Manifest, superseded: Superseded) -> None:
        """Once this manifest is stored, its agent does not own this any more. With the index's lock held."""
        self._superseded.setdefault((manifest.tenant, manifest.name), []).append((manifest.generation, superseded))

    def _unused(self, who: Who, generation: int | None = None) -> list[Node]:
        """What an agent has owned before, and nobody needs now that this generation is stored, or none is any more."""
        with self._index.lock:
            waiting = self._superseded.pop(who, [])
            later = [one for one in waiting if generation is not None and one[0] > generation]
            if later:
                self._superseded[who] = later
            unused = [node for one in waiting if one not in later for node in self._index.give_up(one[1])]
            for node in unused:
                self._index.cool(node)
        return unused

    # When the quota is full (`SharedStore.make_room`) -----------------------------------------------------------------

    def delete_garbage(self, wanted: int) -> int:
        freed = 0
        for name in list(self.garbage) if self.garbage else ():
            if freed >= wanted:
                break
            with suppress(OSError):
                freed += self._delete_file(name, self.garbage)
        return freed

    def last_use(self, worth: Worth) -> int | None:
        with self._index.lock:
            return self._index.warm.last_use(worth)

    def evict(self, wanted: int, worth: Worth) -> int:
        freed = 0
        while freed < wanted:
            nodes = self._index.oldest_on_disk(worth, wanted - freed, self.size_of, BATCH_BLOCKS)
            if not nodes:
                break
            freed += self.delete(nodes, Why(Cause.EVICTED, "evicted by quota"))[0]
            self._events["warm_evictions"] += len(nodes)
        return freed

    def last_conversation(self) -> float | None:
        return self._conversations.last_conversation()

    def remove_conversations(self, wanted: int, *, empty: bool) -> int:
        return self._conversations.remove_conversations(self, wanted, empty)

    # What is there when the store is opened ---------------------------------------------------------------------------

    def find_blocks(self) -> None:
        """Tell the index which blocks are on disk: those of the manifests, and those that can be reached otherwise."""
        strangers: list[ObjectId] = []
        beside: list[ObjectId] = []
        for found, size in self.blocks.list():
            if size != (expected := self.blocks.object_bytes(found.kind)):
                try:
                    self.blocks.check_version(found)
                except VersionError as error:
                    self.quarantine.leave_alone(self.blocks.blob(found), f"is of {error}")
                    self._bytes += size
                else:
                    why = f"{size:,} bytes, expected {expected:,}"
                    self._bytes += 0 if self.quarantine.set_aside(self.blocks.blob(found), why) else size
                continue
            self._bytes += size
            node = self._index.tree.nodes.get(found.key)
            if found.kind != FULL:
                beside.append(found)
            elif node is not None and node.parent is not None:
                self._index.saved(node)
            else:
                strangers.append(found)
        self._find_strangers(strangers)
        for found in beside:
            node = self._index.tree.nodes.get(found.key)
            if node is not None and node.parent is not None:
                self._index.saved(self._index.tree.beside_of(node, found.kind))
            else:
                self.garbage.add(found)

    def _find_strangers(self, ids: list[ObjectId]) -> None:
        """Blocks of turns that were never committed: as good as any, if their parents are known."""
        left: dict[Key, list[BlockName]] = {}
        unreadable: set[ObjectId] = set()
        for found in ids:
            blob = self.blocks.blob(found)
            try:
                name = self.blocks.describe(found)
            except CorruptError as error:
                if self.quarantine.set_aside(blob, str(error)):
                    self._bytes -= self.block_bytes
            except VersionError as error:
                self.quarantine.leave_alone(blob, f"is of {error}")
            except FileNotFoundError:
                self._bytes -= self.block_bytes
            except OSError:  # perhaps only now: it counts, and is deleted when space is needed
                unreadable.add(found)
            else:
                left.setdefault(name.parent, []).append(name)
        tree = self._index.tree
        ready = [key for key in left if key in tree.nodes]
        while ready:
            parent = tree.nodes[ready.pop()]
            for name in left.pop(parent.key, []):
                node = tree.child(parent, name.tokens)
                if node.key == name.key:
                    self._index.saved(node)
                    if node.key in left:
                        ready.append(node.key)
        self.garbage = {name.id for names in left.values() for name in names} | unreadable


def _name(node: Node) -> BlockName:
    assert node.parent is not None
    return BlockName(node.key, node.parent.key, node.tokens, node.kind)


def _id(node: Node) -> ObjectId:
    return ObjectId(node.key, node.kind)
