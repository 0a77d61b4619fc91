"""Whose turn it is, where several processes write: a lease in the agent's manifest.

To take a lease is to replace the manifest by one with the next generation, which names the owner. So whoever had the
turn before, and lost it, can't commit: the generation that it expects is not there any more. Nothing depends on
clocks that agree. A lease has run out for us once we have seen it unchanged for as long as it lasts; one that ended
minutes ago by any believable clock has run out at once. While a turn goes on, its lease is renewed.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

from everwarm.errors import CancelledError, StoreError
from everwarm.kv.manifest import Lease, Manifest
from everwarm.kv.warm.blocks import ModelBlocks
from everwarm.kv.warm.blockstore import ConflictError
from everwarm.kv.warm.manifests import Manifests, Who
from everwarm.waiting import Cancellation

_log = logging.getLogger(__name__)

LEASE_S = 20.0
SKEW_S = 600.0
"""So much the clocks of two machines may differ."""
LOOK_S = 0.1
MOST_LOOK_S = 1.0


def new_owner() -> str:
    """A name that no other process has."""
    return f"{socket.gethostname()[:80]}-{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(slots=True, eq=False)
class Held:
    """A lease of ours."""

    manifest: Manifest  # as it is stored
    lock: threading.Lock = field(default_factory=threading.Lock)  # one change of the manifest at a time
    over: bool = False  # committed, given back or lost

    def end(self) -> None:
        self.over = True

    def renewed(self, manifest: Manifest) -> None:
        self.manifest = manifest


class Leases:
    """The leases that this process holds, and what it has seen of others'."""

    def __init__(
        self,
        blocks: ModelBlocks,
        manifests: Manifests,
        *,
        owner: str | None = None,
        duration_s: float = LEASE_S,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks, self._manifests = blocks, manifests
        self.owner = owner or new_owner()
        self._duration_s = duration_s
        self._clock, self._steady = clock, steady
        self._lock = threading.Lock()
        self._held: dict[Who, Held] = {}
        self._watched: dict[Who, tuple[tuple[int, float], float]] = {}  # what we saw, and since when
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def take(self, blank: Manifest, cancelled: Cancellation | None) -> Manifest:
        """Wait for the turn of an agent and take it; the manifest, as it is stored now. `blank`: that of an agent
        which is not known yet. Raises CancelledError; StoreError, OSError if its manifest can't be read or written.
        """
        who = blank.tenant, blank.name
        woken, pause = threading.Event(), LOOK_S
        with (cancelled or Cancellation()).waking(woken.set):
            while True:
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError(f"cancelled while another replica had the turn of agent {who[1]!r}")
                try:
                    found = self._blocks.load(*who)
                except FileNotFoundError:
                    found = blank
                if found.lease is None or found.lease.owner == self.owner or self._is_over(who, found):
                    with suppress(ConflictError):  # somebody was faster
                        return self._written(found)
                woken.wait(pause)
                pause = min(MOST_LOOK_S, 2 * pause)

    def _written(self, found: Manifest) -> Manifest:
        who = found.tenant, found.name
        taken = replace(found, generation=found.generation + 1, lease=self._lease())
        stored = self._blocks.commit(taken, found.generation, lambda size: None)
        self._manifests.saw(taken, stored.size)
        with self._lock:
            self._held[who] = Held(taken)
            self._watched.pop(who, None)
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew_all, name="everwarm-leases", daemon=True)
                self._renewing.start()
        return taken

    def _is_over(self, who: Who, manifest: Manifest) -> bool:
        """Whether somebody else's lease has run out."""
        lease = manifest.lease
        assert lease is not None
        seen = manifest.generation, lease.until
        with self._lock:
            known = self._watched.get(who)
            if known is None or known[0] != seen:
                known = self._watched[who] = seen, self._steady()
        return self._steady() - known[1] >= lease.duration_s or self._clock() > lease.until + SKEW_S

    def _lease(self) -> Lease:
        return Lease(self.owner, self._clock() + self._duration_s, self._duration_s)

    def history(self, who: Who) -> Manifest | None:
        """The manifest of an agent whose turn is ours."""
        with self._lock:
            held = self._held.get(who)
        return None if held is None else held.manifest

    def changing(self, who: Who) -> AbstractContextManager[object]:
        """Held while an agent's manifest is replaced: its lease is not renewed meanwhile."""
        with self._lock:
            held = self._held.get(who)
        return nullcontext() if held is None else held.lock

    def ended(self, who: Who) -> None:
        """The manifest was replaced by one without a lease. With `changing` held."""
        with self._lock:
            held = self._held.pop(who, None)
        if held is not None:
            held.end()

    def drop(self, who: Who) -> Held | None:
        """The turn is over. What is returned has to be given back, or others wait until it has run out."""
        with self._lock:
            return self._held.pop(who, None)

    def give_back(self, held: Held) -> None:
        """Let others have the turn. What goes wrong means that they have to wait a little."""
        with held.lock:
            if held.over:
                return
            held.end()
            free = replace(held.manifest, lease=None)
            try:
                # Its generation stays. Nobody is told: the next turn may have begun, and know better.
                self._blocks.commit(free, free.generation, lambda size: None)
            except (OSError, StoreError) as error:
                _log.debug("the lease of agent %s was not given back: %s", free.name, error)

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for one in held:
            self.give_back(one)

    # Renewing ---------------------------------------------------------------------------------------------------------

    def _renew_all(self) -> None:
        """Until nothing is held."""
        while not self._ended.wait(self._duration_s / 3):
            with self._lock:
                held = list(self._held.values())
                if not held:
                    self._renewing = None
                    return
            for one in held:
                self.renew(one)

    def renew(self, held: Held) -> None:
        with held.lock:
            if held.over:
                return
            renewed = replace(held.manifest, lease=self._lease())
            try:
                self._blocks.commit(renewed, renewed.generation, lambda size: None)
                held.renewed(renewed)
            except ConflictError:
                held.end()
                _log.warning("the turn of agent %s was taken over by another replica", renewed.name)
            except (OSError, StoreError) as error:
                _log.debug("the lease of agent %s was not renewed: %s", renewed.name, error)
