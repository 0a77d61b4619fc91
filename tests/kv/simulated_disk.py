"""A disk that loses power: what was done to files is recorded, then directories are built that a crash could have left.

The disk promises as little as a file system may. What is in a file is safe once the file was synced: until then it may
be empty, cut off or garbage. A name in a directory (made, renamed or removed) is safe once that directory was synced:
until then each change may be there or not, whatever became of the others. A rename is there as a whole or not at all.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from everwarm.kv.files import Files


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory, where the system has such: thousands of stores are made there."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as path:
        yield Path(path)


class Killed(BaseException):
    """The process ends here: nothing after this reaches the disk."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One system call. Paths are relative to where the recording began."""

    kind: str  # create, write, sync, close, rename, unlink, make_directory, sync_directory
    path: Path = Path()
    new: Path = Path()
    inode: int = 0
    data: bytes = b""


class UnsyncedFiles(Files):
    """For stores whose durability is not looked at: a sync costs milliseconds."""

    def sync(self, descriptor: int) -> None:
        """Nothing."""

    def sync_directory(self, path: Path) -> None:
        os.stat(path)  # it must be there


class RecordedFiles(UnsyncedFiles):
    """Does what it is told and remembers it. Marks of the test's own stand between the operations."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.log: list[Operation | object] = []
        self.left: int | None = None  # operations until the process is killed
        self._inodes: dict[int, int] = {}
        self._count = 0
        self._lock = threading.Lock()

    def mark(self, what: object) -> None:
        with self._lock:
            self.log.append(what)

    def create(self, path: Path) -> int:
        with self._recording("create", path, inode=self._count + 1):
            descriptor = super().create(path)
            self._count += 1
            self._inodes[descriptor] = self._count
            return descriptor

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        data = b"".join(parts)
        with self._recording("write", inode=self._inodes[descriptor], data=data):
            assert super().write(descriptor, parts) == len(data)
            return len(data)

    def sync(self, descriptor: int) -> None:
        with self._recording("sync", inode=self._inodes[descriptor]):
            super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        self._inodes.pop(descriptor)
        super().close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        with self._recording("rename", old, new):
            super().rename(old, new)

    def unlink(self, path: Path) -> None:
        with self._recording("unlink", path):
            super().unlink(path)

    def make_directory(self, path: Path) -> None:
        with self._recording("make_directory", path):
            super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        with self._recording("sync_directory", path):
            super().sync_directory(path)

    @contextmanager
    def _recording(
        self, kind: str, path: Path | None = None, new: Path | None = None, inode: int = 0, data: bytes = b""
    ) -> Iterator[None]:
        """The operation is recorded once it has been done, without an error."""
        with self._lock:
            if self.left == 0:
                raise Killed
            yield
            if self.left is not None:
                self.left -= 1
            paths = [Path() if path is None else path.relative_to(self.base) for path in (path, new)]
            self.log.append(Operation(kind, *paths, inode=inode, data=data))


Tree = dict[Path, bytes | None]  # what lies where; None: a directory
Namespace = dict[Path, int | None]


@dataclass
class SimulatedDisk:
    """What is safe on the disk, and what is on its way."""

    safe: Namespace = field(default_factory=dict)
    now: Namespace = field(default_factory=dict)  # what a process sees
    pending: list[tuple[Operation, int | None]] = field(default_factory=list)  # changes of names, and which file
    written: dict[int, bytes] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)

    def do(self, operation: Operation) -> None:
        """The next operation of the recording."""
        match operation.kind:
            case "write":
                self.written[operation.inode] = self.written.get(operation.inode, b"") + operation.data
            case "sync":
                self.synced[operation.inode] = self.written.get(operation.inode, b"")
            case "sync_directory":
                waiting, self.pending = self.pending, []
                for change, inode in waiting:
                    if change.path.parent == operation.path:
                        _rename(self.safe, change, inode)
                    else:
                        self.pending.append((change, inode))
            case _:
                inode = self.now.get(operation.path) if operation.kind in ("rename", "unlink") else operation.inode
                if operation.kind == "rename":
                    assert operation.path.parent == operation.new.parent, "syncing two directories is not simulated"
                if operation.kind == "make_directory":
                    inode = None
                if operation.kind != "make_directory" or operation.path not in self.now:
                    _rename(self.now, operation, inode)
                    self.pending.append((operation, inode))

    def crash(self, survives: Callable[[Operation], bool], random: random.Random) -> Tree:
        """What is there when power comes back, if these of the changes that are on their way survive."""
        names = dict(self.safe)
        for change, inode in self.pending:
            if survives(change):
                _rename(names, change, inode)
        tree: Tree = {}
        for path in sorted(names):  # a directory before what is in it
            if path.parent == Path() or path.parent in tree:
                inode = names[path]
                tree[path] = None if inode is None else self._data(inode, random)
        return tree

    def _data(self, inode: int, random: random.Random) -> bytes:
        written = self.written.get(inode, b"")
        if self.synced.get(inode) == written:
            return written
        kept = random.randrange(len(written) + 1)
        return random.choice([b"", written[:kept], bytes(len(written)), random.randbytes(len(written)), written])


def _rename(names: Namespace, change: Operation, inode: int | None) -> None:
    match change.kind:
        case "create" | "make_directory":
            names[change.path] = inode
        case "rename":
            names.pop(change.path, None)
            names[change.new] = inode
        case "unlink":
            names.pop(change.path, None)


def build(tree: Tree, base: Path) -> None:
    """Make files of it."""
    base.mkdir()
    for path, data in tree.items():
        if data is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(data)


class FaultyFiles(UnsyncedFiles):
    """The n-th call of a kind fails after it was armed, and all that follow if the fault lasts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.heal()

    def arm(self, kind: str, nth: int, error: int, *, lasting: bool) -> None:
        """`kind` is that of an operation, or `any`. A write fails when half of it is done."""
        self.calls.clear()
        self._kind, self._nth, self._error, self._lasting = kind, nth, error, lasting

    def heal(self) -> None:
        self.arm("", 0, 0, lasting=False)

    def create(self, path: Path) -> int:
        self._call("create")
        return super().create(path)

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        try:
            self._call("write")
        except OSError as error:
            written = super().write(descriptor, [b"".join(parts)[: sum(map(len, parts)) // 2]])
            if error.errno:
                raise
            return written  # the rest will follow
        return super().write(descriptor, parts)

    def sync(self, descriptor: int) -> None:
        self._call("sync")

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._call("close")

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._call("make_directory")
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._call("sync_directory")
        super().sync_directory(path)

    def _call(self, kind: str) -> None:
        self.calls.update([kind, "any"])
        if self._kind in (kind, "any"):
            count = self.calls[self._kind]
            if count == self._nth or (self._lasting and count > self._nth):
                raise OSError(self._error, os.strerror(self._error))
