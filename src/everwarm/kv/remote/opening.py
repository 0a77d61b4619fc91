"""From a URL to a store: everything that can be wrong with a bucket is found out here, before anything is written.

A prefix belongs to one cluster. `cluster.json` there has the version of the store and a fingerprint of the cluster's
secret. The secret itself, from which the salts of tenants follow, is on the machines of the cluster and nowhere else:
in `EVERWARM_WARM_SECRET`, or in the file `cluster-secret` under EVERWARM_HOME.
"""

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv.container import VersionError
from everwarm.kv.remote.cache import open_cache
from everwarm.kv.remote.cached import CachedStore
from everwarm.kv.remote.objects import Bucket, ExistsError, Objects
from everwarm.kv.remote.store import ObjectStore
from everwarm.kv.warm.blockstore import Blob
from everwarm.kv.warm.sealed import sealed, unsealed
from everwarm.opening import create_new, read_whole

CLUSTER = Blob("", "", "cluster.json")
SECRET_FILE = "cluster-secret"  # noqa: S105
SECRET_VARIABLE = "EVERWARM_WARM_SECRET"  # noqa: S105
CACHE = "warm-cache"
FORMAT = "everwarm-cluster"
LEAST_SECRET = 16


def open_warm(
    url: str, home: Path, cache_quota: int, *, create: bool = True, objects: Objects | None = None
) -> CachedStore:
    """The store behind a URL. `create`: a prefix where nothing is becomes one of this cluster. Raises ConfigError or
    StoreError, in one line; then nothing was written.
    """
    objects = objects or Bucket.open(url)
    secret = _secret_of(ObjectStore(objects, url, b""), home, create)
    return CachedStore(ObjectStore(objects, url, secret), open_cache(home / CACHE, url, cache_quota))


def _secret_of(remote: ObjectStore, home: Path, create: bool) -> bytes:
    """The cluster's secret, if it is the one that the prefix belongs to."""
    url = remote.url
    try:
        said = _record(remote)
        secret = _own_secret(home)
        if said is None:
            if not create:
                raise StoreError(
                    f"{url}: there is no warm tier of everwarm there; `everwarm serve --warm-url` makes one"
                )
            secret = secret or _new_secret(home)
            try:
                remote.calls.run(lambda: remote.objects.put(CLUSTER.name, sealed(_described(secret)), None), 20.0)
                return secret
            except ExistsError:  # another replica was faster, or the response was lost
                said = _record(remote)
        else:
            # Writes nothing, because it is there; but asks whether we might.
            with suppress(ExistsError):
                remote.calls.run(lambda: remote.objects.put(CLUSTER.name, b"", None), 20.0)
    except OSError as error:
        raise StoreError(f"{url}: the storage can't be used: {error.strerror or error}") from None
    if secret is None:
        raise StoreError(
            f"{url}: belongs to a cluster whose secret is not here: copy {SECRET_FILE} from EVERWARM_HOME of one "
            f"of its machines to {home}, or set {SECRET_VARIABLE}"
        )
    if said is None or said.get("fingerprint") != _fingerprint(secret):
        raise StoreError(
            f"{url}: belongs to another cluster, whose tenants have other salts: take another prefix, or the secret of "
            f"that cluster ({SECRET_VARIABLE}, or {home / SECRET_FILE})"
        )
    return secret


def _record(remote: ObjectStore) -> dict[str, str] | None:
    """What `cluster.json` says; None if there is none. Raises StoreError, OSError."""
    try:
        remote.read(CLUSTER)  # so that a storage that refuses is told from a record that can't be read
        said = unsealed(remote, CLUSTER)
    except FileNotFoundError:
        return None
    except VersionError as error:
        raise StoreError(f"{error}: take another prefix, or the everwarm that wrote it") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise StoreError(f"{remote.where(CLUSTER)}: not a record of everwarm")
    return said


def _described(secret: bytes) -> dict[str, str]:
    return {"format": FORMAT, "fingerprint": _fingerprint(secret)}


def _fingerprint(secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=16, person=b"everwarm cluster").hexdigest()


def _own_secret(home: Path) -> bytes | None:
    """The secret that this machine has. Raises StoreError."""
    if said := os.environ.get(SECRET_VARIABLE, ""):
        if len(said) < LEAST_SECRET:
            raise StoreError(f"{SECRET_VARIABLE} has {len(said)} characters, it needs at least {LEAST_SECRET}")
        return said.encode("utf-8", "surrogateescape")
    try:
        kept = read_whole(home / SECRET_FILE, 4096).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{home / SECRET_FILE}: can't be read: {error.strerror or error}") from None
    if len(kept) < LEAST_SECRET:
        raise StoreError(f"{home / SECRET_FILE} has {len(kept)} characters, it needs at least {LEAST_SECRET}")
    return kept


def _new_secret(home: Path) -> bytes:
    """One that is kept. Raises StoreError."""
    path, secret = home / SECRET_FILE, secrets.token_hex(32).encode()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = path.with_name(f".{SECRET_FILE}.{secrets.token_hex(8)}")
        try:
            with open(create_new(whole), "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            os.link(whole, path)  # all of it or nothing, and never over another
        finally:
            whole.unlink(missing_ok=True)
        return secret
    except FileExistsError:  # another process of this machine was faster
        found = _own_secret(home)
        assert found is not None
        return found
    except OSError as error:
        raise StoreError(f"{path}: can't be written: {error.strerror or error}") from None
