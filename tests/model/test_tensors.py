"""A model's tensors are checked before anything is computed."""

from pathlib import Path

import numpy as np
import pytest

from everwarm.errors import ModelError
from everwarm.model.config import read_config
from everwarm.model.tensors import check_tensors
from everwarm.weights.gguf.file import GGUFFile
from tiny import Tiny


def check(path: Path, tiny: Tiny) -> None:
    tiny.write(path / "tiny.gguf")
    with GGUFFile(path / "tiny.gguf") as file:
        check_tensors(read_config(file.metadata, len(tiny.vocab), len(file.tensors)), file.tensors)


def test_a_whole_model_passes(tmp_path: Path) -> None:
    check(tmp_path, Tiny())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is missing"):
        check(tmp_path, Tiny(drop=("blk.1.ffn_up.weight",)))


def test_an_absurd_number_of_layers_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"block_count is 2,000,000,000, but the file has only 20 tensors"):
        check(tmp_path, Tiny(metadata={"block_count": 2_000_000_000}))


def test_qwen2_needs_its_biases(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attn_q\.bias is missing"):
        check(tmp_path, Tiny(architecture="qwen2"))


def test_a_wrong_shape_says_both(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"ffn_gate\.weight: shape \(256, 256\), but the metadata asks for \(512, 256\)"
    ):
        check(tmp_path, Tiny(metadata={"feed_forward_length": 512}))


def test_an_unknown_tensor_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        check(tmp_path, Tiny(add={"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}))


def test_a_type_that_is_no_weight_is_named(tmp_path: Path) -> None:
    tiny = Tiny(drop=("blk.0.attn_norm.weight",), add={"blk.0.attn_norm.weight": np.ones(256, np.int32)})
    with pytest.raises(ModelError, match=r"attn_norm\.weight: type I32 is not supported; supported are BF16, F16"):
        check(tmp_path, tiny)
