"""Who may write in a store's directory: one process. Its lock file names it, and the lock dies with it. Others read."""

import fcntl
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.opening import open_regular, read_whole

LOCK = "lock"


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
