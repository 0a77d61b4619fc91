"""What can go from a store: found first, so that it can be shown, then removed.

In this order: half-written files, agents that were not used for too long, blocks that no agent owns, quarantine if
asked for; and if the store is still larger than its quota, what `kv.others` would let go of. Where a manifest can't be
read (damaged, or of another version of everwarm), blocks that no other one names stay: they may be its own.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.disk import FORMAT, SUFFIX, VERSION
from everwarm.kv.files import Files
from everwarm.kv.inventory import ModelEntry, is_temporary, listed, take_inventory
from everwarm.kv.others import directory_bytes, victims
from everwarm.kv.owner import QUARANTINE


@dataclass(frozen=True, slots=True)
class Removal:
    """One file that can go."""

    path: Path
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


def plan(root: Path, *, before: float, quota: int, quarantine: bool = False) -> Plan:
    """What can go: agents that were last used `before` this time, and what is over the quota. Changes nothing."""
    removals: list[Removal] = []
    notes: list[str] = []
    inventory = take_inventory(root)
    directories = [root, *(entry.path / kind for entry in inventory.models for kind in (".", "manifests", "blocks"))]
    for directory in directories:
        removals += [Removal(path, size, "half-written") for path, size in listed(directory) if is_temporary(path)]
    for entry in inventory.models:
        removals += _of_model(entry, before, notes)
    if quarantine:
        removals += [Removal(path, size, "in quarantine") for path, size in listed(root / QUARANTINE)]
    chosen = {removal.path for removal in removals}
    excess = directory_bytes(root) - sum(removal.size_bytes for removal in removals) - quota
    for path in victims(root) if excess > 0 else ():
        if excess <= 0:
            break
        if path not in chosen:
            with suppress(FileNotFoundError):
                removals.append(Removal(path, path.stat().st_size, "over the quota"))
                excess -= removals[-1].size_bytes
    return Plan(removals, notes, max(0, excess))


def carry_out(root: Path, found: Plan, files: Files | None = None) -> int:
    """Remove it; bytes that were freed. The caller holds the store's lock."""
    files = files or Files()
    freed = 0
    try:
        for removal in found.removals:
            with suppress(FileNotFoundError):
                files.unlink(removal.path)
                freed += removal.size_bytes
        for directory in {removal.path.parent for removal in found.removals}:
            files.sync_directory(directory)
    except OSError as error:
        raise StoreError(f"{root}: not everything could be removed: {error}") from None
    return freed


def _of_model(entry: ModelEntry, before: float, notes: list[str]) -> list[Removal]:
    expired = [agent for agent in entry.agents if agent.manifest.used < before and not agent.manifest.pinned]
    removals = [Removal(agent.path, agent.manifest_bytes, "an agent that was not used for long") for agent in expired]
    kept = {id(agent) for agent in entry.agents} - {id(agent) for agent in expired}
    owned = {key for agent in entry.agents if id(agent) in kept for key in agent.manifest.blocks}
    once = {key for agent in expired for key in agent.manifest.blocks}
    unsure = {**entry.other_versions, **entry.unreadable}
    notes += [f"{path}: {why}; blocks that only it may own are left alone" for path, why in unsure.items()]
    for key, size in entry.blocks.items():
        path = entry.path / "blocks" / (key.hex() + SUFFIX)
        if key in owned or (unsure and key not in once):
            continue
        if _other_version(path):
            notes.append(f"{path}: of another version of everwarm; left alone")
        else:
            removals.append(Removal(path, size, "a block of such an agent" if key in once else "a block of no agent"))
    return removals


def _other_version(path: Path) -> bool:
    try:
        container.check_version(container.read_header(path)[0], FORMAT, VERSION)
    except container.VersionError:
        return True
    except (OSError, StoreError):
        return False
    return False
