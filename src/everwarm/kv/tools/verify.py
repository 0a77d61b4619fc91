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
from typing import Any

import numpy as np

from everwarm.errors import StoreError
from everwarm.kernels.backend import FULL
from everwarm.kv import container
from everwarm.kv.chain import Key
from everwarm.kv.container import VersionError
from everwarm.kv.ids import ModelIds
from everwarm.kv.layout import Group, Layout
from everwarm.kv.manifest import Manifest, file_name
from everwarm.kv.remote.store import OWN
from everwarm.kv.tools.export import block_names
from everwarm.kv.tools.inventory import read_ids, read_manifest
from everwarm.kv.warm.blocks import FORMAT, MODEL, VERSION, ModelBlocks
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, SUFFIX, Blob, BlockStore, ObjectId, read_header
from everwarm.kv.warm.sealed import sealed, unsealed
from everwarm.kv.warm.tenants import TENANTS, read_salts

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One file, and what there is to say about it."""

    path: str  # for people
    what: str
    blob: Blob


@dataclass(slots=True)
class Report:
    """What a check has seen."""

    files: int = 0
    size_bytes: int = 0
    agents: int = 0
    damaged: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    unreachable: list[Blob] = field(default_factory=list)  # sound blocks that no history can lead to
    repaired: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.damaged


def verify(store: BlockStore, progress: Progress | None = None) -> Report:
    """Read everything. Works beside a process that writes."""
    report = Report()
    models = store.models()
    total = sum(size for model in models for area in (MANIFESTS, BLOCKS) for _, size in store.list(model, area))
    _check_root(store, report)
    for model in models:
        _Model(store, model, report, lambda: (progress or _quiet)(report.size_bytes, total)).check()
    return report


def repair(store: BlockStore, progress: Progress | None = None) -> Report:
    """Verify, then mend: damaged files go to quarantine, `model.json` is written again, blocks that nobody can reach
    go. The caller holds the store's lock.
    """
    report = verify(store, progress)
    try:
        _mend(store, report)
    except OSError as error:
        raise StoreError(f"{store.where()}: can't be mended: {error}") from None
    return report


def _mend(store: BlockStore, report: Report) -> None:
    touched: set[tuple[str, str]] = set()

    def done(blob: Blob, what: str) -> None:
        report.repaired.append(Finding(store.where(blob), what, blob))
        touched.add((blob.model, blob.area))

    for finding in report.damaged:
        blob = finding.blob
        moved, _ = store.set_aside(blob)
        if moved is not None:
            done(blob, "moved to quarantine")
        elif _is_there(store, blob):
            raise OSError(f"{store.where(blob)} can't be moved to quarantine")
        if blob.name == MODEL and (ids := rebuilt_ids(store, blob.model)) is not None:
            store.put(blob, [sealed(ids.as_json())])
            done(blob, "written again")
    for blob in () if store.many_writers else report.unreachable:  # else the collector knows better
        if _is_there(store, blob):
            store.delete(blob)
            done(blob, "removed: no history leads to it")
    for model, area in [*touched, ("", "")] if touched else []:
        with suppress(FileNotFoundError):
            store.sync(model, area)


def _is_there(store: BlockStore, blob: Blob) -> bool:
    try:
        store.size(blob)
    except FileNotFoundError:
        return False
    return True


def _check_root(store: BlockStore, report: Report) -> None:
    try:
        salts = unsealed(store, TENANTS)
        report.files += 1
        if not all(len(bytes.fromhex(salt)) for salt in salts.values()):
            raise StoreError("a tenant without a salt")
    except FileNotFoundError:
        pass
    except VersionError as error:
        report.notes.append(Finding(store.where(TENANTS), f"{error}; left alone", TENANTS))
    except (StoreError, ValueError, TypeError, AttributeError) as error:
        # Salts can't be taken from manifests: the one that is found there may be that of an import, which is private.
        what = f"{error}; tenants will get new salts, agents keep what is theirs"
        report.damaged.append(Finding(store.where(TENANTS), what, TENANTS))
    for blob, _ in store.list("", ""):
        if store.half_written(blob):
            report.notes.append(Finding(store.where(blob), "half-written", blob))
        elif blob != TENANTS and blob.name != "lock" and not (store.many_writers and blob.name in OWN):
            report.notes.append(Finding(store.where(blob), "not a file of ours", blob))


class _Model:
    """Checks one model's part of a store."""

    def __init__(self, store: BlockStore, model: str, report: Report, step: Callable[[], None]) -> None:
        self._store, self._model, self._report, self._step = store, model, report, step
        self._ids: ModelIds | None = None
        self._manifests: list[Manifest] = []
        self._parents: dict[Key, Key] = {}  # of sound blocks
        self._beside: list[ObjectId] = []  # sound objects that lie beside blocks
        self._unsure = False  # someone may own blocks whom we can't ask

    def check(self) -> None:
        self._check_ids()
        for blob, size in self._files(MANIFESTS):
            self._guard(blob, size, self._check_manifest)
        for blob, size in self._files(BLOCKS):
            self._guard(blob, size, self._check_block)
        self._report.agents += len(self._manifests)
        self._check_chains()

    def _check_ids(self) -> None:
        blob = Blob(self._model, "", MODEL)
        try:
            self._ids = read_ids(self._store, self._model)
            self._report.files += 1
        except VersionError as error:
            self._note(blob, f"{error}; left alone")
        except FileNotFoundError:
            self._ids = rebuilt_ids(self._store, self._model)
            if self._ids is not None:
                self._damaged(blob, "missing; it can be written again from what manifests say")
            elif any(True for area in (MANIFESTS, BLOCKS) for _ in self._store.list(self._model, area)):
                self._note(blob, "missing; it is written again when the model is next loaded")
        except StoreError as error:
            self._ids = rebuilt_ids(self._store, self._model)
            later = "" if self._ids else "; it is written again when the model is next loaded"
            self._damaged(blob, str(error) + later)

    def _files(self, area: str) -> Iterator[tuple[Blob, int]]:
        for blob, size in self._store.list(self._model, area):
            if self._store.half_written(blob):
                self._note(blob, "half-written")
            elif not blob.name.endswith(SUFFIX):
                self._note(blob, "not a file of ours")
            else:
                yield blob, size

    def _guard(self, blob: Blob, size: int, check: Callable[[Blob], None]) -> None:
        try:
            check(blob)
        except FileNotFoundError:  # just now: another process writes
            return
        except VersionError as error:
            self._unsure = True
            self._note(blob, f"{error}; left alone")
        except OSError as error:  # it may be whole: whoever can't read it must not move it away
            self._unsure = True
            self._note(blob, f"can't be read: {error.strerror or error}; left alone")
        except StoreError as error:
            self._damaged(blob, str(error))
        self._report.files += 1
        self._report.size_bytes += size
        self._step()

    def _check_manifest(self, blob: Blob) -> None:
        manifest = read_manifest(self._store, blob, with_text=True)
        if self._ids is not None:
            said = (manifest.weights_id, manifest.numerics_id, manifest.layout)
            if said != (self._ids.weights_id, self._ids.numerics_id, self._ids.layout.digest):
                raise StoreError("of another model")
            try:
                block_names(manifest, self._ids)
            except StoreError as error:
                self._note(blob, f"{error}; its tokens and text are kept, what does not fit is computed again")
        self._manifests.append(manifest)

    def _check_block(self, blob: Blob) -> None:
        found = ObjectId.of(blob)
        if found is None:
            raise StoreError("its name is not that of a block")
        if self._ids is None:
            said, _ = container.decode(self._store.read(blob))
            container.check_version(said, FORMAT, VERSION)
            self._note_sound(found, Key(bytes.fromhex(said.get("parent", ""))))
            return
        blocks = ModelBlocks(self._store, self._ids)
        try:
            name = blocks.describe(found)
            blocks.get(name, [np.empty(self._ids.layout.block_bytes(found.kind), np.uint8)])
        except VersionError:
            # Another version keeps the checksum: else a digit is wrong, no more.
            container.decode(self._store.read(blob))
            raise
        if (size := self._store.size(blob)) != (expected := blocks.object_bytes(found.kind)):
            raise StoreError(f"{size:,} bytes, expected {expected:,}")
        self._note_sound(found, name.parent)

    def _note_sound(self, found: ObjectId, parent: Key) -> None:
        if found.kind == FULL:
            self._parents[found.key] = parent
        else:
            self._beside.append(found)

    def _check_chains(self) -> None:
        """Which blocks are lost, and which nobody can reach."""
        owned = {key for manifest in self._manifests for key in manifest.keys}
        for manifest in self._manifests:
            lost = sum(key not in self._parents for key in manifest.blocks)
            if lost:
                blob = Blob(self._model, MANIFESTS, file_name(manifest.tenant, manifest.name))
                what = f"agent {manifest.name!r}: {lost} of {len(manifest.blocks)} blocks are not there; its history is"
                self._note(blob, what)
        if self._unsure or self._ids is None:  # someone may own them whom we can't ask
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
        lonely = [ObjectId(key).blob(self._model) for key in self._parents if key not in reached]
        lonely += [found.blob(self._model) for found in self._beside if found.key not in reached]
        if lonely:
            size = "1 block" if len(lonely) == 1 else f"{len(lonely)} blocks"
            self._note(Blob(self._model, BLOCKS, ""), f"{size} that no history leads to")
        self._report.unreachable += lonely

    def _roots(self) -> set[Key]:
        assert self._ids is not None
        salts = {bytes.fromhex(manifest.salt) for manifest in self._manifests}
        with suppress(StoreError):
            salts |= set(read_salts(self._store).values())
        return {self._ids.root(salt) for salt in salts}

    def _damaged(self, blob: Blob, what: str) -> None:
        self._report.damaged.append(Finding(self._store.where(blob), what, blob))

    def _note(self, blob: Blob, what: str) -> None:
        self._report.notes.append(Finding(self._store.where(blob), what, blob))


def rebuilt_ids(store: BlockStore, model: str) -> ModelIds | None:
    """What `model.json` must have said, from a manifest and a block. The layout is found by trying: its digest, which
    both carry, tells when it is the right one. None if that does not succeed.
    """
    headers = (_block_header(store, blob) for blob, _ in store.list(model, BLOCKS) if blob.is_data)
    block = next((header for header in headers if header is not None), None)
    manifests = sorted(_manifests(store, model), key=lambda manifest: manifest.used)
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


def _block_header(store: BlockStore, blob: Blob) -> tuple[int, int] | None:
    """(tokens, bytes of KV) of a block with one group."""
    with suppress(StoreError, OSError, KeyError, ValueError, TypeError):
        said, tensors = read_header(store, blob)
        if said["format"] == FORMAT and list(tensors) == ["kv.0"]:
            return len(json.loads(said["tokens"])), tensors["kv.0"].size_bytes
    return None


def _manifests(store: BlockStore, model: str) -> Iterator[Manifest]:
    for blob, _ in store.list(model, MANIFESTS):
        with suppress(StoreError, OSError):
            yield read_manifest(store, blob)


def _quiet(done: int, total: int) -> None:
    """Nobody wants to know."""


def as_json(report: Report) -> dict[str, Any]:
    def listed(findings: list[Finding]) -> list[dict[str, str]]:
        return [{"path": finding.path, "what": finding.what} for finding in findings]

    return {
        "files": report.files,
        "size_bytes": report.size_bytes,
        "agents": report.agents,
        "damaged": listed(report.damaged),
        "notes": listed(report.notes),
        "unreachable": len(report.unreachable),
        "repaired": listed(report.repaired),
        "clean": report.clean,
    }
