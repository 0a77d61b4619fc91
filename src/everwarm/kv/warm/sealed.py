"""Small JSON records of a store (`model.json`, `tenants.json`), with a version and a checksum."""

import json
from typing import Any

import xxhash

from everwarm.errors import StoreError
from everwarm.kv.container import VersionError
from everwarm.kv.warm.blockstore import Blob, BlockStore

VERSION = "1"


def sealed(value: object) -> bytes:
    """The value as JSON with a version and a checksum."""
    return json.dumps({"version": VERSION, "checksum": _checksum(VERSION, value), "said": value}, indent=1).encode()


def unsealed(store: BlockStore, blob: Blob) -> Any:
    """What `sealed` wrote. Raises StoreError, VersionError, FileNotFoundError."""
    where = store.where(blob)
    try:
        record = json.loads(store.read(blob))
        if record["checksum"] != _checksum(record["version"], record["said"]):
            raise StoreError(f"{where}: checksum")
        if record["version"] != VERSION:
            raise VersionError(f"{where}: version {str(record['version'])[:20]!r}, this everwarm reads {VERSION}")
        return record["said"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{where}: can't be read: {error!r}") from None


def _checksum(version: object, value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([version, value], sort_keys=True).encode())
