"""The warm tier of one model: what it has saved, under the quota of the whole store.

It tells the index what is on disk and what is gone; it knows no agents, only manifests. What changes files runs on the
writer's thread, with the mutex of the shared store held, and never under the index's lock.
"""

import errno
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from everwarm.errors import StoreError
from everwarm.kv.chain import Key
from everwarm.kv.container import Array, VersionError
from everwarm.kv.eviction import Worth
from everwarm.kv.index.index import Index
from everwarm.kv.index.tree import Node
from everwarm.kv.manifest import Manifest, file_name
from everwarm.kv.receipt import Cause, Why
from everwarm.kv.warm.blocks import BlockName, CorruptError, ModelBlocks, Stored, UnreadableError
from everwarm.kv.warm.blockstore import Blob, ConflictError, ObjectId
from everwarm.kv.warm.shared import BATCH_BLOCKS, SharedStore

_log = logging.getLogger(__name__)

DOOMED_AT_ONCE = 64
MOST_UNSYNCED = 1024
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors that say nothing about the file."""
Who = tuple[str, str]
"""Tenant and name."""


class Conversations(Protocol):
    """Who owns histories without a name, and gives them up when space is needed. Called on a writer's thread."""

    def last_conversation(self) -> float | None:
        """When the longest unused one was last used; None if there is none."""

    def remove_conversations(self, tier: "WarmTier", wanted: int, empty: bool) -> int:
        """Remove them with `tier.remove`, the longest unused first, until so many bytes are free; how many are."""


class NotRemovedError(StoreError):
    """An agent stays as it was. `unsaved`: its manifest, if that has to be saved again."""

    def __init__(self, message: str, unsaved: Manifest | None) -> None:
        super().__init__(message)
        self.unsaved = unsaved


@dataclass(slots=True)
class _Kept:
    """What the tier knows of one agent's manifest."""

    stored: Stored = field(default_factory=Stored)
    superseded: list[Node] = field(default_factory=list)  # the stored manifest may still need them
    unreadable: str = ""  # why it can't be read: it is set aside before another takes its place


class WarmTier:
    """Blocks and manifests on disk."""

    def __init__(self, index: Index, blocks: ModelBlocks, shared: SharedStore, conversations: Conversations) -> None:
        self.blocks = blocks
        self.shared = shared
        self.model = blocks.model
        self.bytes = 0  # of this model
        self.quarantined = 0
        self.garbage: set[Key] = set()  # on disk, but no chain of parents leads to them: deleted when space is needed
        self.doomed: set[Key] = set()  # should be deleted and could not be: counted, and tried again at each save
        self.doomed_manifests: dict[Who, Stored] = {}  # likewise
        self.other_versions: dict[str, str] = {}  # files that are left alone, and why
        self._index = index
        self._conversations = conversations
        self._kept: dict[Who, _Kept] = {}
        self._unsynced: list[Node] = []  # put since the last sync

    @property
    def _events(self) -> Counter[str]:
        return self._index.counts.events

    @property
    def block_bytes(self) -> int:
        """Of one block, with its header."""
        return self.blocks.object_bytes()

    def manifest_bytes(self, tenant: str, name: str) -> int:
        kept = self._kept.get((tenant, name))
        return kept.stored.size if kept is not None else 0

    def refusal(self, tenant: str, name: str) -> str:
        """Why no agent of this name can be saved; empty if it can."""
        return self.other_versions.get(file_name(tenant, name), "")

    # Saving -----------------------------------------------------------------------------------------------------------

    def write(self, node: Node, block: int) -> None:
        """Write one block, which is held for this. What goes wrong is told when the turn is committed."""
        try:
            if not node.safe:
                with self.shared.mutex:
                    self.put(node, self._index.pool.read(block))
        except (OSError, StoreError) as error:
            self._events["save_errors"] += 1
            _log.debug("block %s was not saved: %s", node.key.hex(), error)
        finally:
            self._index.end_write(node, block)

    def commit(self, manifest: Manifest, chain: list[Node], superseded: Node | None) -> int:
        """Make a history durable: its blocks, then its manifest; the bytes written for it now. `superseded`: a block
        that nobody needs once this is done. Raises StoreError.
        """
        started = time.perf_counter()
        who = manifest.tenant, manifest.name
        with self.shared.mutex:
            kept = self._kept.setdefault(who, _Kept())
            kept.superseded += [superseded] if superseded else []
            try:
                if why := self.refusal(*who):
                    raise StoreError(f"its manifest {why}; take another name, or remove that file")
                self.delete_doomed()
                saved, written = self._save_blocks(chain)
                self._sync()
                # The manifest counts what is there: blocks may have been given up when memory was short, or come back.
                blocks = chain[:saved]
                manifest = replace(
                    manifest, blocks=tuple(node.key for node in blocks), kv_tokens=blocks[-1].end if blocks else 0
                )
                size = self._commit_manifest(who, kept, manifest)
            except (OSError, StoreError) as error:
                self._events["save_errors"] += 1
                raise StoreError(f"agent {manifest.name!r} was not saved: {error}") from None
            self._events["commits"] += 1
            self._events["manifest_bytes"] += size
            self._index.counts.seconds["save"] += time.perf_counter() - started
            self.delete(self._unused(kept))
        return written + size

    def _commit_manifest(self, who: Who, kept: _Kept, manifest: Manifest) -> int:
        # A manifest of this name that should have been deleted is replaced: it counts as this agent's from now on.
        if (doomed := self.doomed_manifests.pop(who, None)) is not None:
            kept.stored = doomed
        if kept.unreadable:
            self._set_aside(who, kept)
        try:
            stored = self._swap_manifest(kept, manifest)
        except ConflictError:
            self._look_again(who, kept)
            if kept.stored.generation:
                raise
            if kept.stored.size:  # somebody has damaged it meanwhile
                self._set_aside(who, kept)
            stored = self._swap_manifest(kept, manifest)
        except OSError:
            self._look_again(who, kept)  # the new one may be in place, though not for sure
            raise
        self._count(kept, stored)
        return stored.size

    def _swap_manifest(self, kept: _Kept, manifest: Manifest) -> Stored:
        before = kept.stored
        return self.blocks.commit(manifest, before.generation, lambda size: self.shared.make_room(size - before.size))

    def _count(self, kept: _Kept, stored: Stored) -> None:
        with self._index.lock:
            self.bytes += stored.size - kept.stored.size
            kept.stored = stored

    def _look_again(self, who: Who, kept: _Kept) -> None:
        """Count the manifest that is there now."""
        self._count(kept, self.blocks.stored(*who))

    def _set_aside(self, who: Who, kept: _Kept) -> None:
        """Its manifest can't be read. It goes to quarantine, not away: somebody may be able to read it."""
        self.quarantine(self.blocks.manifest_blob(*who), kept.unreadable or "it can't be read any more")
        kept.unreadable = ""
        self._look_again(who, kept)

    def put(self, node: Node, data: Array) -> int:
        """Write one block; its bytes on disk. Raises OSError, StoreError."""
        started = time.perf_counter()
        if not self._counted(node):
            self.shared.make_room(self.block_bytes)
        size = self.blocks.put(_name(node), [data])
        with self._index.lock:
            self.bytes += 0 if self._counted(node) else size
            self._index.saved(node)
            self.garbage.discard(node.key)
            self.doomed.discard(node.key)
        self._unsynced.append(node)
        if len(self._unsynced) >= MOST_UNSYNCED:  # of turns that were never committed
            self._sync()
        self._events["saved_blocks"] += 1
        self._events["saved_tail_bytes" if self._index.is_partial(node) else "saved_bytes"] += size
        self._index.counts.seconds["save"] += time.perf_counter() - started
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
            block = self._index.hold(node)
            try:
                data = self._index.pool.read(block) if block is not None else self._read_back(node)
                if data is None:  # given up when memory was short: the history stays, its KV ends here
                    return number, written
                written += self.put(node, data)
            finally:
                if block is not None:
                    self._index.pool.drop([block])
        return len(chain), written

    def _read_back(self, node: Node) -> Array | None:
        """The bytes of a block that is on disk but suspect."""
        if not node.on_disk:
            return None
        data = np.empty(self._index.block_bytes, np.uint8)
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

    def load(self, tenant: str, name: str) -> Manifest:
        """An agent's manifest. Raises StoreError, OSError; then it is set aside before another takes its place."""
        try:
            manifest = self.blocks.load(tenant, name)
        except (OSError, StoreError) as error:
            if not isinstance(error, FileNotFoundError):
                why = error.strerror if isinstance(error, OSError) else None
                self.refuse(tenant, name, why or str(error))
            raise
        self.refuse(tenant, name, "")
        return manifest

    def refuse(self, tenant: str, name: str, why: str) -> None:
        """An agent's manifest can't be used: it is set aside before another takes its place. Empty: it can."""
        self._kept.setdefault((tenant, name), _Kept()).unreadable = why

    def fetch(self, node: Node, block: int) -> tuple[float, Why | None]:
        """Read a block into memory; the seconds that verifying took, or why it can't be had."""
        try:
            name = _name(node)
            return self._index.pool.fill(block, lambda buffer: self.blocks.get(name, [buffer])), None
        except FileNotFoundError:
            return 0.0, self._lost(node, node.lost or Why(Cause.LOST, "its file is gone"))
        except CorruptError as error:
            moved = self.quarantine(self.blocks.blob(name.id), str(error))
            return 0.0, self._lost(node, Why(Cause.LOST, str(error)), file_stays=not moved)
        except VersionError as error:
            self.leave_alone(self.blocks.blob(name.id), f"is of {error}")
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
                    self.garbage.add(node.key)
                else:
                    self.bytes -= self.block_bytes
        return why

    # Deleting ---------------------------------------------------------------------------------------------------------

    def remove(self, tenant: str, name: str, chain: list[Node]) -> str:
        """Delete an agent's manifest, then the blocks that nobody else owns. Raises StoreError if the agent stays as it
        was. Returns what could not be deleted, in words: it counts, and is tried again.
        """
        with self.shared.mutex:
            self.delete_doomed()
            before = None
            with suppress(OSError, StoreError):  # then there is nothing to put back
                before = self.blocks.load(tenant, name)
            kept = self._kept.setdefault((tenant, name), _Kept())
            try:
                self.blocks.remove(tenant, name)
            except OSError as error:
                self._events["save_errors"] += 1
                back = before is None or self._put_back(kept, before)
                raise NotRemovedError(f"agent {name!r} was not removed: {error}", None if back else before) from None
            with self._index.lock:
                self._count(kept, Stored())
                alone = self._index.alone(chain)
            del self._kept[tenant, name]
            problem = self.delete([*alone, *self._unused(kept)])[1]
            try:
                self._sync()  # what was said is not to come back
            except OSError as error:
                problem = problem or error
        if problem is None:
            return ""
        self._events["save_errors"] += 1
        left = sum(node.key in self.doomed for node in alone)
        what = (
            f"{left} files with parts of its history could not be deleted" if left else "a power loss may bring it back"
        )
        return f"agent {name!r} was removed, but {what}: {problem}; it is tried again at the next save"

    def _put_back(self, kept: _Kept, manifest: Manifest) -> bool:
        """A removal was refused: the agent is to be as it was. Whether its manifest is safe again."""
        who = manifest.tenant, manifest.name
        if self.blocks.stored(*who).size:
            return True
        try:
            self.blocks.commit(manifest, 0, lambda size: None)
            return True
        except (OSError, StoreError):
            return False
        finally:
            self._look_again(who, kept)

    def withdraw(self, tenant: str, name: str) -> None:
        """A new agent is not to be, after all: its manifest goes, if it is there."""
        kept = self._kept.pop((tenant, name), _Kept())
        if kept.stored.size:
            with self.shared.mutex:
                self.doomed_manifests[tenant, name] = kept.stored
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
                self.doomed.add(node.key)
                self._index.forget(node)
            try:
                freed += self._delete_file(node.key, self.doomed)
            except OSError as error:
                problem = error
                _log.warning("block %s can't be deleted: %s", node.key.hex(), error)
        return freed, problem

    def delete_unowned(self, nodes: list[Node]) -> None:
        """Delete files of blocks that were written for an agent that is not to be, after all."""
        with self.shared.mutex:
            with self._index.lock:
                alone = [node for node in nodes if not node.owned]
            self.delete(alone)

    def delete_doomed(self) -> None:
        """Try again what could not be deleted. What still can't be is left for the next time."""
        with self.shared.mutex:
            try:
                for key in list(self.doomed)[:DOOMED_AT_ONCE]:
                    self._delete_file(key, self.doomed)
                for who, stored in list(self.doomed_manifests.items())[:DOOMED_AT_ONCE]:
                    self.blocks.remove(*who)
                    del self.doomed_manifests[who]
                    self.bytes -= stored.size
            except OSError as error:
                _log.warning("files that should be deleted are still there: %s", error)

    def _delete_file(self, key: Key, among: set[Key]) -> int:
        """Delete the file of a block that is no longer in the tree; the bytes that were freed. Raises OSError."""
        self.blocks.delete(ObjectId(key))
        with self._index.lock:
            among.discard(key)
            self.bytes -= self.block_bytes
        return self.block_bytes

    def _unused(self, kept: _Kept) -> list[Node]:
        """Ends of a history that has grown into other blocks: of no use any more, unless someone else's history ends
        there.
        """
        nodes, kept.superseded = kept.superseded, []
        with self._index.lock:
            unused = [node for node in nodes if not node.owned and not node.claims]
            for node in unused:
                self._index.cool(node)
        return unused

    # When the quota is full (`SharedStore.make_room`) -----------------------------------------------------------------

    def delete_garbage(self, wanted: int) -> int:
        freed = 0
        for key in list(self.garbage) if self.garbage else ():
            if freed >= wanted:
                break
            with suppress(OSError):
                freed += self._delete_file(key, self.garbage)
        return freed

    def last_use(self, worth: Worth) -> int | None:
        with self._index.lock:
            return self._index.warm.last_use(worth)

    def evict(self, wanted: int, worth: Worth) -> int:
        freed = 0
        while freed < wanted:
            count = -(-(wanted - freed) // self.block_bytes)
            nodes = self._index.oldest_on_disk(worth, min(count, BATCH_BLOCKS))
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

    def find_manifests(self) -> Iterator[tuple[Manifest, Blob]]:
        """The manifests of all agents. What can't be read is set aside or left alone, and counted."""
        for found, blob, size in self.blocks.manifests():
            if isinstance(found, Manifest):
                self._kept[found.tenant, found.name] = _Kept(Stored(found.generation, size))
                self.bytes += size
                yield found, blob
            elif isinstance(found, UnreadableError):
                self.leave_alone(blob, f"can't be read: {found}")
                self._events["read_errors"] += 1
            elif isinstance(found, VersionError):
                self.leave_alone(blob, f"is of {found}")
                self.bytes += size
            else:
                self.bytes += 0 if self.quarantine(blob, str(found)) else size

    def find_blocks(self) -> None:
        """Tell the index which blocks are on disk: those of the manifests, and those that can be reached otherwise."""
        strangers = []
        for found, size in self.blocks.list():
            if size != self.block_bytes:
                try:
                    self.blocks.check_version(found)
                except VersionError as error:
                    self.leave_alone(self.blocks.blob(found), f"is of {error}")
                    self.bytes += size
                else:
                    why = f"{size:,} bytes, expected {self.block_bytes:,}"
                    self.bytes += 0 if self.quarantine(self.blocks.blob(found), why) else size
                continue
            self.bytes += size
            node = self._index.tree.nodes.get(found.key)
            if node is not None and node.parent is not None:
                self._index.saved(node)
            else:
                strangers.append(found)
        self._find_strangers(strangers)

    def _find_strangers(self, ids: list[ObjectId]) -> None:
        """Blocks of turns that were never committed: as good as any, if their parents are known."""
        left: dict[Key, list[BlockName]] = {}
        unreadable: set[Key] = set()
        for found in ids:
            blob = self.blocks.blob(found)
            try:
                name = self.blocks.describe(found)
            except CorruptError as error:
                if self.quarantine(blob, str(error)):
                    self.bytes -= self.block_bytes
            except VersionError as error:
                self.leave_alone(blob, f"is of {error}")
            except FileNotFoundError:
                self.bytes -= self.block_bytes
            except OSError:  # perhaps only now: it counts, and is deleted when space is needed
                unreadable.add(found.key)
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
        self.garbage = {name.key for names in left.values() for name in names} | unreadable

    def leave_alone(self, blob: Blob, why: str) -> None:
        """A file is not ours to read: it stays where it is."""
        _log.warning("%s %s; it is left alone", self.blocks.store.where(blob), why)
        self.other_versions[blob.name] = why

    def quarantine(self, blob: Blob, why: str) -> bool:
        """A file is not what it should be: count it and, where we may write, move it out of the way; whether it was."""
        _log.error("%s: %s; moved to quarantine", self.blocks.store.where(blob), why)
        moved, size = (None, 0) if self.shared.read_only else self.blocks.store.set_aside(blob)
        if moved is not None:
            self.shared.quarantined(moved, size)
        with self._index.lock:
            self.quarantined += 1
            self._events["corrupt"] += 1
        return moved is not None


def _name(node: Node) -> BlockName:
    assert node.parent is not None
    return BlockName(node.key, node.parent.key, node.tokens)
