"""Who may write in a store's directory, and the salts of its tenants.

One process writes; a lock that dies with it says which. Others read beside it.
"""

import fcntl
import json
import logging
import os
import secrets
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from everwarm.errors import StoreError
from everwarm.kv.container import VersionError
from everwarm.kv.files import Files, replace
from everwarm.opening import open_regular, read_whole

_log = logging.getLogger(__name__)

TENANTS = "tenants.json"
LOCK = "lock"
QUARANTINE = "quarantine"
VERSION = "1"
"""Of `tenants.json` and `model.json`."""
DEFAULT_TENANT = "default"


class StoreLock:
    """Held by the process that writes."""

    def __init__(self, root: Path) -> None:
        """Raises StoreError naming who holds it; OSError where no file can be made."""
        self._descriptor = open_regular(root / LOCK, flags=os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise StoreError(f"{root}: {holder(root)} is writing in it") from None
        said = json.dumps({"pid": os.getpid(), "command": " ".join(sys.argv)[:200]}).encode()
        with suppress(OSError):  # on a full disk nobody can tell who holds it; it is held all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, said, 0)

    def release(self) -> None:
        """Unlock, then close. A forked child shares the lock and would keep it if the descriptor were only closed."""
        try:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            os.close(self._descriptor)


def holder(root: Path) -> str:
    """Who the lock file names."""
    try:
        said = json.loads(read_whole(root / LOCK))
        return f"process {int(said['pid'])} ({str(said['command'])[:100]})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "another process"


class Tenants:
    """A random salt for each tenant: equal prefixes of two tenants have nothing in common. Safe to use from any thread:
    `_lock` guards the salts and the file.
    """

    def __init__(self, root: Path | None, files: Files, writing: bool, counters: Counter[str]) -> None:
        self._root = root if writing else None
        self._files = files
        self._counters = counters
        self._lock = threading.Lock()
        self._salts: dict[str, bytes] = {}
        self._unsaved = False
        try:
            self._salts = {} if root is None else _read(root / TENANTS)
        except VersionError as error:
            _log.warning("%s; it is left alone, tenants get new salts until we end", error)
            self._root = None
        except StoreError as error:
            # Agents carry the salt of their own blocks, so they stay warm; only what they share with others is lost.
            _log.error("%s; tenants get new salts", error)
            counters["corrupt"] += 1
            if self._root is not None:
                with suppress(OSError):
                    files.make_directory(self._root / QUARANTINE)
                    files.rename(self._root / TENANTS, self._root / QUARANTINE / TENANTS)
        self.salt(DEFAULT_TENANT)

    def salts(self) -> list[bytes]:
        with self._lock:
            return list(self._salts.values())

    def salt(self, tenant: str) -> bytes:
        """Of an unknown tenant: made and, where that is allowed, kept. If that fails, the next call tries again."""
        with self._lock:
            if tenant not in self._salts:
                self._salts[tenant] = secrets.token_bytes(16)
                self._unsaved = True
            if self._unsaved and self._root is not None:
                self._save(self._root)
            return self._salts[tenant]

    def _save(self, root: Path) -> None:
        said = {name: salt.hex() for name, salt in self._salts.items()}
        try:
            replace(self._files, root / TENANTS, [sealed(said)])
            self._files.sync_directory(root)
            self._unsaved = False
        except OSError as error:
            self._counters["save_errors"] += 1
            _log.warning("%s was not saved: %s", root / TENANTS, error)


def sealed(said: object) -> bytes:
    """JSON with a version and a checksum."""
    return json.dumps({"version": VERSION, "checksum": _checksum(VERSION, said), "said": said}, indent=1).encode()


def unsealed(path: Path) -> Any:
    """What `sealed` wrote. Raises StoreError, VersionError, FileNotFoundError."""
    try:
        file = json.loads(read_whole(path))
        if file["checksum"] != _checksum(file["version"], file["said"]):
            raise StoreError(f"{path}: checksum")
        if file["version"] != VERSION:
            raise VersionError(f"{path}: version {str(file['version'])[:20]!r}, this everwarm reads {VERSION}")
        return file["said"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{path}: can't be read: {error!r}") from None


def _checksum(version: object, said: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([version, said], sort_keys=True).encode())


def _read(path: Path) -> dict[str, bytes]:
    try:
        return {str(name): bytes.fromhex(salt) for name, salt in unsealed(path).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: {error!r}") from None
