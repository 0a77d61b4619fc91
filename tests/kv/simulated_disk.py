"""A disk that loses power: what was done to files is recorded, then directories are built that a crash could have left.

The disk promises as little as a file system may. What is in a file is safe once the file was synced: until then it may
be empty, cut off or garbage. A name in a directory (made, renamed or removed) is safe once that directory was synced:
until then each change may be there or not, whatever became of the others. A rename inside a directory is there as a
whole or not at all. A rename from one directory to another is two changes: each is safe when its own directory was
synced, so after a crash the file may have both names, either, or none.

A sync that fails drops what it should have made safe from the queue of the disk, and a later sync that succeeds does
not bring it back. New names stay in doubt until their name is changed again and that change is synced; a removal only
waits for the next sync that succeeds. A process that starts later can't know of the failure, so `reopened` ends the
doubt: its own first sync counts.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from everwarm.kv.disk.files import Files


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

    # create, write, sync, rename, unlink, make_directory, sync_directory; link is one half of a rename between two
    # directories; failed_sync and failed_sync_directory; damage changes bytes behind the store's back; reopened.
    kind: str
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
        with self._lock:
            self._count += 1
            inode = self._count
        with self._recording("create", path, inode=inode):
            descriptor = super().create(path)
            self._inodes[descriptor] = inode
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


@dataclass(frozen=True, slots=True)
class Change:
    """A change of names that is not safe yet."""

    operation: Operation
    inode: int | None
    in_doubt: bool = False

    @property
    def names(self) -> set[Path]:
        return {self.operation.path, self.operation.new} if self.operation.kind == "rename" else {self.operation.path}


@dataclass
class SimulatedDisk:
    """What is safe on the disk, and what is on its way."""

    safe: Namespace = field(default_factory=dict)
    now: Namespace = field(default_factory=dict)  # what a process sees
    pending: list[Change] = field(default_factory=list)
    written: dict[int, bytes] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    spoilt: set[int] = field(default_factory=set)  # files whose sync has failed

    @staticmethod
    def of(tree: Tree) -> "SimulatedDisk":
        """A disk on which all of this is safe. Its inodes are below those of a recording."""
        disk = SimulatedDisk()
        for inode, (path, data) in enumerate(tree.items(), start=-len(tree)):
            disk.safe[path] = disk.now[path] = None if data is None else inode
            disk.written[inode] = disk.synced[inode] = data or b""
        return disk

    def copy(self) -> "SimulatedDisk":
        return SimulatedDisk(
            dict(self.safe), dict(self.now), list(self.pending), dict(self.written), dict(self.synced), set(self.spoilt)
        )

    def do(self, operation: Operation) -> None:
        """The next operation of the recording."""
        match operation.kind:
            case "write":
                self.written[operation.inode] = self.written.get(operation.inode, b"") + operation.data
            case "sync" if operation.inode not in self.spoilt:
                self.synced[operation.inode] = self.written.get(operation.inode, b"")
            case "sync" | "failed_sync":
                self.spoilt.add(operation.inode)
            case "sync_directory":
                self._sync_directory(operation.path)
            case "failed_sync_directory":
                self.pending = [
                    replace(change, in_doubt=change.operation.kind != "unlink")
                    if change.operation.path.parent == operation.path
                    else change
                    for change in self.pending
                ]
            case "reopened":
                self.pending = [replace(change, in_doubt=False) for change in self.pending]
            case "damage":
                inode = self.now[operation.path]
                assert inode is not None
                self.written[inode] = self.synced[inode] = operation.data
            case "make_directory" if operation.path in self.now:
                pass
            case _:
                self._change_names(operation)

    def _sync_directory(self, path: Path) -> None:
        waiting, self.pending = self.pending, []
        for change in waiting:
            if change.operation.path.parent == path and not change.in_doubt:
                _rename(self.safe, change.operation, change.inode)
                self.pending = [
                    earlier for earlier in self.pending if not (earlier.in_doubt and earlier.names & change.names)
                ]
            else:
                self.pending.append(change)

    def _change_names(self, operation: Operation) -> None:
        inode: int | None = operation.inode
        if operation.kind in ("rename", "unlink"):
            inode = self.now.get(operation.path)
        elif operation.kind == "make_directory":
            inode = None
        _rename(self.now, operation, inode)
        if operation.kind == "rename" and operation.path.parent != operation.new.parent:
            self.pending.append(Change(Operation("link", operation.new), inode))
            self.pending.append(Change(Operation("unlink", operation.path), inode))
        else:
            self.pending.append(Change(operation, inode))

    def crash(self, survives: Callable[[Operation], bool], random: random.Random) -> Tree:
        """What is there when power comes back, if these of the changes that are on their way survive."""
        names = dict(self.safe)
        for change in self.pending:
            if survives(change.operation):
                _rename(names, change.operation, change.inode)
        return _tree(names, lambda inode: self._data(inode, random))

    def as_seen(self) -> Tree:
        """What the next process sees if this one is killed and the machine goes on."""
        return _tree(self.now, lambda inode: self.written.get(inode, b""))

    def _data(self, inode: int, random: random.Random) -> bytes:
        written = self.written.get(inode, b"")
        if self.synced.get(inode) == written:
            return written
        kept = random.randrange(len(written) + 1)
        return random.choice([b"", written[:kept], bytes(len(written)), random.randbytes(len(written)), written])


def _rename(names: Namespace, change: Operation, inode: int | None) -> None:
    match change.kind:
        case "create" | "make_directory" | "link":
            names[change.path] = inode
        case "rename":
            names.pop(change.path, None)
            names[change.new] = inode
        case "unlink":
            names.pop(change.path, None)


def _tree(names: Namespace, data: Callable[[int], bytes]) -> Tree:
    tree: Tree = {}
    for path in sorted(names):  # a directory before what is in it
        if path.parent == Path() or path.parent in tree:
            inode = names[path]
            tree[path] = None if inode is None else data(inode)
    return tree


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
        """`kind` is that of an operation, several of them with + between, or `any`. A write fails when half of it is
        done.
        """
        self.calls.clear()
        self._kinds, self._nth, self._error, self._lasting = kind.split("+"), nth, error, lasting

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
        super().sync(descriptor)

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
        if kind in self._kinds or "any" in self._kinds:
            count = sum(self.calls[one] for one in self._kinds)
            if count == self._nth or (self._lasting and count > self._nth):
                raise OSError(self._error, os.strerror(self._error))
