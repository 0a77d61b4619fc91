"""An exported agent, read: nothing of it is believed before it is checked.

The header must describe exactly this model's blocks; every byte is read and compared with the checksum, and the tokens
and messages are checked (`kv.believable`) before the first block is used.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from everwarm.errors import StoreError
from everwarm.kernels.backend import FULL, STATE, WINDOW
from everwarm.kv import container
from everwarm.kv.believable import check_messages, check_tokens
from everwarm.kv.chain import U32
from everwarm.kv.container import Array
from everwarm.kv.ids import ModelIds
from everwarm.kv.manifest import unpack_text
from everwarm.opening import open_regular
from everwarm.types import Run

FORMAT = "everwarm-export"
VERSION = "1"
NAMES = {FULL: "kv", WINDOW: "window", STATE: "state"}
"""Of the tensors that hold blocks, by kind."""
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


@dataclass(frozen=True, slots=True)
class Content:
    """What was read of an export, all of it verified."""

    tokens: U32
    runs: tuple[Run, ...]
    messages: tuple[Any, ...] | None
    digests: dict[str, list[bytes]]  # of each row of a tensor of blocks: what is read again is compared


class Export:
    """An export, opened: its header is understood, its data are not read yet."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError naming the file."""
        self.path = path
        self._starts: dict[str, int] = {}  # of tensors, once they were read
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
        for kind in ids.layout.kinds:
            expected += block_tensors(ids, kind, len(block_numbers(ids, kind, self.kv_tokens)))
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
        digests: dict[str, list[bytes]] = {}
        for name, tensor in self._tensors.items():
            self._starts[name] = at
            if name.partition(".")[0] in NAMES.values():
                row = np.empty(tensor.shape[1], np.uint8)
                digests[name] = []
                for number in range(tensor.shape[0]):
                    self._fill(row, at + number * len(row))
                    digest.update(row.data)
                    digests[name].append(xxhash.xxh3_128_digest(row.data))
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
            text = unpack_text(small["text"], _CHUNK + 1024 * len(tokens))
        except StoreError as error:
            raise StoreError(f"{self.path}: {error}") from None
        if any(run.tokens < 0 for run in text.runs) or sum(run.tokens for run in text.runs) != len(tokens):
            raise StoreError(f"{self.path}: its text does not belong to its tokens")
        return Content(tokens, text.runs, text.messages, digests)

    def check_content(self, content: Content, vocab_size: int | None) -> None:
        """Raises StoreError unless it is a history that this model could have had."""
        try:
            check_tokens(content.tokens, vocab_size)
            check_messages(content.messages)
        except StoreError as error:
            raise StoreError(f"{self.path}: {error}") from None

    def block(self, kind: str, row: int, content: Content, parts: list[Array]) -> None:
        """Read one block of a kind, group by group. Raises StoreError if it is not what `read` has seen."""
        for number, part in enumerate(parts):
            name = f"{NAMES[kind]}.{number}"
            self._fill(part, self._starts[name] + row * len(part))
            if xxhash.xxh3_128_digest(part.data) != content.digests[name][row]:
                raise StoreError(f"{self.path}: it was changed while it was being read")

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


def block_numbers(ids: ModelIds, kind: str, kv_tokens: int) -> range:
    """Which blocks of a kind a history of so many tokens needs in order to go on."""
    size, reach = ids.layout.block_tokens, ids.layout.reach
    end = -(-kv_tokens // size)
    if kind == STATE:
        return range(max(0, end - 1), end)
    return range(0 if kind == FULL else max(0, kv_tokens + 1 - reach) // size, end)


def block_tensors(ids: ModelIds, kind: str, rows: int) -> list[container.Tensor]:
    """A row per block, group by group."""
    return [
        container.Tensor(f"{NAMES[kind]}.{number}", "U8", (rows, group.block_bytes))
        for number, group in enumerate(ids.layout.of_kind(kind))
    ]


def parts_of(block: Array, ids: ModelIds, kind: str = FULL) -> list[Array]:
    """A block's bytes, group by group: views."""
    ends = np.cumsum([group.block_bytes for group in ids.layout.of_kind(kind)])
    return np.split(block, ends[:-1])


def quiet(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""
