"""Sound files: what the gguf package writes, we read; what its reader says, we say."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from handmade_gguf import ARRAY, STRING, U8, array, pair, small_model, string, tensor, u32
from handmade_gguf import gguf as handmade
from hypothesis import given
from hypothesis import strategies as st

from everwarm.errors import GGUFError
from everwarm.weights.gguf.file import GGUFFile, NestedArray, NumberArray, StringArray, raw_bytes
from everwarm.weights.gguf.strings import decode_strings
from everwarm.weights.types import TensorType

SCALARS = {
    "UINT8": (0, 255),
    "INT8": (-128, 127),
    "UINT16": (0, 65_535),
    "INT16": (-(1 << 15), (1 << 15) - 1),
    "UINT32": (0, (1 << 32) - 1),
    "INT32": (-(1 << 31), (1 << 31) - 1),
    "UINT64": (0, (1 << 64) - 1),
    "INT64": (-(1 << 63), (1 << 63) - 1),
    "FLOAT32": (-0.5, 65_504.0),
    "FLOAT64": (0.1, -1e300),
    "BOOL": (True, False),
    "STRING": ("", "héllo \N{GRINNING FACE}"),
}


def write_model(path: Path, **writer_options: int) -> Path:
    """Every metadata type as scalar and array, and tensors of many types and ranks, by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama", **writer_options)
    for name, values in SCALARS.items():
        kind = gguf.GGUFValueType[name]
        for number, value in enumerate(values):
            writer.add_key_value(f"scalar.{name}.{number}", value, kind)
        writer.add_key_value(f"array.{name}", [*values] * 20, gguf.GGUFValueType.ARRAY, kind)
    rng = np.random.default_rng(0)
    for number, dtype in enumerate((np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64)):
        shape = (2, 3, 4, 5)[number % 4 :]
        writer.add_tensor(f"plain.{np.dtype(dtype).name}", rng.integers(-9, 9, shape).astype(dtype))
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16):
        floats = rng.standard_normal((3, 64), dtype=np.float32)
        writer.add_tensor(f"quantised.{kind.name}", gguf.quants.quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def split_model(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("split")
    write_model(folder / "model.gguf", split_max_tensors=4)
    return sorted(folder.iterdir())


@pytest.fixture
def handmade_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model())
    return path


def assert_tensors_equal_the_oracle(file: GGUFFile, oracle: list[gguf.ReaderTensor]) -> None:
    assert list(file.tensors) == [tensor.name for tensor in oracle]
    for theirs in oracle:
        ours = file.tensors[theirs.name]
        assert ours.type == theirs.tensor_type
        assert ours.shape == tuple(theirs.shape.tolist()[::-1])
        assert (ours.offset, ours.size_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert file.data(ours.name).tobytes() == theirs.data.tobytes()


def test_metadata_equals_what_the_gguf_package_reads(model: Path) -> None:
    oracle = {key: field.contents() for key, field in gguf.GGUFReader(model).fields.items() if key[:5] != "GGUF."}
    with GGUFFile(model) as file:
        assert list(file.metadata) == list(oracle)
        ours = {key: list(v) if isinstance(v, NumberArray | StringArray) else v for key, v in file.metadata.items()}
        assert ours == oracle
        assert {key: type(v) for key, v in ours.items()} == {key: type(v) for key, v in oracle.items()}


def test_tensors_equal_what_the_gguf_package_reads(model: Path) -> None:
    with GGUFFile(model) as file:
        assert_tensors_equal_the_oracle(file, gguf.GGUFReader(model).tensors)
        assert (file.version, file.alignment, file.size_bytes) == (3, 32, model.stat().st_size)
        assert (file.path, file.parts) == (model, (model,))


def test_version_2_reads_like_version_3(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(b"GGUF\2\0\0\0" + model.read_bytes()[8:])
    with GGUFFile(path) as file:
        assert file.version == 2
        assert_tensors_equal_the_oracle(file, gguf.GGUFReader(path).tensors)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_are_found_at_another_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name in "abc":
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.alignment == alignment
        assert_tensors_equal_the_oracle(file, gguf.GGUFReader(path).tensors)


@pytest.mark.parametrize("given_part", [0, 1, 2])
def test_any_part_of_a_split_model_opens_all(split_model: list[Path], model: Path, given_part: int) -> None:
    oracle = {t.name: (number, t) for number, p in enumerate(split_model) for t in gguf.GGUFReader(p).tensors}
    assert len(split_model) == 3
    with GGUFFile(split_model[given_part]) as file, GGUFFile(model) as whole:
        assert_tensors_equal_the_oracle(file, [tensor for _, tensor in oracle.values()])
        assert [info.part for info in file.tensors.values()] == [number for number, _ in oracle.values()]
        assert file.path == split_model[0]
        assert file.parts == tuple(split_model)
        assert file.size_bytes == sum(part.stat().st_size for part in split_model)
        assert [key for key in file.metadata if not key.startswith("split.")] == list(whole.metadata)


def test_a_first_part_without_tensors_is_fine(tmp_path: Path) -> None:
    def part(number: int, tensors: list[bytes], data: bytes) -> None:
        pairs = [u32("split.no", number), u32("split.count", 2), u32("split.tensors.count", 1)]
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(handmade(pairs, tensors, data))

    part(0, [], b"")
    part(1, [tensor("x")], bytes(16))
    with GGUFFile(tmp_path / "m-00001-of-00002.gguf") as file:
        assert file.tensors["x"].part == 1


def test_split_count_0_and_1_mean_a_single_file(tmp_path: Path) -> None:
    for count in (0, 1):
        path = tmp_path / f"merged{count}.gguf"
        path.write_bytes(handmade([u32("split.no", 0), u32("split.count", count), u32("split.tensors.count", 99)]))
        GGUFFile(path).close()


def test_nested_arrays_keep_their_shape(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        nested = file.metadata["a.nested"]
        assert isinstance(nested, NestedArray)
        assert [list(inner) for inner in nested] == [[1, 2], ["in"], []]
        assert list(nested[1]) == ["in"]


def test_trailing_bytes_after_the_last_tensor_are_ignored(handmade_file: Path) -> None:
    with handmade_file.open("ab") as file:
        file.write(b"trailing")
    with GGUFFile(handmade_file) as opened:
        assert opened.data("z.weight").tolist() == [64, 65, 66]


def test_a_file_without_tensors_or_metadata_is_valid(tmp_path: Path) -> None:
    (tmp_path / "bare.gguf").write_bytes(handmade())
    with GGUFFile(tmp_path / "bare.gguf") as file:
        assert (len(file.metadata), len(file.tensors), file.size_bytes) == (0, 0, 24)


def test_an_empty_array_at_the_end_of_the_file_is_valid(tmp_path: Path) -> None:
    for kind in (U8, STRING, ARRAY):
        (tmp_path / "m.gguf").write_bytes(handmade([pair("empty", ARRAY, array(kind))]))
        with GGUFFile(tmp_path / "m.gguf") as file:
            assert list(file.metadata["empty"]) == []


def test_arrays_behave_like_sequences(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        for key, expected in {"a.floats": [1.0, 2.0, 3.0], "a.tokens": ["<s>", "", "hé", "x" * 40]}.items():
            values = file.metadata[key]
            assert isinstance(values, NumberArray | StringArray)
            assert len(values) == len(expected)
            assert (values[1], values[-1], values[1:], values[::-1]) == (
                expected[1],
                expected[-1],
                expected[1:],
                expected[::-1],
            )
            assert (expected[2] in values, values.index(expected[1])) == (True, 1)
            assert "items" in repr(values)
            with pytest.raises(IndexError):
                values[len(expected)]


def test_numeric_arrays_are_views(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        floats = file.metadata["a.floats"]
        assert isinstance(floats, NumberArray)
        assert floats.numpy().dtype == np.float32
        assert np.shares_memory(floats.numpy(), floats.numpy())
        assert not floats.numpy().flags.writeable


def test_strings_are_decoded_once(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        tokens = file.metadata["a.tokens"]
        assert isinstance(tokens, StringArray)
        assert tokens[3] is tokens[3]


def test_string_values_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    raws = [b"\xff\0\xc3", b"\xed\xb2\x80", b"ok"]
    pairs = [pair("one", STRING, string(raws[0])), pair("many", ARRAY, array(STRING, [string(raw) for raw in raws]))]
    (tmp_path / "m.gguf").write_bytes(handmade(pairs))
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.metadata["one"] == "\udcff\0\udcc3"
        assert [raw_bytes(text) for text in file.metadata["many"]] == raws


@given(st.lists(st.one_of(st.binary(max_size=12), st.text().map(str.encode), st.binary(min_size=250, max_size=300))))
def test_strings_are_found_whatever_they_hold(raws: list[bytes]) -> None:
    data = np.frombuffer(b"".join(map(string, raws)), np.uint8)
    assert decode_strings(data, len(raws)) == [raw.decode(errors="surrogateescape") for raw in raws]


@pytest.mark.parametrize("every", [1, 7, 1_000])
@pytest.mark.parametrize(
    "odd", [b"", b"\0", bytes(9), b"x" * 300, b"x" * 70_000, bytes(300_000)], ids=lambda odd: len(odd)
)
def test_long_arrays_are_walked_past_odd_strings(odd: bytes, every: int) -> None:
    raws = [odd if number % every == 0 and number < 12 * every else b"token" for number in range(20_000)]
    data = np.frombuffer(b"".join(map(string, raws)), np.uint8)
    assert decode_strings(data, len(raws)) == [raw.decode() for raw in raws]


def test_data_is_a_read_only_view_into_the_mapping(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        data = file.data("y.weight")
        assert (data.dtype, data.shape, data.flags.writeable) == (np.uint8, (18,), False)
        assert np.shares_memory(data, file.data("y.weight"))
        assert file.tensors["y.weight"].type is TensorType.Q4_0


def test_an_unknown_tensor_is_answered_with_the_nearest_names(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        with pytest.raises(GGUFError, match=r"no tensor x\.weigth among 3; nearest: x\.weight"):
            file.data("x.weigth")
        with pytest.raises(GGUFError, match="none is similar"):
            file.data("?")


def test_views_outlive_close(handmade_file: Path) -> None:
    file = GGUFFile(handmade_file)
    data, floats = file.data("x.weight"), file.metadata["a.floats"]
    assert isinstance(floats, NumberArray)
    numbers = floats.numpy()
    file.close()
    handmade_file.unlink()
    assert data.tolist() == list(range(32))
    assert numbers.tolist() == [1.0, 2.0, 3.0]


def test_after_close_only_what_was_read_is_left(handmade_file: Path) -> None:
    with GGUFFile(handmade_file) as file:
        tokens, floats = file.metadata["a.tokens"], file.metadata["a.floats"]
        assert isinstance(tokens, StringArray)
        assert isinstance(floats, NumberArray)
        assert tokens[0] == "<s>"
    file.close()
    assert tokens[2] == "hé"
    assert file.metadata["a.u8"] == 255
    for read in (lambda: file.data("x.weight"), lambda: floats[0]):
        with pytest.raises(GGUFError, match="is closed; read what you need before"):
            read()


def test_a_path_may_be_a_string(handmade_file: Path) -> None:
    with GGUFFile(str(handmade_file)) as file:
        assert file.path == handmade_file


def test_a_float_is_exact(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(handmade([pair("e", 6, struct.pack("<f", 1e-5))]))
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.metadata["e"] == float(np.float32(1e-5))
