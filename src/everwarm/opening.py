"""Opens files that must be what they seem: regular files, and no links, pipes or devices.

In: a path in a directory that others may write to. Out: a descriptor, or an OSError that says what the path is. Opening
never waits for anyone, and what is checked is what was opened, not what the path has become since.
"""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path | str, *, follow: bool = False, flags: int = 0, mode: int = 0o600) -> int:
    """A descriptor to read with; `flags` may ask for more. `follow`: the path may be a symbolic link, because its owner
    has chosen it.
    """
    wanted = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW) | flags
    try:
        descriptor = os.open(path, wanted, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "is a symbolic link, expected a regular file", str(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a device without hardware
            raise OSError(errno.EINVAL, "is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def create_new(path: Path, mode: int = 0o600) -> int:
    """A descriptor of a file that was not there before, to write and read. FileExistsError if anything is there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def read_whole(path: Path, most: int = 1 << 30) -> bytes:
    """All bytes of a file. OSError if there are more than `most`."""
    with open(open_regular(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data
