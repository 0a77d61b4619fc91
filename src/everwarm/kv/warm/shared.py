"""One `BlockStore` as this process uses it: who may write, one quota for all models, the salts of its tenants.

Several models of one process share a store: `share` gives each of them the same `SharedStore`. Whoever deletes for the
sake of the quota may delete what another model has saved; `mutex` keeps those who write from each other.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from everwarm.errors import StoreError
from everwarm.kv.eviction import FROM_DISK, Stage, Worth
from everwarm.kv.warm.blockstore import Blob, BlockStore, Lease
from everwarm.kv.warm.others import OtherModels
from everwarm.kv.warm.tenants import Tenants

_log = logging.getLogger(__name__)

BATCH_BLOCKS = 64
"""Blocks that go at a time when the quota is full, if that is a small part of it."""
PLAN_AHEAD = 0.9
"""How full the quota is when we begin to look for what other models could give up."""


class Tier(Protocol):
    """What one loaded model has saved, and how it lets go of it. Called with `mutex` held."""

    model: str

    @property
    def bytes(self) -> int:
        """Of its blocks and manifests."""

    @property
    def block_bytes(self) -> int:
        """Of one block."""

    def delete_garbage(self, wanted: int) -> int:
        """Delete what no history leads to until so many bytes are free; how many are."""

    def last_use(self, worth: Worth) -> int | None:
        """When the longest unused block of this worth was last used; None if there is none."""

    def evict(self, wanted: int, worth: Worth) -> int: ...

    def last_conversation(self) -> float | None:
        """When the longest unused conversation without a name was last used."""

    def remove_conversations(self, wanted: int, *, empty: bool) -> int:
        """Remove conversations without a name; with `empty` only those whose own blocks are gone."""


class SharedStore:
    """A store that several models of this process use."""

    def __init__(self, store: BlockStore | None, quota: int, read_only: str = "") -> None:
        """`store` None keeps everything in memory. `read_only` says why nothing shall be written; where another process
        writes, or nothing can be written, it says that afterwards.
        """
        self.store = store
        self.quota = quota
        self.counters: Counter[str] = Counter()
        self.mutex = threading.RLock()
        self.others: OtherModels | None = None  # None until the first model has looked through its own
        self.read_only = read_only if store is not None else "the store is switched off"
        self._lease: Lease | None = None
        self._tiers: list[Tier] = []
        self._opened: set[str] = set()
        if store is not None and not read_only:
            try:
                self._lease = store.lock()
            except StoreError as error:
                self.read_only = str(error)
                _log.warning("agents are not saved: %s", error)
        try:
            self.tenants = Tenants(store, not self.read_only, self.counters)
        except BaseException:
            self.close()
            raise

    @property
    def used(self) -> int:
        """Bytes of all models, and in quarantine."""
        return sum(tier.bytes for tier in list(self._tiers)) + self.other_bytes

    @property
    def other_bytes(self) -> int:
        """Of models that are not loaded, and in quarantine."""
        return self.others.bytes if self.others is not None else 0

    def open(self, model: str) -> None:
        """A model is to be used. Raises StoreError if this process uses it already: two would not know of each other's
        changes.
        """
        if model in self._opened:
            assert self.store is not None
            raise StoreError(f"{self.store.where()}: this process is writing in it for the same model already")
        self._opened.add(model)

    def attach(self, tier: Tier) -> None:
        """A model knows what it has saved; from now on it is asked when space is needed."""
        with self.mutex:
            self._tiers.append(tier)
            self._count_others()

    def detach(self, model: str) -> bool:
        """A model is closed; whether it was the last."""
        with self.mutex:
            self._opened.discard(model)
            self._tiers = [tier for tier in self._tiers if tier.model != model]
            if self._tiers:
                self._count_others()
            return not self._opened

    def _count_others(self) -> None:
        if self.store is not None and not self.store.many_writers:
            self.others = OtherModels(self.store, frozenset(tier.model for tier in self._tiers))

    def quarantined(self, blob: Blob, size: int) -> None:
        if self.others is not None:
            self.others.quarantined(blob, size)

    def close(self) -> None:
        """Let others write."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    # The quota --------------------------------------------------------------------------------------------------------

    def make_room(self, size: int) -> None:
        """Let go of blocks until `size` more bytes fit. Raises StoreError if they can't. When something must go, a
        little more does: what it takes to find it is shared by the next blocks. With `mutex` held.
        """
        used = self.used + size
        if self.others is not None and used > PLAN_AHEAD * self.quota:
            self.others.plan_ahead()
        excess = used - self.quota
        if excess <= 0:
            return
        largest = max((tier.block_bytes for tier in self._tiers), default=0)
        more = min(BATCH_BLOCKS * largest, self.quota // 256)
        for stage in FROM_DISK:
            excess -= self._free(stage, excess + more)
            if excess <= 0:
                return
        raise StoreError(
            f"the quota of {self.quota:,} bytes is full, {size:,} more are needed and nothing else can go: "
            "give a larger --warm-quota, unpin or remove agents"
        )

    def _free(self, stage: Stage, wanted: int) -> int:
        if stage is Stage.GARBAGE:
            return self._from_all(wanted, lambda tier, wanted: tier.delete_garbage(wanted))
        if stage is Stage.EMPTY_CONVERSATIONS:
            return self._from_all(wanted, lambda tier, wanted: tier.remove_conversations(wanted, empty=True))
        if stage is Stage.CONVERSATIONS:
            return self._from_all(wanted, lambda tier, wanted: tier.remove_conversations(wanted, empty=False))
        if stage is Stage.OTHER_MODELS:
            return self.others.free(wanted) if self.others is not None else 0
        return self._evict(wanted, Worth.UNNAMED if stage is Stage.UNNAMED_BLOCKS else Worth.NAMED)

    def _from_all(self, wanted: int, free: Callable[[Tier, int], int]) -> int:
        """From each model in turn; the one whose conversations were not used for longest comes first."""
        freed = 0
        for tier in sorted(self._tiers, key=lambda tier: tier.last_conversation() or 0.0):
            if freed < wanted:
                freed += free(tier, wanted - freed)
        return freed

    def _evict(self, wanted: int, worth: Worth) -> int:
        """Blocks of all models, the longest unused first."""
        freed = 0
        tiers = list(self._tiers)
        while tiers and freed < wanted:
            uses = [(last, number) for number, tier in enumerate(tiers) if (last := tier.last_use(worth)) is not None]
            if not uses:
                break
            tier = tiers[min(uses)[1]]
            alone = len(uses) == 1
            done = tier.evict(wanted - freed if alone else min(wanted - freed, BATCH_BLOCKS * tier.block_bytes), worth)
            if not done:  # all that is left of it is in use
                tiers.remove(tier)
            freed += done
        return freed


_shared: dict[str, SharedStore] = {}
_sharing = threading.Lock()


def share(store: BlockStore | None, quota: int, model: str, *, writing: bool = True) -> SharedStore:
    """The store for one more model of this process. The quota is that of whoever opened it first."""
    if store is None or not writing:
        return SharedStore(store, quota, "it was opened for reading")
    with _sharing:
        found = _shared.get(store.identity)
        if found is None:
            opened = SharedStore(store, quota)
            opened.open(model)
            if not opened.read_only:
                _shared[store.identity] = opened
            return opened
        try:
            found.open(model)
        except StoreError as error:
            _log.warning("agents are not saved: %s", error)
            return SharedStore(store, quota, str(error))
        if found.quota != quota:
            _log.info("the quota of %s stays %d bytes, as it was opened with", store.where(), found.quota)
        return found


def unshare(shared: SharedStore, model: str) -> None:
    """A model needs the store no longer. When none does, others may write in it."""
    with _sharing:
        if shared.detach(model):
            if shared.store is not None and _shared.get(shared.store.identity) is shared:
                del _shared[shared.store.identity]
            shared.close()
