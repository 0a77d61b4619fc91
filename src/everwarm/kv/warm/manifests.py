"""Which manifests of one model are stored, in which generation, and how many bytes they take.

What changes them runs with the mutex of the shared store held.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from everwarm.errors import StoreError
from everwarm.kv.chain import Key
from everwarm.kv.container import VersionError
from everwarm.kv.manifest import Manifest, emptied, file_name
from everwarm.kv.warm.blocks import ModelBlocks, Stored, UnreadableError
from everwarm.kv.warm.blockstore import AwayError, Blob, ConflictError
from everwarm.kv.warm.quarantine import Quarantine
from everwarm.kv.warm.shared import SharedStore

Who = tuple[str, str]
"""Tenant and name."""


class NotRemovedError(StoreError):
    """An agent stays as it was. `unsaved`: its manifest, if that has to be saved again."""

    def __init__(self, message: str, unsaved: Manifest | None) -> None:
        super().__init__(message)
        self.unsaved = unsaved


@dataclass(slots=True)
class _Known:
    """What is known of one agent's manifest."""

    stored: Stored = field(default_factory=Stored)
    keys: frozenset[Key] = frozenset()  # blocks that it names: no collector takes them
    unreadable: str = ""  # why it can't be read: it is set aside before another takes its place


class Manifests:
    """The manifests of one model."""

    def __init__(self, blocks: ModelBlocks, shared: SharedStore, quarantine: Quarantine, events: Counter[str]) -> None:
        self._blocks, self._shared, self._quarantine, self._events = blocks, shared, quarantine, events
        self._many = blocks.store.many_writers
        self._known: dict[Who, _Known] = {}
        self.bytes = 0
        self.doomed: dict[Who, Stored] = {}  # should be deleted and could not be: counted, and tried again

    def find(self) -> Iterator[tuple[Manifest, Blob]]:
        """All of them, when the store is opened. What can't be read is set aside or left alone, and counted."""
        for found, blob, size in self._blocks.manifests():
            if isinstance(found, Manifest):
                self._known[found.tenant, found.name] = _Known(Stored(found.generation, size))
                self.bytes += size
                yield found, blob
            elif isinstance(found, UnreadableError):
                self._quarantine.leave_alone(blob, f"can't be read: {found}")
                self._events["read_errors"] += 1
            elif isinstance(found, VersionError):
                self._quarantine.leave_alone(blob, f"is of {found}")
                self.bytes += size
            else:
                self.bytes += 0 if self._quarantine.set_aside(blob, str(found)) else size

    def size(self, who: Who) -> int:
        known = self._known.get(who)
        return known.stored.size if known is not None else 0

    def refusal(self, who: Who) -> str:
        """Why no agent of this name can be saved; empty if it can."""
        return self._quarantine.left_alone.get(file_name(*who), "")

    def load(self, who: Who) -> Manifest:
        """An agent's manifest. Raises StoreError, OSError; then it is set aside before another takes its place."""
        try:
            manifest = self._blocks.load(*who)
        except (OSError, StoreError) as error:
            if self._many and isinstance(error, VersionError):  # not found at a start, which lists nothing
                self._quarantine.leave_alone(self._blocks.manifest_blob(*who), f"is of {error}")
            elif not isinstance(error, FileNotFoundError | AwayError):
                why = error.strerror if isinstance(error, OSError) else None
                self.refuse(who, why or str(error))
            raise
        self.refuse(who, "")
        return manifest

    def refuse(self, who: Who, why: str) -> None:
        """An agent's manifest can't be used: it is set aside before another takes its place. Empty: it can."""
        known = self._known.setdefault(who, _Known())
        known.unreadable = why

    def named(self, who: Who) -> frozenset[Key]:
        """Blocks that the stored manifest of an agent names."""
        known = self._known.get(who)
        return known.keys if known is not None else frozenset()

    def saw(self, manifest: Manifest, size: int) -> None:
        """This is stored now."""
        known = self._known.setdefault((manifest.tenant, manifest.name), _Known())
        known.keys = frozenset(manifest.keys)
        self._count(known, Stored(manifest.generation, size))

    def generation(self, who: Who) -> int:
        """Of what is stored, as far as we know; 0: nothing is."""
        known = self._known.get(who)
        return known.stored.generation if known is not None else 0

    def forget(self, who: Who) -> None:
        """Somebody else has removed it."""
        if (known := self._known.pop(who, None)) is not None:
            self._count(known, Stored())

    def commit(self, manifest: Manifest) -> int:
        """Replace an agent's manifest; its bytes. Raises StoreError, OSError."""
        who = manifest.tenant, manifest.name
        manifest = replace(manifest, lease=None) if manifest.lease is not None else manifest
        known = self._known.setdefault(who, _Known())
        # A manifest of this name that should have been deleted is replaced: it counts as this agent's from now on.
        if (doomed := self.doomed.pop(who, None)) is not None:
            known.stored = doomed
        if known.unreadable:
            self._set_aside(who, known)
        try:
            try:
                stored = self._swap(known, manifest)
            except ConflictError:
                self._look_again(who, known)
                if known.stored.generation:  # somebody else has committed
                    raise
                if known.stored.size:  # somebody has damaged it meanwhile
                    self._set_aside(who, known)
                stored = self._swap(known, manifest)
        except AwayError:  # the store itself knows what it may have written
            raise
        except OSError:
            self._look_again(who, known)  # the new one may be in place, though not for sure
            raise
        self._count(known, stored)
        if self._many:
            known.keys = frozenset(manifest.keys)
        return stored.size

    def remove(self, who: Who) -> None:
        """Delete an agent's manifest. Raises NotRemovedError if the agent stays as it was."""
        before = None
        with suppress(OSError, StoreError):  # then there is nothing to put back
            before = self._blocks.load(*who)
        known = self._known.setdefault(who, _Known())
        try:
            if not self._many:
                self._blocks.remove(*who)
            elif before is not None:
                self._swap(known, emptied(before))
        except (OSError, ConflictError) as error:
            self._events["save_errors"] += 1
            back = before is None or self._many or self._put_back(known, before)
            raise NotRemovedError(f"agent {who[1]!r} was not removed: {error}", None if back else before) from None
        self._count(known, Stored())
        del self._known[who]

    def withdraw(self, who: Who) -> None:
        """A new agent is not to be, after all: its manifest goes, if it is there, when `delete_doomed` is called."""
        known = self._known.pop(who, _Known())
        if known.stored.size:
            self.doomed[who] = known.stored

    def delete_doomed(self, most: int) -> None:
        """Try again what could not be deleted. Raises OSError."""
        for who, stored in list(self.doomed.items())[:most]:
            self._blocks.remove(*who)
            del self.doomed[who]
            self.bytes -= stored.size

    def _swap(self, known: _Known, manifest: Manifest) -> Stored:
        before = known.stored
        if self._many and manifest.generation <= before.generation:  # numbers were given while the storage was away
            manifest = replace(manifest, generation=before.generation + 1)
        return self._blocks.commit(manifest, before.generation, lambda size: self._shared.make_room(size - before.size))

    def _put_back(self, known: _Known, manifest: Manifest) -> bool:
        """A removal was refused: the agent is to be as it was. Whether its manifest is safe again."""
        who = manifest.tenant, manifest.name
        if self._blocks.stored(*who).size:
            return True
        try:
            self._blocks.commit(manifest, 0, lambda size: None)
            return True
        except (OSError, StoreError):
            return False
        finally:
            self._look_again(who, known)

    def _set_aside(self, who: Who, known: _Known) -> None:
        """It can't be read. It goes to quarantine, not away: somebody may be able to read it."""
        self._quarantine.set_aside(self._blocks.manifest_blob(*who), known.unreadable or "it can't be read any more")
        known.unreadable = ""
        self._look_again(who, known)

    def _look_again(self, who: Who, known: _Known) -> None:
        """Count the manifest that is there now."""
        self._count(known, self._blocks.stored(*who))

    def _count(self, known: _Known, stored: Stored) -> None:
        self.bytes += stored.size - known.stored.size
        known.stored = stored
