"""Models that are not loaded: their agents share the quota with those that are, and what they have saved may go."""

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from everwarm.errors import StoreError
from everwarm.kv.chain import Key
from everwarm.kv.container import VersionError
from everwarm.kv.eviction import at_rest
from everwarm.kv.manifest import Manifest, decode, file_name
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, QUARANTINE, Blob, BlockStore, ObjectId


class OtherModels:
    """What models that are not loaded have saved, and what is in quarantine: how many bytes, and which go first. We
    hold the store's lock, so nobody else changes them: what may go is worked out once, and every block after that costs
    the same.
    """

    def __init__(self, store: BlockStore, loaded: frozenset[str] = frozenset()) -> None:
        self._store, self._loaded = store, loaded
        self._quarantined: list[tuple[Blob, int]] = []  # since we began
        self._told: set[Blob] = set()  # of the quarantine: a plan may have seen what was quarantined meanwhile
        self._plan: Iterator[tuple[Blob, int]] | None = None
        self._planning: threading.Thread | None = None
        self._lock = threading.Lock()
        self.bytes = store.usage(loaded)

    def plan_ahead(self) -> None:
        """The quota will soon be full: work out what may go, on a thread of its own."""
        if self._planning is None and self._plan is None and self.bytes:
            self._planning = threading.Thread(target=self._make_plan, name="everwarm-plan", daemon=True)
            self._planning.start()

    def free(self, wanted: int) -> int:
        """Delete `victims` until `wanted` bytes are free. Returns the bytes that were freed."""
        freed = 0
        while freed < wanted and (found := self._next()) is not None:
            blob, size = found
            if blob in self._told:
                continue
            if blob.area == QUARANTINE:
                self._told.add(blob)
            try:
                self._store.delete(blob)
                freed += size
            except OSError:
                continue
        with self._lock:
            self.bytes -= freed
        return freed

    def quarantined(self, blob: Blob, size: int) -> None:
        """Something of a loaded model was moved to quarantine: it is the next to go."""
        with self._lock:
            self.bytes += size
            self._quarantined.append((blob, size))

    def _next(self) -> tuple[Blob, int] | None:
        with self._lock:
            if self._quarantined:
                return self._quarantined.pop(0)
        if self._planning is not None:
            self._planning.join()
        if self._plan is None:
            self._make_plan()
        assert self._plan is not None
        return next(self._plan, None)

    def _make_plan(self) -> None:
        self._plan = victims(self._store, self._loaded)


def victims(store: BlockStore, loaded: frozenset[str] = frozenset()) -> Iterator[tuple[Blob, int]]:
    """What may go for the quota's sake, with sizes: quarantine and blocks that no manifest names first, then blocks of
    histories in the order of `kv.eviction`, each history from its end. Pinned agents stay. Worked out now, told one by
    one.
    """
    unowned: list[tuple[Blob, int]] = []
    owned: list[tuple[tuple[bool, float], Blob, int]] = []
    for model in _models(store):
        if model in loaded:
            continue
        manifests, unsure = _manifests(store, model)
        owners = Counter(key for manifest in manifests for key in manifest.keys)
        pinned = {key for manifest in manifests if manifest.pinned for key in manifest.keys}
        blobs: dict[Key, list[tuple[Blob, int]]] = {}
        for blob, size in store.list(model, BLOCKS):
            if blob.is_data and (found := ObjectId.of(blob)) is not None:
                blobs.setdefault(found.key, []).append((blob, size))
        if not unsure:  # else they may be owned by an agent whose manifest we can't read
            unowned += [entry for key, entries in blobs.items() if key not in owners for entry in entries]
        for manifest in sorted(manifests, key=lambda manifest: at_rest(manifest.anonymous, manifest.used)):
            for key in reversed(manifest.keys):
                owners[key] -= 1
                if owners[key] == 0 and key not in pinned:
                    order = at_rest(manifest.anonymous, manifest.used)
                    owned += [(order, blob, size) for blob, size in blobs.get(key, ())]
    owned.sort(key=lambda entry: entry[0])
    quarantine = sorted(store.list("", QUARANTINE))
    return chain(quarantine, unowned, ((blob, size) for _, blob, size in owned))


def elsewhere(store: BlockStore, model: str, tenant: str, name: str) -> Manifest | None:
    """The latest manifest that an agent of this name has with another model."""
    found = []
    for other in _models(store):
        if other != model:
            try:
                found.append(decode(store.read(Blob(other, MANIFESTS, file_name(tenant, name))), with_text=False))
            except (OSError, StoreError):
                continue
    return max(found, key=lambda manifest: manifest.used, default=None)


def _models(store: BlockStore) -> list[str]:
    try:
        return store.models()
    except StoreError:  # it can't be read: whoever wants to write is told what is the matter
        return []


def _manifests(store: BlockStore, model: str) -> tuple[list[Manifest], bool]:
    """Those that can be read, and whether there are others of another version of everwarm."""
    found, unsure = [], False
    for blob, _ in store.list(model, MANIFESTS):
        if blob.is_data:
            try:
                found.append(decode(store.read(blob), with_text=False))
            except VersionError:
                unsure = True
            except (OSError, StoreError):
                continue
    return found, unsure
