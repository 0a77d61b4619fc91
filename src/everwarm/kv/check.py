"""Every byte of a store, compared with its checksum; repairs; and what can go.

Damage is a file that is not what it should be. Everything else is worth a note only: blocks that a quota has taken,
blocks of turns that a crash has cut short, half-written files, files of another version of the format. A repair moves
damaged files to quarantine, never away, and writes again what is derived. What a history has lost is computed again
when it is needed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.chain import Key, root_key
from everwarm.kv.container import VersionError
from everwarm.kv.disk import FORMAT, MODEL, SUFFIX, VERSION, DirectoryStore, ModelIds
from everwarm.kv.export import block_names
from everwarm.kv.files import Files, replace
from everwarm.kv.inventory import block_key, is_temporary, listed, model_directories, read_ids, read_manifest
from everwarm.kv.layout import Group, Layout
from everwarm.kv.manifest import Manifest, file_name
from everwarm.kv.owner import LOCK, QUARANTINE, TENANTS, sealed, unsealed
from everwarm.opening import read_whole

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One file, and what there is to say about it."""

    path: Path
    what: str


@dataclass(slots=True)
class Report:
    """What a check has seen."""

    files: int = 0
    size_bytes: int = 0
    agents: int = 0
    damaged: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    unreachable: list[Path] = field(default_factory=list)  # sound blocks that no history can lead to
    repaired: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.damaged


def verify(root: Path, progress: Progress | None = None) -> Report:
    """Read everything. Works beside a process that writes."""
    report = Report()
    total = _bytes(root)
    _check_root(root, report)
    for path in model_directories(root):
        _Model(root, path, report, lambda: (progress or _quiet)(report.size_bytes, total)).check()
    return report


def repair(root: Path, progress: Progress | None = None, files: Files | None = None) -> Report:
    """Verify, then mend: damaged files go to quarantine, `model.json` is written again, blocks that nobody can reach
    go. The caller holds the store's lock.
    """
    report = verify(root, progress)
    try:
        _mend(root, report, files or Files())
    except OSError as error:
        raise StoreError(f"{root}: can't be mended: {error}") from None
    return report


def _mend(root: Path, report: Report, files: Files) -> None:
    touched: set[Path] = set()

    def done(path: Path, what: str) -> None:
        report.repaired.append(Finding(path, what))
        touched.add(path.parent)

    for finding in report.damaged:
        path = finding.path
        if path.exists():
            files.make_directory(root / QUARANTINE)
            home = ".".join(path.relative_to(root).parts)
            files.rename(path, root / QUARANTINE / home)
            done(path, "moved to quarantine")
        if path.name == MODEL and (ids := rebuilt_ids(path.parent)) is not None:
            replace(files, path, [sealed(ids.as_json())])
            done(path, "written again")
    for path in report.unreachable:
        with suppress(FileNotFoundError):
            files.unlink(path)
            done(path, "removed: no history leads to it")
    for directory in [*touched, root] if touched else []:
        with suppress(FileNotFoundError):
            files.sync_directory(directory)


def _check_root(root: Path, report: Report) -> None:
    path = root / TENANTS
    try:
        salts = unsealed(path)
        report.files += 1
        if not all(len(bytes.fromhex(salt)) for salt in salts.values()):
            raise StoreError("a tenant without a salt")
    except FileNotFoundError:
        pass
    except VersionError as error:
        report.notes.append(Finding(path, f"{error}; left alone"))
    except (StoreError, ValueError, TypeError, AttributeError) as error:
        # Salts can't be taken from manifests: the one that is found there may be that of an import, which is private.
        report.damaged.append(Finding(path, f"{error}; tenants will get new salts, agents keep what is theirs"))
    for stray, _ in listed(root):
        if is_temporary(stray):
            report.notes.append(Finding(stray, "half-written"))
        elif stray.name not in (TENANTS, LOCK):
            report.notes.append(Finding(stray, "not a file of ours"))


class _Model:
    """Checks one model's directory."""

    def __init__(self, root: Path, path: Path, report: Report, step: Callable[[], None]) -> None:
        self._root, self._path, self._report, self._step = root, path, report, step
        self._ids: ModelIds | None = None
        self._manifests: list[Manifest] = []
        self._parents: dict[Key, Key] = {}  # of sound blocks
        self._other_versions = False

    def check(self) -> None:
        self._check_ids()
        for path, size in self._files("manifests"):
            self._guard(path, size, self._check_manifest)
        for path, size in self._files("blocks"):
            self._guard(path, size, self._check_block)
        self._report.agents += len(self._manifests)
        self._check_chains()

    def _check_ids(self) -> None:
        path = self._path / MODEL
        try:
            self._ids = read_ids(self._path)
            self._report.files += 1
        except VersionError as error:
            self._note(path, f"{error}; left alone")
        except FileNotFoundError:
            self._ids = rebuilt_ids(self._path)
            if self._ids is not None:
                self._damaged(path, "missing; it can be written again from what manifests say")
            elif any(listed(self._path / "manifests")) or any(listed(self._path / "blocks")):
                self._note(path, "missing; it is written again when the model is next loaded")
        except StoreError as error:
            self._ids = rebuilt_ids(self._path)
            later = "" if self._ids else "; it is written again when the model is next loaded"
            self._damaged(path, str(error) + later)

    def _files(self, directory: str) -> Iterator[tuple[Path, int]]:
        for path, size in listed(self._path / directory):
            if is_temporary(path):
                self._note(path, "half-written")
            elif path.suffix != SUFFIX:
                self._note(path, "not a file of ours")
            else:
                yield path, size

    def _guard(self, path: Path, size: int, check: Callable[[Path], None]) -> None:
        try:
            check(path)
        except FileNotFoundError:  # just now: another process writes
            return
        except VersionError as error:
            self._other_versions = True
            self._note(path, f"{error}; left alone")
        except OSError as error:
            self._damaged(path, f"can't be read: {error.strerror or error}")
        except StoreError as error:
            self._damaged(path, str(error))
        self._report.files += 1
        self._report.size_bytes += size
        self._step()

    def _check_manifest(self, path: Path) -> None:
        manifest = read_manifest(path, with_text=True)
        if self._ids is not None:
            said = (manifest.weights_id, manifest.numerics_id, manifest.layout)
            if said != (self._ids.weights_id, self._ids.numerics_id, self._ids.layout.digest):
                raise StoreError("of another model")
            block_names(manifest, self._ids)
        self._manifests.append(manifest)

    def _check_block(self, path: Path) -> None:
        key = block_key(path)
        if key is None:
            raise StoreError("its name is not that of a block")
        if self._ids is None:
            said, _ = container.decode(read_whole(path))
            container.check_version(said, FORMAT, VERSION)
            self._parents[key] = Key(bytes.fromhex(said.get("parent", "")))
            return
        disk = DirectoryStore(self._root, self._ids)
        try:
            name = disk.describe(key)
            disk.get(name, [np.empty(self._ids.layout.block_bytes, np.uint8)])
        except VersionError:
            container.decode(read_whole(path))  # another version keeps the checksum: else a digit is wrong, no more
            raise
        if path.stat().st_size != disk.block_file_bytes:
            raise StoreError(f"{path.stat().st_size:,} bytes, expected {disk.block_file_bytes:,}")
        self._parents[key] = name.parent

    def _check_chains(self) -> None:
        """Which blocks are lost, and which nobody can reach."""
        owned = {key for manifest in self._manifests for key in manifest.blocks}
        for manifest in self._manifests:
            lost = sum(key not in self._parents for key in manifest.blocks)
            if lost:
                path = self._path / "manifests" / file_name(manifest.tenant, manifest.name)
                what = f"agent {manifest.name!r}: {lost} of {len(manifest.blocks)} blocks are not there; its history is"
                self._note(path, what)
        if self._other_versions or self._ids is None:  # someone may own them whom we can't ask
            return
        children: dict[Key, list[Key]] = {}
        for key, parent in self._parents.items():
            children.setdefault(parent, []).append(key)
        reached = self._roots() | owned
        ready = list(reached)
        while ready:
            found = set(children.get(ready.pop(), ())) - reached
            reached |= found
            ready += found
        lonely = [self._path / "blocks" / (key.hex() + SUFFIX) for key in self._parents if key not in reached]
        if lonely:
            size = "1 block" if len(lonely) == 1 else f"{len(lonely)} blocks"
            self._note(self._path / "blocks", f"{size} that no history leads to")
        self._report.unreachable += lonely

    def _roots(self) -> set[Key]:
        assert self._ids is not None
        salts = {bytes.fromhex(manifest.salt) for manifest in self._manifests}
        with suppress(StoreError, FileNotFoundError, ValueError, TypeError, AttributeError):
            salts |= {bytes.fromhex(salt) for salt in unsealed(self._root / TENANTS).values()}
        ids = self._ids
        return {root_key(salt, ids.layout.digest, ids.weights_id, ids.numerics_id) for salt in salts}

    def _damaged(self, path: Path, what: str) -> None:
        self._report.damaged.append(Finding(path, what))

    def _note(self, path: Path, what: str) -> None:
        self._report.notes.append(Finding(path, what))


def rebuilt_ids(path: Path) -> ModelIds | None:
    """What `model.json` must have said, from a manifest and a block. The layout is found by trying: its digest, which
    both carry, tells when it is the right one. None if that does not succeed.
    """
    block = next((said for said in map(_block_header, (path / "blocks").glob("*" + SUFFIX)) if said), None)
    manifests = sorted(_manifests(path), key=lambda manifest: manifest.used)
    if block is None or not manifests:
        return None
    latest, (block_tokens, block_bytes) = manifests[-1], block
    layout = _layout(latest, block_tokens, block_bytes)
    if layout is None:
        return None
    return ModelIds(latest.weights_id, latest.numerics_id, layout, latest.model, latest.kv_type)


def _layout(manifest: Manifest, most_tokens: int, block_bytes: int) -> Layout | None:
    sizes = {most_tokens, *(1 << power for power in range(3, 11) if 1 << power >= most_tokens)}
    for block_tokens in sorted(sizes):
        for layers in (count for count in range(1, 513) if block_bytes % count == 0):
            each = block_bytes // layers // block_tokens // 2  # bytes of a token's keys
            for width in range(8, 2 * each + 1, 8):
                group = Group("full", layers, width, width, manifest.kv_type, block_bytes)
                layout = Layout(block_tokens, (group,))
                if layout.digest == manifest.layout:
                    return layout
    return None


def _block_header(path: Path) -> tuple[int, int] | None:
    """(tokens, bytes of KV) of a block with one group."""
    with suppress(StoreError, OSError, KeyError, ValueError, TypeError):
        said, tensors = container.read_header(path)
        if said["format"] == FORMAT and list(tensors) == ["kv.0"]:
            return len(json.loads(said["tokens"])), tensors["kv.0"].size_bytes
    return None


def _manifests(path: Path) -> Iterator[Manifest]:
    for file, _ in listed(path / "manifests"):
        with suppress(StoreError, OSError):
            yield read_manifest(file)


def _bytes(root: Path) -> int:
    return sum(
        size for path in model_directories(root) for kind in ("manifests", "blocks") for _, size in listed(path / kind)
    )


def _quiet(done: int, total: int) -> None:
    """Nobody wants to know."""
