"""Who may write in a store's directory, and the salts of its tenants.

One process writes; a lock that dies with it says which. Others read beside it.
"""

import fcntl
import json
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import xxhash

from everwarm.errors import StoreError
from everwarm.kv.files import Files, replace

_log = logging.getLogger(__name__)

TENANTS = "tenants.json"
LOCK = "lock"
DEFAULT_TENANT = "default"


class StoreLock:
    """Held by the process that writes."""

    def __init__(self, root: Path) -> None:
        """Raises StoreError naming who holds it; OSError where no file can be made."""
        self._descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise StoreError(f"{root}: {holder(root)} is writing in it") from None
        said = json.dumps({"pid": os.getpid(), "command": " ".join(sys.argv)[:200]}).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, said, 0)

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def holder(root: Path) -> str:
    """Who the lock file names."""
    try:
        said = json.loads((root / LOCK).read_text())
        return f"process {int(said['pid'])} ({str(said['command'])[:100]})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


class Tenants:
    """A random salt for each tenant: equal prefixes of two tenants have nothing in common."""

    def __init__(self, root: Path | None, files: Files, writing: bool) -> None:
        self._root = root
        self._files = files
        self._writing = writing
        self._salts: dict[str, bytes] = {}
        if root is not None:
            self._salts = _read(root / TENANTS)
        self.salt(DEFAULT_TENANT)

    def salts(self) -> list[bytes]:
        return list(self._salts.values())

    def salt(self, tenant: str) -> bytes:
        """Of an unknown tenant: made and, where that is allowed, kept."""
        if tenant not in self._salts:
            self._salts[tenant] = secrets.token_bytes(16)
            if self._root is not None and self._writing:
                said = {name: salt.hex() for name, salt in self._salts.items()}
                replace(self._files, self._root / TENANTS, [sealed(said)])
                self._files.sync_directory(self._root)
        return self._salts[tenant]


def sealed(said: object) -> bytes:
    """JSON with a checksum."""
    return json.dumps({"checksum": _checksum(said), "said": said}, indent=1).encode()


def unsealed(path: Path) -> Any:
    """What `sealed` wrote. Raises StoreError, FileNotFoundError."""
    try:
        file = json.loads(path.read_text())
        if file["checksum"] != _checksum(file["said"]):
            raise StoreError(f"{path}: checksum")
        return file["said"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{path}: can't be read: {error!r}") from None


def _checksum(said: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())


def _read(path: Path) -> dict[str, bytes]:
    try:
        return {str(name): bytes.fromhex(salt) for name, salt in unsealed(path).items()}
    except FileNotFoundError:
        return {}
    except (StoreError, ValueError, TypeError, AttributeError) as error:
        # Agents carry the salt of their own blocks, so they stay warm; only what they share with others is lost.
        _log.error("%s; tenants get new salts", error)
        return {}
