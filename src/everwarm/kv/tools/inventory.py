"""What is in a store, seen without a model: which models have agents there, how many blocks and bytes.

Reads only, and beside a process that writes: what goes away while we look was not there. Every model says in
`model.json` whose blocks these are; with that, its agents can be opened without the model, to change what needs no
computing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from everwarm.errors import StoreError, UnknownAgentError
from everwarm.kv.chain import Key
from everwarm.kv.container import VersionError
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import HeapBlocks
from everwarm.kv.manifest import Manifest, decode, file_name
from everwarm.kv.store import AgentStore
from everwarm.kv.warm.blocks import MODEL
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, QUARANTINE, Blob, BlockStore, ObjectId
from everwarm.kv.warm.sealed import unsealed
from everwarm.kv.warm.tenants import DEFAULT_TENANT

READERS = 16


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """One agent of one model."""

    manifest: Manifest  # without its text
    blob: Blob
    manifest_bytes: int
    own_bytes: int  # of its manifest and of blocks that no other agent has
    shared_bytes: int  # of blocks that others have, too
    lost: tuple[int, ...]  # which of its blocks are not there: their tokens are computed when they are needed

    @property
    def size_bytes(self) -> int:
        return self.own_bytes + self.shared_bytes


@dataclass(slots=True)
class ModelEntry:
    """One model's part of a store."""

    directory: str
    ids: ModelIds | None = None
    problem: str = ""  # why `ids` is None
    agents: list[AgentEntry] = field(default_factory=list)
    objects: dict[ObjectId, int] = field(default_factory=dict)  # bytes of each file
    blocks: dict[Key, int] = field(default_factory=dict)  # bytes of each block, with all that lies beside it
    unreadable: dict[Blob, str] = field(default_factory=dict)  # manifests, and why
    other_versions: dict[Blob, str] = field(default_factory=dict)  # manifests that another everwarm can read
    empty: dict[Blob, int] = field(default_factory=dict)  # manifests without an agent, where many write: their bytes

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
        return self.blocks.keys() - {key for agent in self.agents for key in agent.manifest.keys}


@dataclass(frozen=True, slots=True)
class Inventory:
    """All of it."""

    store: BlockStore
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
            blob = Blob(entry.directory, MANIFESTS, file_name(tenant, name))
            if why := entry.other_versions.get(blob) or entry.unreadable.get(blob):
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


def take_inventory(store: BlockStore) -> Inventory:
    """Look at manifests and at the listing of blocks. A store that is not there is an empty one."""
    quarantine = list(store.list("", QUARANTINE))
    return Inventory(
        store,
        [_model(store, model) for model in store.models()],
        store.usage(),
        len(quarantine),
        sum(size for _, size in quarantine),
    )


def read_ids(store: BlockStore, model: str) -> ModelIds:
    """Whose blocks a model's are. Raises StoreError, FileNotFoundError."""
    blob = Blob(model, "", MODEL)
    ids = ModelIds.from_json(unsealed(store, blob))
    if ids.directory != model:
        raise StoreError(f"{store.where(blob)}: of another directory, {ids.directory[:80]!r}")
    return ids


def read_manifest(store: BlockStore, blob: Blob, with_text: bool = False) -> Manifest:
    """A manifest that is where it belongs. Raises StoreError, VersionError, OSError."""
    manifest = decode(store.read(blob), with_text)
    if blob.name != file_name(manifest.tenant, manifest.name):
        raise StoreError("under the name of another agent")
    if blob.model != f"{manifest.weights_id[:16]}-{manifest.numerics_id[:16]}":
        raise StoreError("of another model")
    return manifest


def open_agents(store: BlockStore, model: ModelEntry, *, writing: bool, quota: int = 0) -> AgentStore:
    """The agents of one model, without the model. Raises StoreError if it shall write and can't: who holds the lock."""
    if model.ids is None:
        where = store.where(Blob(model.directory, "", ""))
        raise StoreError(f"{where}: {model.problem}; `everwarm agents verify --repair` may mend it")
    if writing:
        store.lock().release()
    layout = model.ids.layout
    memories = {kind: HeapBlocks(layout.block_tokens, layout.block_bytes(kind)) for kind in layout.kinds}
    index = Index(memories, reach=layout.reach)
    agents = AgentStore(index, model.ids, store, quota=quota, writing=writing)
    if writing and agents.read_only:
        agents.close()
        raise StoreError(agents.read_only)
    return agents


def _model(store: BlockStore, model: str) -> ModelEntry:
    entry = ModelEntry(model)
    try:
        entry.ids = read_ids(store, model)
    except FileNotFoundError:
        entry.problem = f"{MODEL} is missing"
    except StoreError as error:
        entry.problem = str(error)
    found: list[tuple[Manifest, Blob, int]] = []
    for blob, size, read in _read_manifests(store, model):
        try:
            manifest = read()
            if manifest.is_empty and store.many_writers:
                entry.empty[blob] = size
            else:
                found.append((manifest, blob, size))
        except VersionError as error:
            entry.other_versions[blob] = str(error)
        except FileNotFoundError:
            continue
        except (StoreError, OSError) as error:
            entry.unreadable[blob] = str(error)
    entry.objects = dict(_objects(store, model))
    for found_id, size in entry.objects.items():
        entry.blocks[found_id.key] = entry.blocks.get(found_id.key, 0) + size
    owners = Counter(key for manifest, _, _ in found for key in set(manifest.keys))
    for manifest, blob, size in found:
        sizes = {key: entry.blocks.get(key, 0) for key in manifest.keys}
        own = sum(size for key, size in sizes.items() if owners[key] == 1)
        lost = tuple(number for number, key in enumerate(manifest.blocks) if ObjectId(key) not in entry.objects)
        entry.agents.append(AgentEntry(manifest, blob, size, size + own, sum(sizes.values()) - own, lost))
    entry.agents.sort(key=lambda agent: -agent.manifest.used)
    return entry


def _read_manifests(store: BlockStore, model: str) -> Iterator[tuple[Blob, int, Callable[[], Manifest]]]:
    """Every manifest with its bytes, and how it is had. Where that takes a journey, several are read at a time."""
    listed = [(blob, size) for blob, size in store.list(model, MANIFESTS) if blob.is_data]
    if not store.many_writers:
        yield from ((blob, size, partial(read_manifest, store, blob)) for blob, size in listed)
        return
    with ThreadPoolExecutor(READERS, "everwarm-inventory") as readers:
        reading = [readers.submit(read_manifest, store, blob) for blob, _ in listed]
        yield from ((blob, size, one.result) for (blob, size), one in zip(listed, reading, strict=True))


def _objects(store: BlockStore, model: str) -> Iterator[tuple[ObjectId, int]]:
    for blob, size in store.list(model, BLOCKS):
        if (found := ObjectId.of(blob)) is not None:
            yield found, size
