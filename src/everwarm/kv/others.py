"""Other models in the same store: the quota is one for all of them."""

import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv.chain import Key
from everwarm.kv.container import VersionError, check_version, read_header
from everwarm.kv.disk import SUFFIX, DirectoryStore
from everwarm.kv.files import Files
from everwarm.kv.manifest import FORMAT, VERSION, Manifest, decode, file_name


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


def shrink_others(root: Path, without: str, excess: int, files: Files) -> int:
    """Delete blocks of other models until `excess` bytes are free: quarantine and what no manifest names first, then
    anonymous conversations, then agents, the longest unused first, each from its end. Pinned agents stay. Returns the
    bytes that were freed.
    """
    freed = 0
    for path in victims(root, without):
        if freed >= excess:
            break
        try:
            size = path.stat().st_size
            files.unlink(path)
            freed += size
        except OSError:
            continue
    return freed


def elsewhere(disk: DirectoryStore, tenant: str, name: str) -> Manifest | None:
    """The agent's latest manifest of another model."""
    paths = disk.root.glob(f"*/manifests/{file_name(tenant, name)}")
    found = [manifest for path in paths if path.parent.parent != disk.path and (manifest := _read(path))]
    return max(found, key=lambda manifest: manifest.used, default=None)


def victims(root: Path, without: str = "") -> list[Path]:
    """What may go for the quota's sake, in the order of `shrink_others`."""
    unowned: list[Path] = sorted((root / "quarantine").glob("*")) if (root / "quarantine").is_dir() else []
    owned: list[tuple[bool, float, Path]] = []
    for directory in root.iterdir():
        blocks = directory / "blocks"
        if directory.name == without or not blocks.is_dir():
            continue
        manifests = [found for path in (directory / "manifests").glob("*" + SUFFIX) if (found := _read(path))]
        owners = Counter(key for manifest in manifests for key in manifest.blocks)
        pinned = {key for manifest in manifests if manifest.pinned for key in manifest.blocks}
        named = set(map(_path_key, blocks.glob("*" + SUFFIX)))
        if any(map(_of_other_version, (directory / "manifests").glob("*" + SUFFIX))):
            named = set()  # they may be owned by someone whose manifest we can't read
        unowned += [blocks / (key.hex() + SUFFIX) for key in named if key and key not in owners]
        for manifest in sorted(manifests, key=lambda manifest: (not manifest.anonymous, manifest.used)):
            for key in reversed(manifest.blocks):
                owners[key] -= 1
                if owners[key] == 0 and key not in pinned:
                    owned.append((not manifest.anonymous, manifest.used, blocks / (key.hex() + SUFFIX)))
    return unowned + [path for _, _, path in sorted(owned, key=lambda item: item[:2])]


def _path_key(path: Path) -> Key | None:
    try:
        return Key(bytes.fromhex(path.name.removesuffix(SUFFIX)))
    except ValueError:
        return None


def _of_other_version(path: Path) -> bool:
    try:
        check_version(read_header(path)[0], FORMAT, VERSION)
    except VersionError:
        return True
    except (OSError, StoreError):
        return False
    return False


def _read(path: Path) -> Manifest | None:
    try:
        return decode(path.read_bytes(), with_text=False)
    except (OSError, StoreError):
        return None
