"""What can go from a store that many processes write in, beside all of them. Nobody has to stop.

Nothing that a manifest names is deleted. A block that no manifest names may belong to a turn that goes on just now,
or to a manifest that a listing does not show yet. Therefore it goes in two steps, an hour apart at least:

1. what no manifest names and is older than an hour is *marked*: its name is written to `collector.json`;
2. at a later run, what was marked an hour ago or more, is still named by no manifest, and was not written since, is
   deleted. Whoever wants to use a marked block writes it again first (`kv.remote.store`), so that it is young.

All times are those of the storage's clock. Agents that were not used for long are emptied by compare-and-swap, which
fails if somebody talks to them; their manifests go later, under a lease of ours.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from everwarm.errors import StoreError
from everwarm.kv.manifest import Lease, Manifest, emptied, encode
from everwarm.kv.remote.objects import ChangedError, ExistsError, Found, Version
from everwarm.kv.remote.store import GRACE_S, WRITE_S, ObjectStore
from everwarm.kv.tools.gc import Plan, Removal
from everwarm.kv.tools.inventory import Inventory, ModelEntry, read_manifest, take_inventory
from everwarm.kv.warm.blockstore import BLOCKS, QUARANTINE, Blob, ConflictError, ObjectId
from everwarm.kv.warm.leases import SKEW_S, new_owner
from everwarm.kv.warm.sealed import sealed, unsealed

MARKS = Blob("", "", "collector.json")
LEASE_S = 120.0


@dataclass(frozen=True, slots=True)
class Collection:
    """What a run has done, or would do."""

    removals: list[Removal]
    notes: list[str]
    marked: int  # blocks that may go at a later run
    freed: int  # bytes

    @property
    def plan(self) -> Plan:
        return Plan(self.removals, self.notes)


@dataclass(frozen=True, slots=True)
class _Marks:
    """What an earlier run has marked, and when."""

    names: frozenset[str] = frozenset()  # model/name
    at: float = 0.0
    version: Version | None = None


def collect(store: ObjectStore, *, before: float, quarantine: bool = False, dry_run: bool = False) -> Collection:
    """Remove what nobody needs, and agents that were last used `before` this time. Raises StoreError."""
    try:
        return _Run(store, before, quarantine, dry_run).run()
    except OSError as error:
        raise StoreError(f"{store.where()}: {error.strerror or error}; run it again, nothing is lost") from None


class _Run:
    def __init__(self, store: ObjectStore, before: float, quarantine: bool, dry_run: bool) -> None:
        self._store, self._before, self._quarantine, self._dry = store, before, quarantine, dry_run
        self._removals: list[Removal] = []
        self._notes: list[str] = []
        self._freed = 0

    def run(self) -> Collection:
        store = self._store
        marks = self._read_marks()
        # Blocks first: one that is listed and named by a manifest that comes later is young.
        blocks = {model: list(store.found(model, BLOCKS)) for model in store.models()}
        inventory = take_inventory(store)
        now = store.now()
        for entry in inventory.models:
            self._empty_unused(entry)
        ripe = marks.version is not None and now - marks.at >= GRACE_S
        to_mark: set[str] = set()
        for entry in inventory.models:
            for blob, found in self._unnamed(entry, blocks.get(entry.directory, [])):
                name = f"{blob.model}/{blob.name}"
                if ripe and name in marks.names and found.modified < marks.at:
                    self._remove(blob, found, marks.at, "a block of no agent")
                elif found.modified < now - GRACE_S:
                    to_mark.add(name)
        self._remove_empty(inventory, now)
        if self._quarantine:
            for blob, found in store.found("", QUARANTINE):
                self._remove(blob, found, now, "in quarantine")
        if ripe or marks.version is None:
            self._write_marks(marks, to_mark)
        else:
            self._notes.append("blocks were marked less than an hour ago: they go at a later run")
        return Collection(self._removals, self._notes, len(to_mark), self._freed)

    def _unnamed(self, entry: ModelEntry, blocks: list[tuple[Blob, Found]]) -> Iterator[tuple[Blob, Found]]:
        """Blocks that no manifest names. None if a manifest can't be read: they may be its own."""
        unsure = {**entry.other_versions, **entry.unreadable}
        for blob, problem in unsure.items():
            self._notes.append(f"{self._store.where(blob)}: {problem}; blocks that only it may name are left alone")
        if unsure:
            return
        named = {key for agent in entry.agents for key in agent.manifest.keys}
        for blob, found in blocks:
            known = ObjectId.of(blob)
            if known is not None and known.key not in named:
                yield blob, found

    def _remove(self, blob: Blob, found: Found, before: float, why: str) -> None:
        """Delete it, unless it was written again."""
        if not self._dry:
            try:
                if self._store.head(blob).modified >= before:
                    return
            except FileNotFoundError:
                return
            # Once: a second attempt that comes late might delete what somebody has written again.
            self._store.objects.delete("/".join(part for part in (blob.model, blob.area, blob.name) if part))
            self._freed += found.size
        self._removals.append(Removal(blob, self._store.where(blob), found.size, why))

    # Agents -----------------------------------------------------------------------------------------------------------

    def _empty_unused(self, entry: ModelEntry) -> None:
        unused = [agent for agent in entry.agents if agent.manifest.used < self._before and not agent.manifest.pinned]
        for agent in unused:
            if not self._dry:
                with suppress(FileNotFoundError):
                    try:
                        self._commit(agent.blob, emptied(agent.manifest), agent.manifest.generation)
                    except ConflictError:
                        self._notes.append(f"agent {agent.manifest.name!r} is in use and stays")
                        continue
            why = "an agent that was not used for long"
            self._removals.append(Removal(agent.blob, self._store.where(agent.blob), agent.manifest_bytes, why))
            entry.agents.remove(agent)

    def _remove_empty(self, inventory: Inventory, now: float) -> None:
        """What is left of agents that were removed long ago. Nobody begins a turn while the lease is ours."""
        for entry in inventory.models:
            for blob, size in entry.empty.items():
                with suppress(FileNotFoundError, ConflictError, StoreError):
                    found = self._store.head(blob)
                    if found.modified > now - 2 * GRACE_S:
                        continue
                    manifest = read_manifest(self._store, blob)
                    if not manifest.is_empty or (manifest.lease and manifest.lease.until + SKEW_S > now):
                        continue
                    if not self._dry:
                        ours = Lease(new_owner(), now + LEASE_S, LEASE_S)
                        leased = replace(manifest, generation=manifest.generation + 1, lease=ours)
                        self._commit(blob, leased, manifest.generation)
                        self._store.objects.delete(f"{blob.model}/{blob.area}/{blob.name}")
                        self._freed += size
                    self._removals.append(Removal(blob, self._store.where(blob), size, "of a removed agent"))

    def _commit(self, blob: Blob, manifest: Manifest, expected: int) -> None:
        self._store.commit(blob, encode(manifest), expected=expected)

    # Marks ------------------------------------------------------------------------------------------------------------

    def _read_marks(self) -> _Marks:
        try:
            found = self._store.head(MARKS)
            names = unsealed(self._store, MARKS)
            return _Marks(frozenset(map(str, names)), found.modified, found.version)
        except FileNotFoundError:
            return _Marks()
        except (StoreError, TypeError) as error:
            self._notes.append(f"{error}; everything is marked anew")
            return _Marks(frozenset(), found.modified, found.version)

    def _write_marks(self, before: _Marks, names: set[str]) -> None:
        if self._dry or not (names or before.names):
            return
        data = sealed(sorted(names))
        try:
            self._store.calls.run(lambda: self._store.objects.put(MARKS.name, data, before.version), WRITE_S)
        except (ExistsError, ChangedError):
            self._notes.append("another collector is at work; its marks are kept")


def as_json(done: Collection, dry_run: bool) -> dict[str, Any]:
    removals = [
        {"path": removal.path, "size_bytes": removal.size_bytes, "why": removal.why} for removal in done.removals
    ]
    return {
        "removals": removals,
        "notes": done.notes,
        "marked": done.marked,
        "freed_bytes": done.freed,
        "dry_run": dry_run,
    }
