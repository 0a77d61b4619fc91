"""The table of tensor types against the gguf package's."""

import gguf
import pytest

from everwarm.weights.types import TensorType


def test_table_equals_the_gguf_package() -> None:
    ours = {(t.name, int(t), t.block_elements, t.block_bytes) for t in TensorType}
    theirs = {(t.name, int(t), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    assert ours == theirs


def test_a_type_is_found_by_its_number_and_by_its_name() -> None:
    assert TensorType(12) is TensorType.Q4_K is TensorType["Q4_K"]


@pytest.mark.parametrize("number", [-1, 4, 5, 31, 1 << 32])
def test_a_number_that_ggml_does_not_use_is_no_type(number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        TensorType(number)


def test_size_counts_whole_blocks() -> None:
    assert TensorType.F32.size_bytes(3) == 12
    assert TensorType.Q4_0.size_bytes(64) == 36
    with pytest.raises(ValueError, match="33 elements are not whole blocks of Q4_0"):
        TensorType.Q4_0.size_bytes(33)
