"""Tensors that hold several matrices are cut into them; a file whose pieces don't fit its metadata is refused."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from everwarm.errors import ModelError
from everwarm.model import tensors
from everwarm.model.config import read_config
from everwarm.model.facts import active_bytes, active_parameters, read_model
from everwarm.weights.gguf.file import GGUFFile, TensorInfo
from everwarm.weights.types import TensorType
from golden.oracles.cases import CASES


def opened(name: str, folder: Path) -> GGUFFile:
    (case,) = [case for case in CASES if case.name == name]
    return GGUFFile(case.unpack(folder))


def refused(file: GGUFFile, changes: Mapping[str, TensorInfo | None], **metadata: object) -> str:
    """What is said of the file if these tensors are others (None: missing) and these keys have other values."""
    changed = dict(file.stored) | {name: info for name, info in changes.items() if info is not None}
    changed = {name: info for name, info in changed.items() if changes.get(name, info) is not None}
    said = dict(file.metadata) | {key.replace("__", "."): value for key, value in metadata.items()}
    with pytest.raises(ModelError) as error:
        checked(said, changed)
    return str(error.value)


def checked(metadata: dict[str, Any], stored: dict[str, TensorInfo]) -> None:
    config = read_config(MappingProxyType(metadata), stored[tensors.EMBEDDING].shape[0], len(stored))
    tensors.check_tensors(config, tensors.cut(config, stored))


def test_pieces_lie_side_by_side(tmp_path: Path) -> None:
    with opened("phi3", tmp_path) as file:
        config = read_model(file)
        whole, attention = file.stored["blk.1.attn_qkv.weight"], config.layers[1].attention
        q, k, v = (file.tensors[f"blk.1.attn_{name}.weight"] for name in "qkv")
        assert [piece.shape[0] for piece in (q, k, v)] == [
            attention.query_width,
            attention.kv_width,
            attention.kv_width,
        ]
        assert (q.offset, k.offset, v.offset) == (whole.offset, q.offset + q.size_bytes, k.offset + k.size_bytes)
        assert q.size_bytes + k.size_bytes + v.size_bytes == whole.size_bytes
        assert file.data(k.name).tobytes() == file.read(k.name).tobytes()
        assert file.tensors["blk.1.ffn_gate.weight"].shape == file.tensors["blk.1.ffn_up.weight"].shape


def test_the_digest_of_a_file_does_not_depend_on_how_it_is_cut(tmp_path: Path) -> None:
    with opened("qwen3moe", tmp_path) as file, GGUFFile(file.path) as same:
        read_model(file)
        assert file.digest() == same.digest()


def test_layers_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    with opened("glm4moe-mtp", tmp_path) as file:
        config = read_model(file)
        assert config.skipped_layers == 1
        last = f"blk.{len(config.layers)}."
        assert any(name.startswith(last) for name in file.stored)
        assert not any(name.startswith(last) for name in file.tensors)


def test_of_experts_those_that_are_chosen_are_active(tmp_path: Path) -> None:
    with opened("qwen3moe", tmp_path) as file:
        config = read_model(file)
        spec = config.layers[0].feed_forward.experts
        assert spec is not None
        experts = sum(math.prod(info.shape) for name, info in file.stored.items() if "_exps" in name)
        total = active_parameters(config, file.tensors) + experts * (1 - spec.used / spec.count)
        assert total == sum(math.prod(info.shape) for info in file.stored.values())


def test_a_table_of_which_a_row_is_looked_up_is_not_read(tmp_path: Path) -> None:
    with opened("llama-experts", tmp_path) as file:
        config = read_model(file)
        sizes = dict.fromkeys(file.tensors, 1)
        without = {name: size for name, size in sizes.items() if name != tensors.EMBEDDING}
        assert tensors.OUTPUT in sizes
        assert active_bytes(config, sizes) == active_bytes(config, without)


class TestRefused:
    def test_twice_the_experts_that_are_claimed(self, tmp_path: Path) -> None:
        with opened("qwen3moe", tmp_path) as file:
            name = "blk.0.ffn_up_exps.weight"
            info = file.stored[name]
            doubled = replace(info, shape=(2 * info.shape[0], *info.shape[1:]))
            assert "ffn_up_exps.weight: shape (16," in refused(file, {name: doubled})

    def test_a_router_of_other_width(self, tmp_path: Path) -> None:
        with opened("qwen3moe", tmp_path) as file:
            name = "blk.0.ffn_gate_inp.weight"
            info = file.stored[name]
            assert "ffn_gate_inp.weight: shape" in refused(file, {name: replace(info, shape=(1, info.shape[1]))})

    def test_a_router_that_is_quantised(self, tmp_path: Path) -> None:
        with opened("qwen3moe", tmp_path) as file:
            name = "blk.0.ffn_gate_inp.weight"
            changed = replace(file.stored[name], type=TensorType.Q8_0)
            assert "a router of type Q8_0 is not supported" in refused(file, {name: changed})

    def test_half_of_the_projections_of_mla(self, tmp_path: Path) -> None:
        with opened("deepseek2", tmp_path) as file:
            assert "attn_v_b.0.weight is missing" in refused(file, {"blk.0.attn_v_b.weight": None})
            assert "attn_k_b.0.weight is missing" in refused(file, {"blk.0.attn_k_b.weight": None})

    def test_mla_from_before_its_projections_were_split(self, tmp_path: Path) -> None:
        with opened("deepseek2", tmp_path) as file:
            metadata = {key: value for key, value in file.metadata.items() if not key.endswith("_length_mla")}
            with pytest.raises(ModelError, match=r"key_length_mla is missing: .* convert it anew"):
                read_config(MappingProxyType(metadata), 260, len(file.stored))

    def test_the_same_matrix_twice(self, tmp_path: Path) -> None:
        with opened("phi3", tmp_path) as file:
            extra = replace(file.stored["blk.0.attn_qkv.weight"], name="blk.0.attn_q.weight")
            assert "and the file has that elsewhere, too" in refused(file, {"blk.0.attn_q.weight": extra})

    def test_one_set_of_rotary_factors(self, tmp_path: Path) -> None:
        with opened("phi3", tmp_path) as file:
            assert "only one of rope_factors_short" in refused(file, {"rope_factors_long.weight": None})

    def test_shared_layers_without_any_to_share(self, tmp_path: Path) -> None:
        with opened("gemma4-shared", tmp_path) as file:
            count = file.metadata["gemma4.block_count"]
            assert "to be shared" in refused(file, {}, gemma4__attention__shared_kv_layers=count)

    def test_more_layers_for_further_tokens_than_layers(self, tmp_path: Path) -> None:
        with opened("glm4moe-mtp", tmp_path) as file:
            assert "nextn_predict_layers = 99" in refused(file, {}, glm4moe__nextn_predict_layers=99)

    def test_a_scale_of_logits_that_is_zero(self, tmp_path: Path) -> None:
        with opened("granite", tmp_path) as file:
            assert "can't be divided" in refused(file, {}, granite__logit_scale=0.0)

    def test_more_heads_of_mla_than_any_model_has(self, tmp_path: Path) -> None:
        with opened("deepseek2", tmp_path) as file:
            said = refused(file, {}, deepseek2__attention__head_count=100_000, deepseek2__attention__kv_lora_rank=32)
            assert "experts and heads of MLA in 4 layers, at most 131,072" in said

    def test_more_experts_than_any_model_has(self, tmp_path: Path) -> None:
        with opened("qwen3moe", tmp_path) as file:
            many = {f"blk.0.extra.{number}": file.stored[tensors.EMBEDDING] for number in range(600)}
            said = refused(file, many, qwen3moe__expert_count=1024, qwen3moe__block_count=500)
            assert "512,000 experts and heads of MLA in 500 layers" in said
