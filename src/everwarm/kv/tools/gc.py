"""What can go from a store: found first, so that it can be shown, then removed.

In this order: half-written files, agents that were not used for too long, blocks that no agent owns, quarantine if
asked for; and if the store is still larger than its quota, what `kv.warm.others` would let go of. Where a manifest
can't be read (damaged, or of another version of everwarm), blocks that no other one names stay: they may be its own.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.tools.inventory import ModelEntry, take_inventory
from everwarm.kv.warm.blocks import FORMAT, VERSION
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, QUARANTINE, Blob, BlockStore, read_header
from everwarm.kv.warm.others import victims


@dataclass(frozen=True, slots=True)
class Removal:
    """One file that can go."""

    blob: Blob
    path: str  # for people
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What can go, in the order in which it goes, and what is left alone."""

    removals: list[Removal]
    notes: list[str]
    excess: int = 0  # bytes over the quota that stay: pinned agents, manifests

    @property
    def size_bytes(self) -> int:
        return sum(removal.size_bytes for removal in self.removals)


def plan(store: BlockStore, *, before: float, quota: int, quarantine: bool = False) -> Plan:
    """What can go: agents that were last used `before` this time, and what is over the quota. Changes nothing."""
    removals: list[Removal] = []
    notes: list[str] = []
    inventory = take_inventory(store)
    places = [("", ""), *((entry.directory, area) for entry in inventory.models for area in ("", MANIFESTS, BLOCKS))]
    for model, area in places:
        removals += [
            Removal(blob, store.where(blob), size, "half-written")
            for blob, size in store.list(model, area)
            if store.half_written(blob)
        ]
    for entry in inventory.models:
        removals += _of_model(store, entry, before, notes)
    if quarantine:
        removals += [
            Removal(blob, store.where(blob), size, "in quarantine") for blob, size in store.list("", QUARANTINE)
        ]
    chosen = {removal.blob for removal in removals}
    excess = store.usage() - sum(removal.size_bytes for removal in removals) - quota
    for blob, size in victims(store) if excess > 0 else ():
        if excess <= 0:
            break
        if blob not in chosen:
            removals.append(Removal(blob, store.where(blob), size, "over the quota"))
            excess -= size
    return Plan(removals, notes, max(0, excess))


def carry_out(store: BlockStore, found: Plan) -> int:
    """Remove it; bytes that were freed. The caller holds the store's lock."""
    freed = 0
    try:
        for removal in found.removals:
            with suppress(FileNotFoundError):
                store.size(removal.blob)
                store.delete(removal.blob)
                freed += removal.size_bytes
        for model, area in {(removal.blob.model, removal.blob.area) for removal in found.removals}:
            store.sync(model, area)
    except OSError as error:
        raise StoreError(f"{store.where()}: not everything could be removed: {error}") from None
    return freed


def _of_model(store: BlockStore, entry: ModelEntry, before: float, notes: list[str]) -> list[Removal]:
    expired = [agent for agent in entry.agents if agent.manifest.used < before and not agent.manifest.pinned]
    why = "an agent that was not used for long"
    removals = [Removal(agent.blob, store.where(agent.blob), agent.manifest_bytes, why) for agent in expired]
    kept = {id(agent) for agent in entry.agents} - {id(agent) for agent in expired}
    owned = {key for agent in entry.agents if id(agent) in kept for key in agent.manifest.keys}
    once = {key for agent in expired for key in agent.manifest.keys}
    unsure = {**entry.other_versions, **entry.unreadable}
    for blob, problem in unsure.items():
        notes.append(f"{store.where(blob)}: {problem}; blocks that only it may own are left alone")
    for found, size in entry.objects.items():
        blob, key = found.blob(entry.directory), found.key
        if key in owned or (unsure and key not in once):
            continue
        if _other_version(store, blob):
            notes.append(f"{store.where(blob)}: of another version of everwarm; left alone")
        else:
            why = "a block of such an agent" if key in once else "a block of no agent"
            removals.append(Removal(blob, store.where(blob), size, why))
    return removals


def _other_version(store: BlockStore, blob: Blob) -> bool:
    try:
        container.check_version(read_header(store, blob)[0], FORMAT, VERSION)
    except container.VersionError:
        return True
    except (OSError, StoreError):
        return False
    return False


def as_json(plan: Plan) -> dict[str, Any]:
    removals = [
        {"path": removal.path, "size_bytes": removal.size_bytes, "why": removal.why} for removal in plan.removals
    ]
    return {"removals": removals, "notes": plan.notes, "excess": plan.excess}
