"""A salt for each tenant: equal prefixes of two tenants have different names, so they share nothing.

Salts are random and kept in the store. Where many processes write, they follow from a secret that all of them have and
that is not in the store.
"""

import hashlib
import logging
import secrets
import threading
from collections import Counter

from everwarm.errors import StoreError
from everwarm.kv.container import VersionError
from everwarm.kv.warm.blockstore import Blob, BlockStore
from everwarm.kv.warm.sealed import sealed, unsealed

_log = logging.getLogger(__name__)

TENANTS = Blob("", "", "tenants.json")
DEFAULT_TENANT = "default"


class Tenants:
    """The salts, in memory and in the store. Safe to use from any thread: `_lock` guards both."""

    def __init__(self, store: BlockStore | None, writing: bool, counters: Counter[str]) -> None:
        """Without a store, or where nothing may be written, new salts last until we end."""
        self._secret = None if store is None else store.secret
        self._store = store if writing and self._secret is None else None
        self._counters = counters
        self._lock = threading.Lock()
        self._salts: dict[str, bytes] = {}
        self._unsaved = False
        try:
            self._salts = {} if store is None or self._secret is not None else read_salts(store)
        except VersionError as error:
            _log.warning("%s; it is left alone, tenants get new salts until we end", error)
            self._store = None
        except StoreError as error:
            # Agents carry the salt of their own blocks, so they stay warm; only what they share with others is lost.
            _log.error("%s; tenants get new salts", error)
            counters["corrupt"] += 1
            if self._store is not None:
                self._store.set_aside(TENANTS)
        self.salt(DEFAULT_TENANT)

    def salts(self) -> list[bytes]:
        with self._lock:
            return list(self._salts.values())

    def salt(self, tenant: str) -> bytes:
        """A tenant's salt. That of a new tenant is made and saved; if that fails, the next call tries again."""
        with self._lock:
            if tenant not in self._salts:
                self._salts[tenant] = secrets.token_bytes(16) if self._secret is None else self._derived("salt", tenant)
                self._unsaved = True
            if self._unsaved and self._store is not None:
                self._save(self._store)
            return self._salts[tenant]

    def secret(self, tenant: str) -> bytes:
        """Bytes that nobody else has. Where salts follow from a secret, manifests tell them to whoever can read the
        storage: then this is something else.
        """
        return self.salt(tenant) if self._secret is None else self._derived("secret", tenant)

    def _derived(self, what: str, tenant: str) -> bytes:
        assert self._secret is not None
        key = hashlib.blake2b(self._secret).digest()
        said = f"{what}\0{tenant}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(said, digest_size=16, key=key).digest()

    def _save(self, store: BlockStore) -> None:
        try:
            store.put(TENANTS, [sealed({name: salt.hex() for name, salt in self._salts.items()})])
            store.sync(TENANTS.model, TENANTS.area)
            self._unsaved = False
        except OSError as error:
            self._counters["save_errors"] += 1
            _log.warning("%s was not saved: %s", store.where(TENANTS), error)


def read_salts(store: BlockStore) -> dict[str, bytes]:
    """The saved ones; none if there are none. Raises StoreError, VersionError."""
    try:
        return {str(name): bytes.fromhex(salt) for name, salt in unsealed(store, TENANTS).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{store.where(TENANTS)}: {error!r}") from None
