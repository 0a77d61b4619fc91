"""Hostile and broken bytes, one test each: a `GGUFError` of one line that starts with the path and names the field."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade_gguf import ARRAY, BOOL, F32, STRING, U8, U32, array, gguf, pair, string, tensor, u32
from hostile_gguf import assert_refused

HUGE = 1 << 63
SPARSE_BYTES = 8 << 30

Attack = Callable[..., None]


@pytest.fixture
def refused(tmp_path: Path) -> Attack:
    """Writes the bytes to a file and demands that it is refused, in these words and in little memory."""

    def attack(content: bytes, *words: str, sparse_bytes: int = 0) -> None:
        path = tmp_path / "attack.gguf"
        path.write_bytes(content)
        if sparse_bytes:
            os.truncate(path, sparse_bytes)
        assert_refused(path, path, words)

    return attack


# Magic and version


def test_empty_file(refused: Attack) -> None:
    refused(b"", "is empty (0 bytes)")


def test_not_a_gguf_file(refused: Attack) -> None:
    refused(b"PK\3\4" + bytes(100), "magic at byte 0", "b'PK\\x03\\x04'", "b'GGUF'")


def test_file_shorter_than_the_magic(refused: Attack) -> None:
    refused(b"GG", "magic", "b'GG'")


def test_git_lfs_pointer(refused: Attack) -> None:
    refused(b"version https://git-lfs.github.com/spec/v1\n", "magic", "run `git lfs pull`")


def test_web_page(refused: Attack) -> None:
    refused(b"<!DOCTYPE html>", "magic", "web page")


def test_formats_before_gguf(refused: Attack) -> None:
    refused(b"lmgg" + bytes(100), "magic", "GGML")
    refused(b"tjgg" + bytes(100), "magic", "GGJT")


def test_version_1(refused: Attack) -> None:
    refused(gguf(version=1), "version at byte 4", "GGUF version 1, only 2 and 3")


def test_version_0(refused: Attack) -> None:
    refused(gguf(version=0), "version at byte 4")


def test_version_4(refused: Attack) -> None:
    refused(gguf(version=4), "version at byte 4", "GGUF version 4", "newer everwarm")


def test_big_endian(refused: Attack) -> None:
    refused(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version at byte 4", "big-endian (GGUF version 3)")


# Counts


def test_absurd_tensor_count(refused: Attack) -> None:
    refused(gguf(tensor_count=HUGE), "tensor count at byte 8", "9,223,372,036,854,775,808", "room for 0")


def test_absurd_tensor_count_in_a_sparse_file(refused: Attack) -> None:
    refused(gguf(tensor_count=1 << 20), "tensor count", "at most 131,072 are allowed", sparse_bytes=SPARSE_BYTES)


def test_absurd_metadata_count(refused: Attack) -> None:
    refused(gguf(pair_count=HUGE), "metadata count at byte 16", "9,223,372,036,854,775,808", "room for 0")


def test_absurd_metadata_count_in_a_sparse_file(refused: Attack) -> None:
    refused(gguf(pair_count=1 << 20), "metadata count", "at most 65,536 are allowed", sparse_bytes=SPARSE_BYTES)


def test_more_metadata_than_the_file_holds(refused: Attack) -> None:
    refused(
        gguf([pair("k", STRING, string("x" * 40))], pair_count=2), "metadata key 1 of 2", "past the end of the file"
    )


def test_more_tensors_than_the_file_holds(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x" * 60)], tensor_count=2), "tensor 1 of 2", "past the end of the file")


# Metadata


def test_key_length_over_the_file(refused: Attack) -> None:
    refused(
        gguf([string("key", length=500) + bytes(20)]), "metadata key 0 of 1 at byte 32", "500 bytes are past the end"
    )


def test_huge_key_length(refused: Attack) -> None:
    refused(gguf([string("key", length=HUGE) + bytes(20)]), "metadata key 0 of 1", "at most 65,535")


def test_key_that_is_not_utf8(refused: Attack) -> None:
    refused(gguf([pair(b"\xff", U8, b"\0")]), "metadata key 0 of 1 at byte 24", "not valid UTF-8")


def test_key_with_control_characters_still_gives_one_line(refused: Attack) -> None:
    refused(gguf([pair("a\n\x1b[31m", 99, bytes(8))]), "metadata key a\\n\\x1b[31m", "value type 99")


def test_long_key_is_cut_in_the_message(refused: Attack) -> None:
    refused(gguf([pair("k" * 1_000, 99, bytes(8))]), "metadata key " + "k" * 77 + "...")


def test_duplicate_key(refused: Attack) -> None:
    refused(gguf([u32("twin", 1), u32("twin", 1)]), "metadata key twin at byte 44", "is there twice")


def test_unknown_value_type(refused: Attack) -> None:
    refused(gguf([pair("k", 13, bytes(8))]), "metadata key k", "value type 13, only 0 to 12")


def test_boolean_of_2(refused: Attack) -> None:
    refused(gguf([pair("k", BOOL, b"\2")]), "metadata key k", "a boolean of 2, only 0 and 1")


def test_boolean_of_2_in_an_array(refused: Attack) -> None:
    refused(gguf([pair("k", ARRAY, array(BOOL, [b"\1", b"\7"]))]), "metadata key k", "a boolean of 7, only 0 and 1")


def test_string_length_over_the_file(refused: Attack) -> None:
    refused(gguf([pair("k", STRING, string("abc", length=4))]), "metadata key k at byte", "4 bytes are past the end")


def test_huge_string_length(refused: Attack) -> None:
    refused(
        gguf([pair("k", STRING, string("abc", length=(1 << 64) - 1))]), "metadata key k", "18,446,744,073,709,551,615"
    )


def test_huge_string_in_a_sparse_file(refused: Attack) -> None:
    content = gguf([pair("k", STRING, string("", length=SPARSE_BYTES // 2))])
    refused(content, "metadata key k", "what a header may take (268,435,456 bytes)", sparse_bytes=SPARSE_BYTES)


def test_absurd_array_length(refused: Attack) -> None:
    for kind in (U8, F32, STRING, ARRAY):
        refused(gguf([pair("k", ARRAY, array(kind, count=HUGE))]), "metadata key k", "9,223,372,036,854,775,808")


def test_array_length_whose_bytes_overflow_64_bits(refused: Attack) -> None:
    refused(gguf([pair("k", ARRAY, array(F32, count=1 << 62))]), "metadata key k", "18,446,744,073,709,551,616 bytes")


def test_absurd_array_length_in_a_sparse_file(refused: Attack) -> None:
    for kind in (U8, F32, STRING, ARRAY):
        content = gguf([pair("k", ARRAY, array(kind, count=1 << 31))])
        refused(content, "metadata key k", "what a header may take", sparse_bytes=SPARSE_BYTES)


def test_string_in_an_array_over_the_file(refused: Attack) -> None:
    content = gguf([pair("k", ARRAY, array(STRING, [string("a"), string("b", length=9)]))])
    refused(content, "metadata key k", "string 1 of 2 goes past the end of the file")


def test_string_in_a_long_array_over_the_file(refused: Attack) -> None:
    items = [string("token")] * 5_000
    for length in (6, 255, 256, HUGE, (1 << 64) - 1):
        content = gguf([pair("k", ARRAY, array(STRING, [*items, string("token", length=length)]))])
        refused(content, "metadata key k", "string 5,000 of 5,001 goes past the end of the file")


def test_unknown_type_in_an_array(refused: Attack) -> None:
    refused(gguf([pair("k", ARRAY, array(77, [bytes(8)]))]), "metadata key k", "value type 77")


def test_deeply_nested_arrays(refused: Attack) -> None:
    nested = array(ARRAY, count=1) * 100_000
    refused(gguf([pair("k", ARRAY, nested)]), "metadata key k", "nested more than 4 deep")


def test_many_small_arrays(refused: Attack) -> None:
    content = gguf([pair("k", ARRAY, array(ARRAY, [array(U8)] * 70_000))])
    refused(content, "metadata key k", "more than 65,536 arrays")


# Alignment


@pytest.mark.parametrize("alignment", [3, 33, 48, 1_000])
def test_alignment_not_a_power_of_two(refused: Attack, alignment: int) -> None:
    refused(gguf([u32("general.alignment", alignment)]), "general.alignment", f"{alignment:,} is not a power of two")


def test_alignment_of_zero(refused: Attack) -> None:
    refused(gguf([u32("general.alignment", 0)]), "general.alignment", "0 is not between 1 and 2,097,152")


def test_absurd_alignment(refused: Attack) -> None:
    refused(gguf([u32("general.alignment", 1 << 31)]), "general.alignment", "2,147,483,648 is not between")


@pytest.mark.parametrize(
    ("kind", "value"),
    [(STRING, string("32")), (F32, struct.pack("<f", 32)), (BOOL, b"\1"), (ARRAY, array(U32, [struct.pack("<I", 32)]))],
    ids=["string", "float", "boolean", "array"],
)
def test_alignment_of_the_wrong_type(refused: Attack, kind: int, value: bytes) -> None:
    refused(gguf([pair("general.alignment", kind, value)]), "general.alignment", "has to be an integer")


def test_alignment_beyond_the_end_of_the_file(refused: Attack) -> None:
    refused(
        gguf([u32("general.alignment", 1 << 20)], [tensor("x")], bytes(16)),
        "tensor x at byte 1,048,576",
        "past the end",
    )


# Tensors


def test_tensor_name_that_is_not_utf8(refused: Attack) -> None:
    refused(gguf(tensors=[tensor(b"\xc3(")]), "tensor 0 of 1 at byte 24", "not valid UTF-8")


def test_tensor_name_length_over_the_file(refused: Attack) -> None:
    refused(gguf(tensors=[string("x", length=999) + bytes(30)]), "tensor 0 of 1", "999 bytes are past the end")


def test_huge_tensor_name(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x" * 2_000)]), "tensor 0 of 1", "a name of 2,000 bytes, at most 1,024")


def test_duplicate_tensor_name(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("twin"), tensor("twin", offset=32)], data=bytes(64)), "tensor twin", "is there twice")


def test_no_dimensions(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", ())], data=bytes(64)), "tensor x at byte 24", "0 dimensions, only 1 to 4")


def test_five_dimensions(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", (1,) * 5)], data=bytes(64)), "tensor x at byte 24", "5 dimensions, only 1 to 4")


def test_absurd_number_of_dimensions(refused: Attack) -> None:
    content = gguf(tensors=[string("x") + struct.pack("<I", (1 << 32) - 1) + bytes(64)])
    refused(content, "tensor x", "4,294,967,295 dimensions, only 1 to 4")


def test_dimension_of_zero(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", (4, 0))], data=bytes(64)), "tensor x at byte 24", "(0, 4) has a dimension of 0")


def test_dimensions_whose_product_overflows(refused: Attack) -> None:
    for dimensions in ((1 << 32, 1 << 32), (HUGE, 2), ((1 << 64) - 1,) * 4, (1 << 63,)):
        refused(
            gguf(tensors=[tensor("x", dimensions)], data=bytes(64)), "tensor x", "more than 9,223,372,036,854,775,807"
        )


def test_size_that_overflows_though_the_product_does_not(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", (1 << 62,))], data=bytes(64)), "tensor x", "past the end of the file")


def test_unknown_tensor_type(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", kind=31)], data=bytes(64)), "tensor x", "type 31 is unknown", "41 (Q1_0)")
    refused(
        gguf(tensors=[tensor("x", kind=(1 << 32) - 1)], data=bytes(64)), "tensor x", "type 4,294,967,295 is unknown"
    )


def test_row_that_is_not_whole_blocks(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", (48, 2), 2)], data=bytes(64)), "tensor x", "rows of 48", "Q4_0 (32 elements)")


def test_misaligned_offset(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", offset=16)], data=bytes(64)), "tensor x", "offset 16 is not a multiple", "(32)")


def test_offset_past_the_end(refused: Attack) -> None:
    refused(
        gguf(tensors=[tensor("x", offset=1 << 40)], data=bytes(64)),
        "tensor x at byte 1,099,511,627,840",
        "past the end",
    )


def test_offset_that_wraps_around_64_bits(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("x", offset=(1 << 64) - 32)], data=bytes(64)), "tensor x", "past the end of the file")


def test_tensor_five_bytes_past_the_end(refused: Attack) -> None:
    words = "5 bytes past the end of the file (file is truncated? expected 80 bytes, found 75)"
    refused(gguf(tensors=[tensor("x")], data=bytes(16))[:-5], "tensor x at byte 64", words)


def test_overlapping_tensors(refused: Attack) -> None:
    tensors = [tensor("a", (20,)), tensor("b", (4,), offset=64)]
    refused(gguf(tensors=tensors, data=bytes(96)), "tensor b at byte 160", "overlaps tensor a, which ends at byte 176")


def test_two_tensors_in_one_place(refused: Attack) -> None:
    refused(gguf(tensors=[tensor("a"), tensor("b")], data=bytes(96)), "tensor b", "overlaps tensor a")


# Split keys


def test_part_under_another_name(refused: Attack) -> None:
    refused(
        gguf([u32("split.no", 0), u32("split.count", 2)]),
        "split.no 0 of split.count 2",
        "-00001-of-00002.gguf",
        "give the file its name back",
    )


def test_split_number_beyond_the_count(refused: Attack) -> None:
    refused(gguf([u32("split.no", 2), u32("split.count", 2)]), "metadata key split.no", "2 is not between 0 and 1")


def test_split_count_of_the_wrong_type(refused: Attack) -> None:
    refused(gguf([pair("split.count", STRING, string("2"))]), "metadata key split.count", "has to be an integer")
