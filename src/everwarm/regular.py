"""Reading files that somebody else may have put in place of ours: a link, a pipe, a device.

Every file that is opened here is a regular one, is not reached through a symbolic link, and opening it never waits.
"""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a regular file. Raises OSError, for anything else too."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path) -> bytes:
    """All of a regular file. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read()
