"""A GGUF file, or all parts of a split one: metadata and tensors, mapped and checked.

In: the path of a .gguf file (of a split one: of any part). Out: `metadata`, `tensors`, and `data(name)`, a view into
the mapping, or `read(name)`, a copy. Invariants: once a `GGUFFile` exists, every tensor lies inside its file, aligned,
in whole blocks and apart from all others, so `data()` can't fail for a known name while the file stays as it is. What
`read` returns is of the file that was opened: if someone has written into it since, its digest is taken anew, and
`read` fails if that is another one. A file that was replaced by another under its name is still the one that was
opened. What is wrong is a `GGUFError`.

    gguf.py            the model: its parts, looked up by name
    part.py            one file: header, tensor infos
    metadata.py        key-value pairs, lazy arrays
    strings.py         the walk over a vocabulary
    mapped.py          mapping, bounds, error messages

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import difflib
import hashlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np

from everwarm.errors import GGUFError
from everwarm.types import Metadata
from everwarm.weights.gguf.mapped import DAMAGED, Bytes, shown
from everwarm.weights.gguf.metadata import NestedArray, NumberArray, StringArray, raw_bytes
from everwarm.weights.gguf.part import Part, TensorInfo, read_part

__all__ = ["GGUFFile", "NestedArray", "NumberArray", "StringArray", "TensorInfo", "raw_bytes"]

_CHUNK = 8 << 20
_OTHER_PARTS = "fetch all parts of one model"


class GGUFFile:
    """An open model. A context manager; views that were handed out stay valid after it is closed.

    The metadata of a split model is that of its first part, and so are `path`, `version` and `alignment`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with ExitStack() as opened:
            self._parts = _read_parts(Path(path), opened)
            tensors = _all_tensors(self._parts)
            self._opened = opened.pop_all()
        first = self._parts[0]
        self.path = first.file.path
        self.parts = tuple(part.file.path for part in self._parts)
        self.version = first.version
        self.alignment = first.alignment
        self.size_bytes = sum(part.file.size_bytes for part in self._parts)
        self.metadata: Metadata = MappingProxyType(first.metadata)
        self.stored: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.tensors = self.stored
        self._checking = threading.Lock()
        self._stamps = self._stamped()
        self.known_digest: str | None = None
        """Of the tensors as they were when it was opened, once someone has found it out."""

    def cut(self, pieces: Mapping[str, TensorInfo]) -> None:
        """From now on `tensors` are these, each of them stored, or rows of one that is: some files keep several
        matrices in one tensor.
        """
        assert all(0 <= piece.offset <= self._parts[piece.part].file.size_bytes for piece in pieces.values())
        self.tensors = MappingProxyType(dict(pieces))

    def data(self, name: str) -> Bytes:
        """The bytes of a tensor: read-only, one-dimensional, a view into the mapping."""
        info = self._info(name)
        return self._parts[info.part].file.view(info.offset, info.size_bytes)

    def read(self, name: str) -> Bytes:
        """The bytes of a tensor in memory of their own."""
        info = self._info(name)
        out = np.empty(info.size_bytes, np.uint8)
        self._parts[info.part].file.read_into(out, info.offset)
        return out if self._as_opened() else self.read(name)

    def read_rows(self, name: str, numbers: Sequence[int]) -> Bytes:
        """The bytes of some rows of a matrix, one row behind the other, in memory of their own."""
        info = self._info(name)
        row_bytes = info.type.size_bytes(info.shape[-1])
        out = np.empty((len(numbers), row_bytes), np.uint8)
        for row, number in zip(out, numbers, strict=True):
            assert 0 <= number < math.prod(info.shape[:-1])
            self._parts[info.part].file.read_into(row, info.offset + number * row_bytes)
        return out.reshape(-1) if self._as_opened() else self.read_rows(name, numbers)

    def digest(self) -> str:
        """Of the name, type, shape and bytes of every tensor, as they were when it was opened. The order in which a
        file keeps them does not matter.
        """
        with self._checking:
            if self.known_digest is None:
                found = self._read_digest()
                if self._stamped() != self._stamps:
                    raise self._changed("while it was open")
                self.known_digest = found
            return self.known_digest

    def fingerprints(self) -> list[str]:
        """One of each part: what changes when anything about it does."""
        found = [part.file.fingerprint() for part in self._parts]
        if self._stamped() != self._stamps:
            raise self._changed("while it was open")
        return found

    def _read_digest(self) -> str:
        whole = hashlib.sha256()
        chunk = np.empty(_CHUNK, np.uint8)
        for name in sorted(self.stored):
            info = self.stored[name]
            whole.update(f"{name}\0{info.type.name}\0{info.shape}\0".encode())
            one = hashlib.sha256()
            for at in range(0, info.size_bytes, _CHUNK):
                part = chunk[: min(_CHUNK, info.size_bytes - at)]
                self._parts[info.part].file.read_into(part, info.offset + at)
                one.update(part.data)
            whole.update(one.digest())
        return whole.hexdigest()

    def _stamped(self) -> list[tuple[int, int]]:
        return [part.file.stamp() for part in self._parts]

    def _as_opened(self) -> bool:
        """Whether nobody has written into the files. False if someone has, but the tensors are the same: read again."""
        if self._stamped() == self._stamps:
            return True
        with self._checking:
            stamps = self._stamped()
            if self.known_digest is None or self._read_digest() != self.known_digest or self._stamped() != stamps:
                raise self._changed("while it was open")
            self._stamps = stamps
        return False

    def _changed(self, when: str) -> GGUFError:
        return self._parts[0].file.error(f"was changed in place {when}; load it again")

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            nearest = (
                ", ".join(shown(near) for near in difflib.get_close_matches(name, self.tensors)) or "none is similar"
            )
            raise self._parts[0].file.error(f"no tensor {shown(name)} among {len(self.tensors):,}; nearest: {nearest}")
        return info

    def close(self) -> None:
        """Unmap the files; one that still has views on it goes with the last of them."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _read_parts(path: Path, opened: ExitStack) -> list[Part]:
    given = read_part(path, opened)
    if given.count == 1:
        return [given]
    ending = f"-{given.number + 1:05}-of-{given.count:05}.gguf"
    if not path.name.endswith(ending):
        problem = f"split.no {given.number} of split.count {given.count} needs a name that ends in {ending}"
        raise given.file.error(f"{problem}; give the file its name back")
    parts = []
    for number in range(given.count):
        sibling = path.with_name(f"{path.name.removesuffix(ending)}-{number + 1:05}-of-{given.count:05}.gguf")
        if not sibling.exists():
            problem = f"split.count is {given.count}, but part {number + 1} is missing: {sibling.name}"
            raise given.file.error(f"{problem}; fetch it into the same directory")
        part = given if number == given.number else read_part(sibling, opened)
        if (part.number, part.count) != (number, given.count):
            problem = f"split.no {part.number} of split.count {part.count}, expected {number} of {given.count}"
            raise part.file.error(f"{problem}; {_OTHER_PARTS}")
        parts.append(part)
    return parts


def _all_tensors(parts: list[Part]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for info in part.tensors:
            if info.name in tensors:
                advice = DAMAGED if len(parts) == 1 else _OTHER_PARTS
                raise part.file.error(f"tensor {shown(info.name)}: is there twice, a name may occur once; {advice}")
            tensors[info.name] = info
    for part in parts if len(parts) > 1 else ():
        expected = part.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            problem = f"split.tensors.count is {expected!r}, but there are {len(tensors):,} tensors"
            raise part.file.error(f"{problem}; {_OTHER_PARTS}")
    return tensors
