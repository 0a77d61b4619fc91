"""GGUF files written by hand, field by field, so that a test can lie in any of them."""

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

DEFAULT_ALIGNMENT = 32


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def array(kind: int, items: Sequence[bytes] = (), count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def tensor(name: str | bytes, dimensions: Sequence[int] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """A tensor info. Dimensions in the order of the file: the elements of a row first."""
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pair_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = DEFAULT_ALIGNMENT,
) -> bytes:
    counts = struct.pack(
        "<QQ",
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    header = magic + struct.pack("<I", version) + counts + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data if data else header


def small_model() -> bytes:
    """A sound file of less than 1 KiB that has some of everything."""
    pairs = [
        pair("general.architecture", STRING, string("llama")),
        u32("general.alignment", 32),
        pair("a.u8", U8, b"\xff"),
        pair("a.f32", F32, struct.pack("<f", 0.5)),
        pair("a.bool", BOOL, b"\1"),
        pair("a.floats", ARRAY, array(F32, [struct.pack("<f", x) for x in (1, 2, 3)])),
        pair("a.bools", ARRAY, array(BOOL, [b"\0", b"\1"])),
        pair("a.tokens", ARRAY, array(STRING, [string(t) for t in ("<s>", "", "hé", "x" * 40)])),
        pair("a.nested", ARRAY, array(ARRAY, [array(U8, [b"\1", b"\2"]), array(STRING, [string("in")]), array(ARRAY)])),
    ]
    tensors = [tensor("x.weight", (4, 2)), tensor("y.weight", (32,), 2, 32), tensor("z.weight", (3,), 24, 64)]
    return gguf(pairs, tensors, bytes(range(67)))
