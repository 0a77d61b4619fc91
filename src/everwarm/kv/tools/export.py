"""An agent as one file, for another machine with the same weights and the same arithmetic.

The file is a safetensors file (`kv.container`) with the history (`tokens`, `text`) and its KV (`kv.0`: a row per block,
in order; `window.0`: the same for the last blocks of layers with a window). No salt and no block names leave the
machine: where the file arrives, names are made anew.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path

import numpy as np
import xxhash

from everwarm.errors import StoreError
from everwarm.kernels.backend import FULL
from everwarm.kv import container
from everwarm.kv.chain import child_key, token_bytes
from everwarm.kv.container import Array
from everwarm.kv.disk.files import TEMPORARY, Files
from everwarm.kv.ids import ModelIds
from everwarm.kv.manifest import Manifest, pack_text
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.exported import (
    FORMAT,
    VERSION,
    Moved,
    Progress,
    block_numbers,
    block_tensors,
    parts_of,
    quiet,
)
from everwarm.kv.warm.blocks import BlockName
from everwarm.kv.warm.blockstore import ObjectId


def export_agent(
    store: AgentStore,
    name: str,
    path: Path,
    tenant: str = "",
    progress: Progress | None = None,
    files: Files | None = None,
) -> Moved:
    """Write an agent's last history to a new file. Works beside a process that writes in the store: a block that it
    takes away meanwhile is a lost one, and the export ends before it.
    """
    if os.path.lexists(path):
        raise StoreError(f"{path}: exists already; remove it or take another name")
    agent = store.find(name, tenant)
    lost: set[ObjectId] = set()
    while True:
        manifest = store.histories.manifest(agent)
        names = block_names(manifest, store.ids)
        covered = _covered(store, manifest, names, lost)
        usable = -(-covered // store.index.block_tokens)
        try:
            size = _write(store, manifest, names, covered, path, progress or quiet, files or Files())
        except _LostError as error:  # perhaps the end of a history that has just grown: look again
            lost.add(error.object)
            continue
        except OSError as error:
            raise StoreError(f"{path}: can't be written: {error.strerror or error}") from None
        return Moved(
            manifest.name, manifest.tenant, manifest.model, str(path), len(manifest.tokens), covered, usable,
            len(names) - usable, size,
        )  # fmt: skip


def block_names(manifest: Manifest, ids: ModelIds) -> list[BlockName]:
    """The blocks of a history. Raises StoreError if the manifest gives them other names."""
    size = 4 * ids.layout.block_tokens
    tokens = token_bytes(manifest.tokens)[: 4 * manifest.kv_tokens]
    parent = ids.root(bytes.fromhex(manifest.salt))
    names = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        names.append(BlockName(child_key(parent, part), parent, part))
        parent = names[-1].key
    if [name.key for name in names] != list(manifest.blocks):
        raise StoreError(f"agent {manifest.name!r}: its blocks have other names than its tokens")
    return names


def _covered(store: AgentStore, manifest: Manifest, names: list[BlockName], lost: set[ObjectId]) -> int:
    """How many tokens of a history can be exported with all that it takes to go on behind them."""
    size, index = store.index.block_tokens, store.index
    usable = next((number for number, name in enumerate(names) if name.id in lost), len(names))
    covered = min(manifest.kv_tokens, usable * size)

    def is_there(kind: str, name: BlockName) -> bool:
        node = index.find(name.key)
        found = None if node is None else node.beside.get(kind)
        return found is not None and found.available and replace(name, kind=kind).id not in lost

    def can_go_on() -> bool:
        apart = [kind for kind in store.ids.layout.kinds if kind != FULL]
        return all(is_there(kind, names[n]) for kind in apart for n in block_numbers(store.ids, kind, covered))

    while covered and not can_go_on():
        covered = (-(-covered // size) - 1) * size
    return covered


class _LostError(Exception):
    """A block can't be had."""

    def __init__(self, which: ObjectId) -> None:
        self.object = which


def _write(
    store: AgentStore,
    manifest: Manifest,
    names: list[BlockName],
    covered: int,
    path: Path,
    progress: Progress,
    files: Files,
) -> int:
    tokens, text = np.asarray(manifest.tokens, "<u4"), pack_text(manifest.runs, manifest.messages)
    tensors = [container.Tensor("tokens", "U32", tokens.shape), container.Tensor("text", "U8", text.shape)]
    wanted = {
        kind: [replace(names[n], kind=kind) for n in block_numbers(store.ids, kind, covered)]
        for kind in store.ids.layout.kinds
    }
    for kind, of_kind in wanted.items():
        tensors += block_tensors(store.ids, kind, len(of_kind))
    said = {
        "format": FORMAT,
        "version": VERSION,
        "everwarm": installed("everwarm"),
        "name": json.dumps(manifest.name),
        "model": manifest.model,
        "kv_type": manifest.kv_type,
        "weights_id": manifest.weights_id,
        "numerics_id": manifest.numerics_id,
        "layout": manifest.layout,
        "block_tokens": str(store.index.block_tokens),
        "kv_tokens": str(covered),
    }
    blank = container.blank_header(said, tensors)
    total = len(blank) + sum(tensor.size_bytes for tensor in tensors)
    data = partial(_data, store, wanted, [tokens, text])
    # The checksum comes first in the file, so everything is read twice: files are written front to back.
    digest, done = xxhash.xxh3_128(blank), len(blank)
    for part in data():
        digest.update(part.data)
        done += part.nbytes
        progress(done // 2, total)
    header = container.with_checksum(blank, digest.hexdigest().encode())
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        descriptor = files.create(temporary)
        try:
            again, done = xxhash.xxh3_128(blank), len(header)
            _write_all(files, descriptor, memoryview(header))
            for part in data():
                again.update(part.data)
                _write_all(files, descriptor, part.data.cast("B"))
                done += part.nbytes
                progress((total + done) // 2, total)
            if again.digest() != digest.digest():
                raise StoreError(f"{path}: what it is made of has changed meanwhile; export it again")
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, path)
        try:
            files.sync_directory(path.parent)
        except OSError as error:  # who is told that it failed must not find a file that may vanish
            _take_back(files, path, error)
            raise
    except BaseException:
        with suppress(OSError):
            files.unlink(temporary)
        raise
    return total


def _take_back(files: Files, path: Path, why: OSError) -> None:
    try:
        files.unlink(path)
    except OSError as error:
        raise StoreError(
            f"{path}: may vanish when the machine loses power ({why.strerror or why}), and can't be removed "
            f"({error.strerror or error}); remove it and export again"
        ) from None


def _data(store: AgentStore, names: Mapping[str, list[BlockName]], first: list[Array]) -> Iterator[Array]:
    """What follows the header, in order. Each block is valid until the next one is asked for."""
    yield from first
    for kind, of_kind in names.items():
        block = np.empty(store.ids.layout.block_bytes(kind), np.uint8)
        for part in parts_of(block, store.ids, kind):  # one group after the other; most models have one
            for name in of_kind:
                _read(store, name, block)
                yield part


def _write_all(files: Files, descriptor: int, data: memoryview) -> None:
    while data:
        count = files.write(descriptor, [data])
        if count == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        data = data[count:]


def _read(store: AgentStore, name: BlockName, buffer: Array) -> None:
    node = store.index.find(name.key)
    if node is not None and name.kind != FULL:
        node = node.beside.get(name.kind)
    block = None if node is None else store.index.hold(node)
    if node is not None and block is not None:
        np.copyto(buffer, store.index.pool_of(node).read(block))
        store.index.drop(node, block)
        return
    try:
        if store.warm is None:
            raise _LostError(name.id)
        store.warm.blocks.get(name, [buffer])
    except (OSError, StoreError):
        raise _LostError(name.id) from None
