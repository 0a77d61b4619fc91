"""Dequantisation against the gguf package, to the last bit; random blocks hold NaN and infinite scales too."""

import math
from operator import attrgetter

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import QuantError
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.errors import ModelError
from everwarm.weights.dequant import dequant
from everwarm.weights.dequant.dequant import SUPPORTED, dequantize
from everwarm.weights.types import TensorType

CLAIMED = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
}
TYPES = sorted(SUPPORTED)
NAME = attrgetter("name")
PAST_ONE_CHUNK = dequant._CHUNK_ELEMENTS // 256 + 3
SHAPES = [(256,), (1, 256), (5, 768), (3, 2, 512), (2, 1, 3, 256), (PAST_ONE_CHUNK, 256)]

# The largest error after gguf has quantised, relative to the largest weight of a block.
ROUND_TRIP_ERROR = {
    TensorType.F32: 0.0,
    TensorType.F16: 2**-11,
    TensorType.BF16: 2**-8,
    TensorType.Q4_0: 1 / 7.9,
    TensorType.Q4_1: 1 / 14.9,
    TensorType.Q5_0: 1 / 15.9,
    TensorType.Q5_1: 1 / 30.9,
    TensorType.Q8_0: 0.5 / 127 + 2**-11,
    TensorType.TQ1_0: 0.501,
    TensorType.TQ2_0: 0.501,
    TensorType.MXFP4: 0.251,
}

SMALLEST_HALF = 2**-24


def random_bytes(tensor_type: TensorType, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.uint8]:
    size = math.prod(shape) // tensor_type.block_elements * tensor_type.block_bytes
    return np.random.default_rng([seed, tensor_type]).integers(0, 256, size, dtype=np.uint8)


def oracle(data: npt.NDArray[np.uint8], tensor_type: TensorType, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    try:
        qtype = gguf.GGMLQuantizationType[tensor_type.name]
        with np.errstate(all="ignore"):
            return gguf.quants.dequantize(data.reshape(*shape[:-1], -1), qtype).reshape(shape)
    except (KeyError, NotImplementedError):
        pytest.skip(f"the installed gguf package can't dequantise {tensor_type.name}")


def assert_same_bits(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tensor_type", TYPES, ids=NAME)
def test_random_blocks_are_bit_equal_to_gguf(tensor_type: TensorType, shape: tuple[int, ...]) -> None:
    data = random_bytes(tensor_type, shape)
    assert_same_bits(dequantize(data, tensor_type, shape), oracle(data, tensor_type, shape))


@pytest.mark.parametrize("tensor_type", TYPES, ids=NAME)
def test_a_single_block_is_bit_equal_to_gguf(tensor_type: TensorType) -> None:
    shape = (tensor_type.block_elements,)
    for seed in range(20):
        data = random_bytes(tensor_type, shape, seed)
        assert_same_bits(dequantize(data, tensor_type, shape), oracle(data, tensor_type, shape))


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q6_K", "IQ3_XXS", "NVFP4"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_arbitrary_bytes_are_bit_equal_to_gguf(name: str, data: st.DataObject) -> None:
    tensor_type = TensorType[name]
    blocks = data.draw(st.integers(1, 4))
    size = blocks * tensor_type.block_bytes
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    shape = (blocks, tensor_type.block_elements)
    assert_same_bits(dequantize(raw, tensor_type, shape), oracle(raw, tensor_type, shape))


@settings(max_examples=100, deadline=None)
@given(tensor_type=st.sampled_from(TYPES), above=st.integers(1, 9), below=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_rows_do_not_depend_on_their_neighbours(tensor_type: TensorType, above: int, below: int, seed: int) -> None:
    data = random_bytes(tensor_type, (above + below, 256), seed)
    cut = data.size // (above + below) * above
    apart = [dequantize(data[:cut], tensor_type, (above, 256)), dequantize(data[cut:], tensor_type, (below, 256))]
    assert_same_bits(dequantize(data, tensor_type, (above + below, 256)), np.concatenate(apart))


@pytest.mark.parametrize("tensor_type", [TensorType.F16, TensorType.BF16], ids=NAME)
def test_every_16_bit_float_is_bit_equal_to_gguf(tensor_type: TensorType) -> None:
    data = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    assert_same_bits(dequantize(data, tensor_type, (256, 256)), oracle(data, tensor_type, (256, 256)))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_times_every_4_bit_float_is_bit_equal_to_gguf(name: str) -> None:
    tensor_type = TensorType[name]
    quants = (np.arange(tensor_type.block_elements // 2) * 0x11).astype(np.uint8)
    scales = np.repeat(np.arange(256, dtype=np.uint8), tensor_type.block_bytes - quants.size).reshape(256, -1)
    data = np.concatenate([scales, np.broadcast_to(quants, (256, quants.size))], axis=1).reshape(-1)
    shape = (256, tensor_type.block_elements)
    assert_same_bits(dequantize(data, tensor_type, shape), oracle(data, tensor_type, shape))


@pytest.mark.parametrize("tensor_type", sorted(ROUND_TRIP_ERROR), ids=NAME)
def test_weights_that_gguf_quantised_come_back(tensor_type: TensorType) -> None:
    weights = np.random.default_rng(5).normal(0, 0.02, (24, 1024)).astype(np.float32)
    try:
        packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[tensor_type.name]).view(np.uint8).reshape(-1)
    except (KeyError, NotImplementedError, QuantError):
        pytest.skip(f"the installed gguf package can't quantise {tensor_type.name}")
    found = dequantize(packed, tensor_type, weights.shape)
    assert_same_bits(found, oracle(packed, tensor_type, weights.shape))
    blocks = weights.reshape(-1, tensor_type.block_elements)
    error = np.abs(found.reshape(blocks.shape) - blocks)
    # Formats with a minimum spread over both signs, so their steps are relative to the range.
    reach = np.ptp(blocks, axis=1) if tensor_type.name.endswith("_1") else np.abs(blocks).max(axis=1)
    assert (error.max(axis=1) <= ROUND_TRIP_ERROR[tensor_type] * reach + SMALLEST_HALF).all()


@pytest.mark.parametrize("tensor_type", TYPES, ids=NAME)
def test_bytes_at_any_address_are_fine(tensor_type: TensorType) -> None:
    data = random_bytes(tensor_type, (3, 256))
    expected = oracle(data, tensor_type, (3, 256))
    for offset in (1, 2, 4):
        moved = np.empty(data.size + 16, np.uint8)[offset : offset + data.size]
        moved[:] = data
        assert_same_bits(dequantize(moved, tensor_type, (3, 256)), expected)


def test_aligned_f32_is_a_view_and_misaligned_f32_a_copy_both_read_only() -> None:
    memory = np.arange(256, dtype=np.float32).view(np.uint8)
    view, copy = dequantize(memory, TensorType.F32, (16, 16)), dequantize(memory[2:-2], TensorType.F32, (255,))
    assert np.shares_memory(view, memory)
    assert not np.shares_memory(copy, memory)
    assert not view.flags.writeable
    assert not copy.flags.writeable
    assert memory.flags.writeable


@pytest.mark.parametrize("tensor_type", TYPES, ids=NAME)
def test_read_only_bytes_are_left_alone(tensor_type: TensorType) -> None:
    data = random_bytes(tensor_type, (2, 256))
    before = data.copy()
    data.setflags(write=False)
    dequantize(data, tensor_type, (2, 256))
    np.testing.assert_array_equal(data, before)


def test_a_tensor_without_rows_is_empty() -> None:
    assert dequantize(np.empty(0, np.uint8), TensorType.Q4_K, (0, 256)).shape == (0, 256)


@pytest.mark.parametrize("tensor_type", TYPES, ids=NAME)
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_byte_count_names_type_expected_and_found(tensor_type: TensorType, extra: int) -> None:
    right = 3 * 256 // tensor_type.block_elements * tensor_type.block_bytes
    message = rf"^{tensor_type.name} tensor of .*: expected {right:,} bytes, found {right + extra:,}$"
    with pytest.raises(ModelError, match=message):
        dequantize(np.zeros(right + extra, np.uint8), tensor_type, (3, 256))


def test_a_row_of_broken_blocks_is_refused_even_if_the_bytes_add_up() -> None:
    with pytest.raises(ModelError, match=r"Q4_K .*rows of 128 elements.*multiple of 256"):
        dequantize(np.zeros(144, np.uint8), TensorType.Q4_K, (2, 128))


@pytest.mark.parametrize("tensor_type", sorted(set(TensorType) - SUPPORTED), ids=NAME)
def test_other_types_are_refused_by_name(tensor_type: TensorType) -> None:
    with pytest.raises(ModelError, match=rf"tensor type {tensor_type.name} .*Q4_K"):
        dequantize(np.zeros(tensor_type.block_bytes, np.uint8), tensor_type, (tensor_type.block_elements,))


def test_supported_is_what_we_claim() -> None:
    assert {tensor_type.name for tensor_type in SUPPORTED} == CLAIMED


def test_gguf_has_no_type_that_we_lack() -> None:
    """A newer gguf package may know more types than we claim: that is news (a skip with a reason), not a failure."""
    news = [qtype.name for qtype in gguf.GGMLQuantizationType if qtype.name not in CLAIMED and _gguf_can(qtype)]
    if news:
        pytest.skip(f"the installed gguf package also dequantises {', '.join(news)}")


def _gguf_can(qtype: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), qtype)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("tensor_type", sorted(dequant._FORMATS), ids=NAME)
def test_layouts_are_as_long_as_blocks(tensor_type: TensorType) -> None:
    assert dequant._FORMATS[tensor_type].layout.itemsize == tensor_type.block_bytes
