"""Other models in the same store: the quota is one for all of them."""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv.chain import Key
from everwarm.kv.container import VersionError
from everwarm.kv.disk import SUFFIX, DirectoryStore
from everwarm.kv.files import Files
from everwarm.kv.manifest import Manifest, decode, file_name
from everwarm.kv.owner import QUARANTINE
from everwarm.opening import read_whole


def directory_bytes(root: Path, without: str = "") -> int:
    """Bytes of all files under `root`, but for one directory in it."""
    total = 0
    with suppress(OSError):  # just deleted (another process writes), or not ours
        for entry in os.scandir(root):
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
                elif entry.name != without:
                    total += directory_bytes(Path(entry.path))
    return total


def room_for(root: Path) -> int:
    """Bytes that a store may take at most: what is free on its disk, and what it has already."""
    place = next(path for path in (root, *root.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free + directory_bytes(root)


class OtherModels:
    """Files of other models and in quarantine: how many bytes, and which go first. We hold the store's lock, so nobody
    else changes them: what may go is worked out once, and every block after that costs the same.
    """

    def __init__(self, root: Path, without: str, files: Files) -> None:
        """`without` is the directory of our own model."""
        self._root, self._without, self._files = root, without, files
        self._quarantined: list[Path] = []  # since we began
        self._plan: Iterator[Path] | None = None
        self._planning: threading.Thread | None = None
        self._lock = threading.Lock()
        self.bytes = directory_bytes(root, without)

    def plan_ahead(self) -> None:
        """The quota will soon be full: work out what may go, on a thread of its own."""
        if self._planning is None and self._plan is None and self.bytes:
            self._planning = threading.Thread(target=self._make_plan, name="everwarm-plan", daemon=True)
            self._planning.start()

    def free(self, wanted: int) -> int:
        """Delete blocks of other models until `wanted` bytes are free: quarantine and what no manifest names first,
        then anonymous conversations, then agents, the longest unused first, each from its end. Pinned agents stay.
        Returns the bytes that were freed.
        """
        freed = 0
        while freed < wanted and (path := self._next()) is not None:
            try:
                size = path.stat(follow_symlinks=False).st_size
                self._files.unlink(path)
                freed += size
            except OSError:
                continue
        with self._lock:
            self.bytes -= freed
        return freed

    def quarantined(self, path: Path, size: int) -> None:
        """A file of our own was moved to quarantine: it is the next to go."""
        with self._lock:
            self.bytes += size
            self._quarantined.append(path)

    def _next(self) -> Path | None:
        with self._lock:
            if self._quarantined:
                return self._quarantined.pop(0)
        if self._planning is not None:
            self._planning.join()
        if self._plan is None:
            self._make_plan()
        assert self._plan is not None
        return next(self._plan, None)

    def _make_plan(self) -> None:
        self._plan = victims(self._root, self._without)


def elsewhere(disk: DirectoryStore, tenant: str, name: str) -> Manifest | None:
    """The agent's latest manifest of another model."""
    paths = disk.root.glob(f"*/manifests/{file_name(tenant, name)}")
    found = [manifest for path in paths if path.parent.parent != disk.path and (manifest := _read(path))]
    return max(found, key=lambda manifest: manifest.used, default=None)


def victims(root: Path, without: str = "") -> Iterator[Path]:
    """What may go for the quota's sake, in the order of `OtherModels.free`: worked out now, told one by one."""
    unowned: list[tuple[str, Key]] = []  # a directory of blocks, and one of them
    owned: list[tuple[bool, float, str, Key]] = []
    for entry in _scan(root):
        if entry.name == without or not os.path.isdir(os.path.join(entry.path, "blocks")):
            continue
        blocks = os.path.join(entry.path, "blocks")
        manifests, unsure = _manifests(os.path.join(entry.path, "manifests"))
        owners = Counter(key for manifest in manifests for key in manifest.blocks)
        pinned = {key for manifest in manifests if manifest.pinned for key in manifest.blocks}
        if not unsure:  # else they may be owned by someone whose manifest we can't read
            named = (_key(block.name) for block in _scan(blocks))
            unowned += [(blocks, key) for key in named if key and key not in owners]
        for manifest in sorted(manifests, key=lambda manifest: (not manifest.anonymous, manifest.used)):
            for key in reversed(manifest.blocks):
                owners[key] -= 1
                if owners[key] == 0 and key not in pinned:
                    owned.append((not manifest.anonymous, manifest.used, blocks, key))
    owned.sort(key=lambda item: item[:2])
    quarantine = sorted(_scan(root / QUARANTINE), key=lambda entry: entry.name)
    return chain(
        (Path(entry.path) for entry in quarantine),
        (Path(blocks, key.hex() + SUFFIX) for blocks, key in unowned),
        (Path(blocks, key.hex() + SUFFIX) for _, _, blocks, key in owned),
    )


def _scan(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # not there, or not ours
        return []


def _key(name: str) -> Key | None:
    try:
        return Key(bytes.fromhex(name.removesuffix(SUFFIX))) if name.endswith(SUFFIX) else None
    except ValueError:
        return None


def _manifests(directory: str) -> tuple[list[Manifest], bool]:
    """Those that can be read, and whether there are others of another version of everwarm."""
    found, unsure = [], False
    for entry in _scan(directory):
        if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
            try:
                found.append(decode(read_whole(Path(entry.path)), with_text=False))
            except VersionError:
                unsure = True
            except (OSError, StoreError):
                continue
    return found, unsure


def _read(path: Path) -> Manifest | None:
    try:
        return decode(read_whole(path), with_text=False)
    except (OSError, StoreError):
        return None
