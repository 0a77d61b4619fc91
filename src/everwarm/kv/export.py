"""An agent in one file, for another machine with the same weights and the same arithmetic.

Out: a safetensors file (`kv.container`) with the history (`tokens`, `text`) and its KV (`kv.0`: a row per block, in
order). No salt and no block names leave the machine: where the file arrives, names are made anew.

In: the same, and nothing of it is believed. The header must describe exactly this model's blocks; every byte is read
and compared with the checksum, and the tokens and messages are checked (`kv.believable`) before the first block is
written; blocks hang from a random salt of their own, so that
the imported agent and its forks find them and nobody else. What no checksum says is whether the KV is that of the
tokens: only a file that is trusted (`trust`) shares its blocks with the tenant's other agents.
"""

import errno
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xxhash

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.agent import Agent, check_name
from everwarm.kv.believable import check_messages, check_tokens
from everwarm.kv.chain import U32, Key, child_key, root_key, token_bytes
from everwarm.kv.container import Array
from everwarm.kv.disk import BlockName, ModelIds
from everwarm.kv.files import TEMPORARY, Files
from everwarm.kv.manifest import Manifest, merged, pack_text, text_digests, unpack_text
from everwarm.kv.owner import DEFAULT_TENANT
from everwarm.kv.tree import Node
from everwarm.opening import open_regular
from everwarm.types import Run

if TYPE_CHECKING:
    from everwarm.kv.store import AgentStore

FORMAT = "everwarm-export"
VERSION = "1"
MOST_TOKENS = 1 << 24
_CHUNK = 1 << 20

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What an export or an import has carried."""

    agent: str
    tenant: str
    model: str
    path: str
    tokens: int
    kv_tokens: int  # of these have blocks; the others are computed when they are needed
    blocks: int
    lost_blocks: int  # that the agent should have and has not
    size_bytes: int  # of the file


# Out ------------------------------------------------------------------------------------------------------------------


def export_agent(
    store: "AgentStore", name: str, path: Path, tenant: str = "", progress: Progress | None = None
) -> Moved:
    """Write an agent's last history to a new file. Works beside a process that writes in the store: a block that it
    takes away meanwhile is a lost one, and the export ends before it.
    """
    if os.path.lexists(path):
        raise StoreError(f"{path}: exists already; remove it or take another name")
    agent = store.find(name, tenant)
    lost: set[Key] = set()
    while True:
        manifest = store.manifest(agent)
        names = block_names(manifest, store.ids)
        usable = next((i for i, block in enumerate(names) if block.key in lost), len(names))
        try:
            size = _write(store, manifest, names[:usable], path, progress or _quiet)
        except _LostError as error:  # perhaps the end of a history that has just grown: look again
            lost.add(error.key)
            continue
        except OSError as error:
            raise StoreError(f"{path}: can't be written: {error.strerror or error}") from None
        covered = min(manifest.kv_tokens, usable * store.pool.block_tokens)
        return Moved(
            manifest.name, manifest.tenant, manifest.model, str(path), len(manifest.tokens), covered, usable,
            len(names) - usable, size,
        )  # fmt: skip


def block_names(manifest: Manifest, ids: ModelIds) -> list[BlockName]:
    """The blocks of a history. Raises StoreError if the manifest gives them other names."""
    size = 4 * ids.layout.block_tokens
    tokens = token_bytes(manifest.tokens)[: 4 * manifest.kv_tokens]
    parent = root_key(bytes.fromhex(manifest.salt), ids.layout.digest, ids.weights_id, ids.numerics_id)
    names = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        names.append(BlockName(child_key(parent, part), parent, part))
        parent = names[-1].key
    if [name.key for name in names] != list(manifest.blocks):
        raise StoreError(f"agent {manifest.name!r}: its blocks have other names than its tokens")
    return names


class _LostError(Exception):
    """A block can't be had."""

    def __init__(self, key: Key) -> None:
        self.key = key


def _write(store: "AgentStore", manifest: Manifest, names: list[BlockName], path: Path, progress: Progress) -> int:
    tokens, text = np.asarray(manifest.tokens, "<u4"), pack_text(manifest.runs, manifest.messages)
    groups = store.ids.layout.groups
    tensors = [container.Tensor("tokens", "U32", tokens.shape), container.Tensor("text", "U8", text.shape)]
    tensors += [
        container.Tensor(f"kv.{number}", "U8", (len(names), group.block_bytes)) for number, group in enumerate(groups)
    ]
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
        "block_tokens": str(store.pool.block_tokens),
        "kv_tokens": str(min(manifest.kv_tokens, len(names) * store.pool.block_tokens)),
    }
    blank = container.blank_header(said, tensors)
    total = len(blank) + sum(tensor.size_bytes for tensor in tensors)
    data = partial(_data, store, names, [tokens, text])
    # The checksum comes first in the file, so everything is read twice: files are written front to back.
    digest, done = xxhash.xxh3_128(blank), len(blank)
    for part in data():
        digest.update(part.data)
        done += part.nbytes
        progress(done // 2, total)
    header = container.with_checksum(blank, digest.hexdigest().encode())
    files = Files() if store.disk is None else store.disk.files
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
        except OSError:  # who is told that it failed must not find a file that may vanish
            with suppress(OSError):
                files.unlink(path)
            raise
    except BaseException:
        with suppress(OSError):
            files.unlink(temporary)
        raise
    return total


def _data(store: "AgentStore", names: list[BlockName], first: list[Array]) -> Iterator[Array]:
    """What follows the header, in order. Each block is valid until the next one is asked for."""
    yield from first
    block = np.empty(store.pool.block_bytes, np.uint8)
    for part in _parts(block, store.ids):  # one group after the other; today's models have one
        for name in names:
            _read(store, name, block)
            yield part


def _write_all(files: Files, descriptor: int, data: memoryview) -> None:
    while data:
        count = files.write(descriptor, [data])
        if count == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        data = data[count:]


def _read(store: "AgentStore", name: BlockName, buffer: Array) -> None:
    with store.lock:
        node = store.tree.nodes.get(name.key)
        block = None if node is None or node.block is None else store.pool.hold(node.block)
    if block is not None:
        np.copyto(buffer, store.pool.read(block))
        store.pool.drop([block])
        return
    try:
        if store.disk is None:
            raise _LostError(name.key)
        store.disk.get(name, [buffer])
    except (OSError, StoreError):
        raise _LostError(name.key) from None


def _parts(block: Array, ids: ModelIds) -> list[Array]:
    """A block's bytes, group by group: views."""
    ends = np.cumsum([group.block_bytes for group in ids.layout.groups])
    return np.split(block, ends[:-1])


def _quiet(done: int, total: int) -> None:
    """Nobody wants to know."""


# In -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """What was read of an export, all of it verified."""

    tokens: U32
    runs: tuple[Run, ...]
    messages: tuple[Any, ...] | None
    digests: list[list[bytes]]  # of each block, by group: what is read again is compared


class Export:
    """An export, opened: its header is understood, its data are not read yet."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError naming the file."""
        self.path = path
        try:
            self._descriptor = open_regular(path)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}") from None
        except ValueError as error:  # a path that can't be
            raise StoreError(f"{str(path)!r}: {error}") from None
        try:
            self._open()
        except OSError as error:
            self.close()
            raise StoreError(f"{path}: {error.strerror or error}") from None
        except StoreError as error:
            self.close()
            raise StoreError(f"{path}: {error}") from None

    def _open(self) -> None:
        self.size_bytes = os.fstat(self._descriptor).st_size
        length = container.header_length(os.pread(self._descriptor, 8, 0), self.size_bytes)
        self._header = os.pread(self._descriptor, length, 0)
        said, self._tensors = container.read_metadata(self._header)
        container.check_version(said, FORMAT, VERSION)
        try:
            self.name = str(json.loads(said["name"]))
            self.model, self.kv_type, self.layout = said["model"], said["kv_type"], said["layout"]
            self.weights_id, self.numerics_id = said["weights_id"], said["numerics_id"]
            self.block_tokens, self.kv_tokens = int(said["block_tokens"]), int(said["kv_tokens"])
            self.tokens = math.prod(self._tensors["tokens"].shape)
        except (KeyError, ValueError, RecursionError) as error:
            raise StoreError(f"a field can't be read: {error!r}") from None
        end = length + sum(tensor.size_bytes for tensor in self._tensors.values())
        if end != self.size_bytes:
            raise StoreError(f"{self.size_bytes:,} bytes, its header says {end:,} (truncated?)")
        if self.tokens > MOST_TOKENS:
            raise StoreError(f"{self.tokens:,} tokens, at most {MOST_TOKENS:,} can be")
        if not 0 <= self.kv_tokens <= self.tokens or not 1 <= self.block_tokens <= MOST_TOKENS:
            raise StoreError(f"KV of {self.kv_tokens:,} tokens, but there are {self.tokens:,}")
        self.blocks = -(-self.kv_tokens // self.block_tokens)

    def check_model(self, ids: ModelIds) -> None:
        """Raises StoreError unless this is the model whose KV it holds."""
        if self.weights_id != ids.weights_id:
            raise self._refusal(f"another model than {ids.name}")
        if self.kv_type != ids.kv_type:
            raise self._refusal(f"with another KV type than {ids.kv_type}")
        if (self.numerics_id, self.layout) != (ids.numerics_id, ids.layout.digest):
            raise self._refusal(f"other kernels or settings (numerics id {ids.numerics_id[:16]} here)")
        expected = [
            container.Tensor("tokens", "U32", (self.tokens,)),
            container.Tensor("text", "U8", self._tensors["text"].shape if "text" in self._tensors else ()),
        ]
        expected += [
            container.Tensor(f"kv.{number}", "U8", (self.blocks, group.block_bytes))
            for number, group in enumerate(ids.layout.groups)
        ]
        if self.block_tokens != ids.layout.block_tokens or list(self._tensors.values()) != expected:
            raise StoreError(f"{self.path}: its tensors are not those of {self.blocks} blocks of this model")

    def _refusal(self, what: str) -> StoreError:
        return StoreError(f"{self.path}: of {what}: {self.needs}")

    @property
    def needs(self) -> str:
        """Which model can take it, in words."""
        return (
            f"it needs {self.model[:80]!r}, weights id {self.weights_id[:16]!r}, numerics id "
            f"{self.numerics_id[:16]!r}, KV type {self.kv_type[:20]!r}"
        )

    def read(self, progress: Progress) -> Content:
        """All of it, compared with its checksum. Raises StoreError."""
        blank, digits = container.split_checksum(self._header)
        digest = xxhash.xxh3_128(blank)
        at, small = len(self._header), dict[str, Array]()
        digests: list[list[bytes]] = []
        for name, tensor in self._tensors.items():
            if name.startswith("kv."):
                row = np.empty(tensor.shape[1], np.uint8)
                digests.append([])
                for number in range(tensor.shape[0]):
                    self._fill(row, at + number * len(row))
                    digest.update(row.data)
                    digests[-1].append(xxhash.xxh3_128_digest(row.data))
                    progress(at + (number + 1) * len(row), self.size_bytes)
            else:
                small[name] = np.empty(tensor.size_bytes, np.uint8)
                self._fill(small[name], at)
                digest.update(small[name].data)
            at += tensor.size_bytes
        if digest.hexdigest().encode() != digits:
            raise StoreError(f"{self.path}: checksum: it is not as it was written")
        tokens = small["tokens"].view("<u4")
        try:
            runs, messages = unpack_text(small["text"], _CHUNK + 1024 * len(tokens))
        except StoreError as error:
            raise StoreError(f"{self.path}: {error}") from None
        if any(run.tokens < 0 for run in runs) or sum(run.tokens for run in runs) != len(tokens):
            raise StoreError(f"{self.path}: its text does not belong to its tokens")
        return Content(tokens, runs, messages, digests)

    def check_content(self, content: Content, vocab_size: int | None) -> None:
        """Raises StoreError unless it is a history that this model could have had."""
        try:
            check_tokens(content.tokens, vocab_size)
            check_messages(content.messages)
        except StoreError as error:
            raise StoreError(f"{self.path}: {error}") from None

    def block(self, number: int, content: Content, parts: list[Array]) -> None:
        """Read one block, group by group. Raises StoreError if it is not what `read` has seen."""
        at = len(self._header) + self._tensors["tokens"].size_bytes + self._tensors["text"].size_bytes
        for part, digests in zip(parts, content.digests, strict=True):
            self._fill(part, at + number * len(part))
            if xxhash.xxh3_128_digest(part.data) != digests[number]:
                raise StoreError(f"{self.path}: it was changed while it was being read")
            at += self.blocks * len(part)

    def _fill(self, buffer: Array, at: int) -> None:
        view, done = memoryview(buffer.data), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], at + done)
            if count == 0:
                raise StoreError(f"{self.path}: it was truncated while it was being read")
            done += count

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def import_agent(
    store: "AgentStore",
    path: Path,
    name: str | None = None,
    tenant: str = "",
    *,
    trust: bool = False,
    progress: Progress | None = None,
) -> Moved:
    """Take in an agent, under another name if one is given. All of it or nothing; raises StoreError."""
    if store.disk is None or store.read_only:
        raise StoreError(f"nothing can be imported: {store.read_only}")
    with Export(path) as export:
        export.check_model(store.ids)
        name = check_name(export.name if name is None else name, "agent")
        tenant = check_name(tenant or DEFAULT_TENANT, "tenant")
        needed = export.blocks * store.disk.block_file_bytes
        if needed > store.warm.quota:
            raise StoreError(f"{path}: {needed:,} bytes, the quota is {store.warm.quota:,}: give a larger --warm-quota")
        agent = store.reserve(name, tenant)
        try:
            content = export.read(progress or _quiet)
            export.check_content(content, store.vocab_size)
            salt = store.tenants.salt(tenant) if trust else secrets.token_bytes(16)
            _Import(store, agent, export, content, salt).run()
        except OSError as error:
            raise StoreError(f"{path}: can't be imported: {error.strerror or error}") from None
        finally:
            store.end_turn(agent)
        return Moved(
            name, tenant, store.ids.name, str(path), export.tokens, export.kv_tokens, export.blocks, 0,
            export.size_bytes,
        )  # fmt: skip


class _Import:
    """Blocks, then the manifest; files are written by the writer's thread, from memory that nobody else needs."""

    def __init__(self, store: "AgentStore", agent: "Agent", export: Export, content: Content, salt: bytes) -> None:
        self._store, self._agent, self._export, self._content, self._salt = store, agent, export, content, salt
        self._chain: list[Node] = []
        self._written: list[Node] = []

    def run(self) -> None:
        store = self._store
        size = 4 * store.pool.block_tokens
        tokens = token_bytes(self._content.tokens)[: 4 * self._export.kv_tokens]
        block = np.empty(store.pool.block_bytes, np.uint8)
        parts = _parts(block, store.ids)
        node = store.root(self._salt)
        try:
            for number in range(self._export.blocks):
                with store.lock:
                    node = store.tree.child(node, tokens[number * size : (number + 1) * size])
                    node.claims += 1
                    self._chain.append(node)
                self._export.block(number, self._content, parts)
                store.writer.submit(partial(self._put, node, block)).result()
            store.save(self._agent, self._manifest(), self._chain).result()
        except BaseException:
            store.disown(self._agent)
            self._release()
            store.writer.submit(self._undo).result()
            raise
        self._release()

    def _put(self, node: Node, block: Array) -> None:
        """What is known already was computed here: it stays."""
        store = self._store
        with store.lock:
            if node.safe:
                return
            known = None if node.block is None else store.pool.hold(node.block)
        try:
            store.warm.put(node, block if known is None else store.pool.read(known))
            self._written.append(node)
        finally:
            if known is not None:
                store.pool.drop([known])

    def _manifest(self) -> Manifest:
        content, ids, now = self._content, self._store.ids, self._store.clock()
        return Manifest(
            tenant=self._agent.tenant,
            name=self._agent.name,
            generation=1,
            salt=self._salt.hex(),
            weights_id=ids.weights_id,
            numerics_id=ids.numerics_id,
            layout=ids.layout.digest,
            model=ids.name,
            kv_type=ids.kv_type,
            tokens=content.tokens,
            kv_tokens=self._export.kv_tokens,
            blocks=tuple(node.key for node in self._chain),
            runs=content.runs,
            messages=content.messages,
            text_digest=text_digests(merged(content.runs))[-1] if content.runs else "",
            anonymous=False,  # or a conversation without a name could go on from it unasked
            created=now,
            used=now,
        )

    def _release(self) -> None:
        with self._store.lock:
            for node in reversed(self._chain):
                node.claims -= 1
                self._store.tree.forget(node)

    def _undo(self) -> None:
        store = self._store
        assert store.disk is not None
        store.warm.withdraw(self._agent)
        with store.lock:
            alone = [node for node in reversed(self._written) if not node.owned]
        store.warm.delete(alone)
