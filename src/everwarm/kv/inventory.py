"""A store's directory seen without a model: which models have agents there, how many blocks and bytes.

Reads only, and beside a process that writes: what goes away while we look was not there. Every model's directory says
in `model.json` whose it is; with that, its store can be opened without the model, to change what needs no computing.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from everwarm.errors import StoreError, UnknownAgentError
from everwarm.kv.chain import KEY_BYTES, Key
from everwarm.kv.container import VersionError
from everwarm.kv.disk import MODEL, SUFFIX, ModelIds
from everwarm.kv.files import TEMPORARY
from everwarm.kv.manifest import Manifest, decode, file_name
from everwarm.kv.others import directory_bytes
from everwarm.kv.owner import DEFAULT_TENANT, QUARANTINE, StoreLock, unsealed
from everwarm.kv.pool import BlockPool, HeapBlocks
from everwarm.kv.store import AgentStore
from everwarm.opening import read_whole


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """One agent of one model."""

    manifest: Manifest  # without its text
    path: Path
    manifest_bytes: int
    own_bytes: int  # of its manifest and of blocks that no other agent has
    shared_bytes: int  # of blocks that others have, too
    lost: tuple[int, ...]  # which of its blocks are not there: their tokens are computed when they are needed

    @property
    def size_bytes(self) -> int:
        return self.own_bytes + self.shared_bytes


@dataclass(slots=True)
class ModelEntry:
    """One model's directory."""

    path: Path
    ids: ModelIds | None = None
    problem: str = ""  # why `ids` is None
    agents: list[AgentEntry] = field(default_factory=list)
    blocks: dict[Key, int] = field(default_factory=dict)  # bytes of each file
    unreadable: dict[Path, str] = field(default_factory=dict)  # manifests, and why
    other_versions: dict[Path, str] = field(default_factory=dict)  # manifests that another everwarm can read

    @property
    def directory(self) -> str:
        return self.path.name

    @property
    def name(self) -> str:
        """For people."""
        if self.ids is not None:
            return self.ids.name
        return max(self.agents, key=lambda agent: agent.manifest.used).manifest.model if self.agents else "unknown"

    @property
    def kv_type(self) -> str:
        if self.ids is not None:
            return self.ids.kv_type
        return self.agents[0].manifest.kv_type if self.agents else "unknown"

    @property
    def described(self) -> str:
        return f"{self.directory} ({self.name}, {self.kv_type})"

    @property
    def unowned(self) -> set[Key]:
        return self.blocks.keys() - {key for agent in self.agents for key in agent.manifest.blocks}


@dataclass(frozen=True, slots=True)
class Inventory:
    """All of it."""

    root: Path
    models: list[ModelEntry]
    size_bytes: int  # of every file, also of those in quarantine
    quarantined: int
    quarantined_bytes: int

    def find(self, name: str, tenant: str = "", model: str | None = None) -> tuple[ModelEntry, AgentEntry]:
        """The one agent of this name. Raises StoreError if there is none, or more than one and `model` does not say
        which.
        """
        tenant = tenant or DEFAULT_TENANT
        found = [
            (entry, agent)
            for entry in self.chosen(model)
            for agent in entry.agents
            if (agent.manifest.tenant, agent.manifest.name) == (tenant, name)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            which = ", ".join(entry.described for entry, _ in found)
            raise StoreError(f"agent {name[:80]!r} is known to several models; choose with --model: {which}")
        for entry in self.chosen(model):
            path = entry.path / "manifests" / file_name(tenant, name)
            if why := entry.other_versions.get(path) or entry.unreadable.get(path):
                raise StoreError(f"agent {name[:80]!r}: its manifest can't be read: {why}")
        of_tenant = "" if tenant == DEFAULT_TENANT else f" of tenant {tenant[:80]!r}"
        raise UnknownAgentError(
            f"no such agent{of_tenant}: {name[:80]!r} (everwarm agents ls --all shows those there are)"
        )

    def chosen(self, model: str | None) -> list[ModelEntry]:
        """Models of this name, or whose directory begins so; all of them if nothing is said. Raises StoreError if
        there is none.
        """
        if model is None:
            return self.models
        found = [entry for entry in self.models if model == entry.name or (model and entry.directory.startswith(model))]
        if not found:
            known = ", ".join(entry.described for entry in self.models) or "none"
            raise StoreError(f"no agents of a model {model[:80]!r} here; known are: {known}")
        return found


def take_inventory(root: Path) -> Inventory:
    """Look at manifests and at the listing of blocks. A store that is not there is an empty one."""
    quarantine = root / QUARANTINE
    return Inventory(
        root,
        [_model(path) for path in model_directories(root)],
        directory_bytes(root),
        sum(1 for _ in listed(quarantine)),
        directory_bytes(quarantine),
    )


def model_directories(root: Path) -> list[Path]:
    """Directories of models, whatever is in them."""
    try:
        found = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root}: can't be read: {error.strerror or error}") from None
    return sorted(path for path in found if (path / "blocks").is_dir() or (path / "manifests").is_dir())


def read_ids(path: Path) -> ModelIds:
    """Whose directory this is. Raises StoreError, FileNotFoundError."""
    ids = ModelIds.from_json(unsealed(path / MODEL))
    if ids.directory != path.name:
        raise StoreError(f"{path / MODEL}: of another directory, {ids.directory[:80]!r}")
    return ids


def read_manifest(path: Path, with_text: bool = False) -> Manifest:
    """A manifest that is where it belongs. Raises StoreError, VersionError, OSError."""
    manifest = decode(read_whole(path), with_text)
    if path.name != file_name(manifest.tenant, manifest.name):
        raise StoreError("under the name of another agent")
    if path.parent.parent.name != f"{manifest.weights_id[:16]}-{manifest.numerics_id[:16]}":
        raise StoreError("of another model")
    return manifest


def listed(directory: Path) -> Iterator[tuple[Path, int]]:
    """Files and their sizes."""
    try:
        entries = os.scandir(directory)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            try:
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue


def block_key(path: Path) -> Key | None:
    """The block that a file is named after, if it is."""
    try:
        key = bytes.fromhex(path.name.removesuffix(SUFFIX))
    except ValueError:
        return None
    return Key(key) if len(key) == KEY_BYTES and path.name == key.hex() + SUFFIX else None


def is_temporary(path: Path) -> bool:
    """Half-written, by a process that runs or that was killed."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def open_agents(root: Path, model: ModelEntry, *, writing: bool, quota: int = 0) -> AgentStore:
    """The agents of one model, without the model. Raises StoreError if it shall write and can't: who holds the lock."""
    if model.ids is None:
        raise StoreError(f"{model.path}: {model.problem}; `everwarm agents verify --repair` may mend it")
    if writing:
        lock(root).release()
    layout = model.ids.layout
    pool = BlockPool(HeapBlocks(layout.block_tokens, layout.block_bytes))
    store = AgentStore(pool, model.ids, root, quota=quota, writing=writing)
    if writing and store.read_only:
        store.close()
        raise StoreError(store.read_only)
    return store


def lock(root: Path) -> StoreLock:
    """The right to write. Raises StoreError saying who has it, or why nobody can."""
    try:
        return StoreLock(root)
    except OSError as error:
        raise StoreError(f"{root}: can't be written: {error.strerror or error}") from None


def _model(path: Path) -> ModelEntry:
    entry = ModelEntry(path)
    try:
        entry.ids = read_ids(path)
    except FileNotFoundError:
        entry.problem = f"{MODEL} is missing"
    except StoreError as error:
        entry.problem = str(error)
    found: list[tuple[Manifest, Path, int]] = []
    for file, size in listed(path / "manifests"):
        if file.suffix != SUFFIX or is_temporary(file):
            continue
        try:
            found.append((read_manifest(file), file, size))
        except VersionError as error:
            entry.other_versions[file] = str(error)
        except FileNotFoundError:
            continue
        except (StoreError, OSError) as error:
            entry.unreadable[file] = str(error)
    entry.blocks = {key: size for file, size in listed(path / "blocks") if (key := block_key(file))}
    owners = Counter(key for manifest, _, _ in found for key in set(manifest.blocks))
    for manifest, file, size in found:
        sizes = {key: entry.blocks.get(key, 0) for key in manifest.blocks}
        own = sum(size for key, size in sizes.items() if owners[key] == 1)
        lost = tuple(number for number, key in enumerate(manifest.blocks) if key not in entry.blocks)
        entry.agents.append(AgentEntry(manifest, file, size, size + own, sum(sizes.values()) - own, lost))
    entry.agents.sort(key=lambda agent: -agent.manifest.used)
    return entry
