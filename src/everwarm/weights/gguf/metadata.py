"""The metadata of a GGUF file: key-value pairs in, a dict in file order out.

Numbers, booleans and strings become Python values at once. Arrays become lazy sequences that remember where they lie: a
vocabulary of 260,000 strings costs a walk over it (a few milliseconds: the next key lies behind it) and no memory until
an item is read; then it is decoded, once.

Keys must be valid UTF-8. Values need not be: a byte that is not UTF-8 becomes a lone surrogate ("surrogateescape"),
which loses nothing; `raw_bytes(text)` gives back what the file says.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import GGUFError
from everwarm.types import MetadataScalar, MetadataValue
from everwarm.weights.gguf.mapped import Cursor, MappedFile, shown
from everwarm.weights.gguf.strings import LENGTH_BYTES, decode_strings, string_starts

MAX_KEY_BYTES = 65_535  # the specification's
MAX_ARRAYS = 65_536  # in one file, nested ones included
MAX_ARRAY_DEPTH = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {number: np.dtype("<" + letter) for number, letter in _LETTERS.items()}
_LAYOUTS = {number: struct.Struct("<" + letter) for number, letter in _LETTERS.items()}
_TYPE = struct.Struct("<I")
_ARRAY_HEAD = struct.Struct("<IQ")  # type of the items, number of items

T = TypeVar("T", bound=MetadataValue, covariant=True)


def read_metadata(cursor: Cursor, count: int) -> dict[str, MetadataValue]:
    """The next `count` pairs."""
    return _Reader(cursor).pairs(count)


def raw_bytes(text: str) -> bytes:
    """The bytes in the file from which this string value was decoded."""
    return text.encode(errors="surrogateescape")


class LazyArray(Sequence[T]):
    """An array that still lies in the file. Once the file is closed, only what has been read before is left."""

    def __init__(self, file: MappedFile, offset: int, size_bytes: int, count: int) -> None:
        self._file = file
        self._offset = offset
        self._size_bytes = size_bytes
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._count:,} items>"


class NumberArray(LazyArray[MetadataScalar]):
    """Integers, floats or booleans."""

    def __init__(self, file: MappedFile, offset: int, size_bytes: int, count: int, dtype: np.dtype[Any]) -> None:
        super().__init__(file, offset, size_bytes, count)
        self.dtype = dtype

    def numpy(self) -> NDArray[Any]:
        """A read-only view into the file: no copy. GGUF aligns nothing, so it may lie at any address."""
        return self._file.view(self._offset, self._size_bytes).view(self.dtype)

    @overload
    def __getitem__(self, index: int) -> MetadataScalar: ...
    @overload
    def __getitem__(self, index: slice) -> list[MetadataScalar]: ...
    def __getitem__(self, index: int | slice) -> MetadataScalar | list[MetadataScalar]:
        items: Any = self.numpy()[index].tolist()
        return items  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[MetadataScalar]:
        return iter(self.numpy().tolist())


class StringArray(LazyArray[str]):
    """Strings. The first one that is read decodes all of them."""

    @cached_property
    def _strings(self) -> list[str]:
        strings = decode_strings(self._file.view(self._offset, self._size_bytes), self._count)
        if len(strings) != self._count:
            raise self._file.error(f"changed at byte {self._offset:,} while open; open it again")
        return strings

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._strings[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings)


class NestedArray(LazyArray[MetadataValue]):
    """Arrays of arrays. The first one that is read finds all of them, and they are lazy in turn."""

    @cached_property
    def _arrays(self) -> list[MetadataValue]:
        reader = _Reader(Cursor(self._file, self._offset))
        return [reader.array("array") for _ in range(self._count)]

    @overload
    def __getitem__(self, index: int) -> MetadataValue: ...
    @overload
    def __getitem__(self, index: slice) -> list[MetadataValue]: ...
    def __getitem__(self, index: int | slice) -> MetadataValue | list[MetadataValue]:
        return self._arrays[index]

    def __iter__(self) -> Iterator[MetadataValue]:
        return iter(self._arrays)


class _Reader:
    """Turns what is under the cursor into values; counts arrays, because a hostile file can nest millions of them."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.arrays = 0

    def pairs(self, count: int) -> dict[str, MetadataValue]:
        pairs: dict[str, MetadataValue] = {}
        for number in range(count):
            start = self.cursor.position
            key = self.cursor.name(f"metadata key {number:,} of {count:,}", MAX_KEY_BYTES)
            field = f"metadata key {shown(key)}"
            if key in pairs:
                raise self.cursor.error(field, "is there twice, a key may occur once", at=start)
            (kind,) = self.cursor.unpack(_TYPE, field)
            pairs[key] = self.value(kind, field)
        return pairs

    def value(self, kind: int, field: str) -> MetadataValue:
        if kind == _STRING:
            return self.cursor.string(field).decode(errors="surrogateescape")
        if kind == _ARRAY:
            return self.array(field)
        if kind not in _LAYOUTS:
            raise self.unknown_type(kind, field)
        start = self.cursor.position
        (value,) = self.cursor.unpack(_LAYOUTS[kind], field)
        if kind == _BOOL:
            self.check_booleans(start, 1, field)
        return value  # type: ignore[no-any-return]

    def array(self, field: str, depth: int = 1) -> LazyArray[MetadataValue]:
        cursor = self.cursor
        self.arrays += 1
        if self.arrays > MAX_ARRAYS:
            raise cursor.error(field, f"more than {MAX_ARRAYS:,} arrays in one file")
        if depth > MAX_ARRAY_DEPTH:
            raise cursor.error(field, f"arrays nested more than {MAX_ARRAY_DEPTH} deep")
        kind, count = cursor.unpack(_ARRAY_HEAD, field)
        start = cursor.position
        if kind in _DTYPES:
            cursor.skip(count * _DTYPES[kind].itemsize, f"{field}, array of {count:,}")
            if kind == _BOOL:
                self.check_booleans(start, count, field)
            return NumberArray(cursor.file, start, cursor.position - start, count, _DTYPES[kind])
        if kind == _STRING:
            self.skip_strings(count, field)
            return StringArray(cursor.file, start, cursor.position - start, count)
        if kind == _ARRAY:
            self.check_count(count, _ARRAY_HEAD.size, field)
            for _ in range(count):
                self.array(field, depth + 1)
            return NestedArray(cursor.file, start, cursor.position - start, count)
        raise self.unknown_type(kind, field)

    def skip_strings(self, count: int, field: str) -> None:
        cursor = self.cursor
        self.check_count(count, LENGTH_BYTES, field)
        start, walked = cursor.position, 0
        for starts, end in string_starts(cursor.file.view(start, cursor.end - start), count):
            walked += len(starts)
            cursor.position = start + end
        if walked < count:
            raise cursor.error(field, f"string {walked:,} of {count:,} goes past the end of {cursor.describe_end()}")

    def check_count(self, count: int, item_bytes: int, field: str) -> None:
        left = self.cursor.end - self.cursor.position
        if count > left // item_bytes:
            room = f"{left // item_bytes:,} at most fit before the end of {self.cursor.describe_end()}"
            raise self.cursor.error(field, f"array of {count:,} items, but {room}")

    def check_booleans(self, start: int, count: int, field: str) -> None:
        values = self.cursor.file.view(start, count)
        if count and values.max() > 1:
            raise self.cursor.error(field, f"a boolean of {values.max()}, only 0 and 1 are allowed", at=start)

    def unknown_type(self, kind: int, field: str) -> GGUFError:
        return self.cursor.error(field, f"value type {kind}, only 0 to 12 are known")
