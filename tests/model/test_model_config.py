"""What a file's metadata must say, and what it may not."""

import pytest

from everwarm.errors import ModelError
from everwarm.model.config import read_config

LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def read(**changes: object):
    metadata = LLAMA | {"llama." + key.replace("__", "."): value for key, value in changes.items()}
    return read_config({key: value for key, value in metadata.items() if value is not None}, 100)  # type: ignore[arg-type]


def test_defaults_follow_the_format() -> None:
    config = read()
    assert len(config.layers) == 2
    attention = config.layers[0].attention
    assert (attention.kv_heads, attention.head_dim, attention.rope.dims, attention.rope.base) == (4, 16, 16, 10000.0)
    assert attention.rope.scaling == "none"
    assert attention.window is None


def test_old_name_of_linear_scaling() -> None:
    rope = read(rope__scale_linear=2.0).layers[0].attention.rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)


def test_one_value_per_layer_is_fine_if_all_are_equal() -> None:
    assert read(attention__head_count_kv=[2, 2]).layers[1].attention.kv_heads == 2
    with pytest.raises(ModelError, match="head_count_kv differs between layers"):
        read(attention__head_count_kv=[2, 4])


def test_an_unknown_architecture_is_named_and_the_known_are_listed() -> None:
    with pytest.raises(ModelError, match=r"'mamba' is not supported; supported are llama, qwen2, "):
        read_config({"general.architecture": "mamba"}, 100)


def test_a_file_without_a_model() -> None:
    with pytest.raises(ModelError, match=r"general\.architecture is missing"):
        read_config({}, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, r"llama\.block_count is missing"),
        ({"block_count": 0}, r"llama\.block_count = 0: must be at least 1"),
        ({"block_count": "two"}, r"llama\.block_count = 'two': expected int"),
        ({"embedding_length": -64}, "must be at least 1"),
        ({"attention__head_count_kv": 3}, "4 attention heads can't be shared by 3"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention__value_length": 8}, "value_length 8 differs from key_length 16"),
        ({"expert_count": 8}, "expert_used_count is missing"),
        ({"expert_count": 8, "expert_used_count": 9}, "9 of 8 experts"),
        ({"expert_count": 8, "expert_used_count": 0}, "expert_used_count = 0: must be at least 1"),
        ({"expert_count": 2**20, "expert_used_count": 1}, "at most 1,024 experts"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 3}, "in equal groups"),
        (
            {"expert_count": 8, "expert_used_count": 5, "expert_group_count": 4, "expert_group_used_count": 2},
            "5 experts can't be chosen from 2 groups",
        ),
        ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 4}, "this way to route"),
        ({"attention__causal": False}, "causal"),
        ({"rope__dimension_count": 15}, "must be even and at most the head's 16"),
        ({"rope__dimension_count": 32}, "must be even and at most the head's 16"),
        ({"rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ({"rope__freq_base": 0.0}, "must be finite"),
        ({"rope__freq_base": float("nan")}, "must be finite"),
        ({"rope__freq_base": 1.0, "rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}, "must be finite"),
        ({"attention__sliding_window": -5}, "sliding_window = -5: must be at least 1"),
        ({"rope__scaling__factor": -1.0}, "must be finite"),
        ({"attention__sliding_window": 2**31}, "sliding_window = 2,147,483,648: must be at most 2,147,483,647"),
        ({"attention__sliding_window": 2**32 - 1}, "sliding_window = 4,294,967,295: must be at most"),
        ({"context_length": 2**31}, "context_length = 2,147,483,648: must be at most"),
        ({"block_count": 2**63}, "block_count = .* must be at most"),
        ({"feed_forward_length": 2**24 + 1}, "rows of 16,777,217 elements, at most 16,777,216"),
        ({"attention__head_count": 2**20}, "llama.attention.key_length = 0"),
        ({"attention__head_count": 2**16, "attention__key_length": 2**16}, "rows of 4,294,967,296 elements"),
    ],
)
def test_bad_metadata_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**changes)


MAMBA: dict[str, object] = {
    "general.architecture": "mamba2",
    "mamba2.block_count": 2,
    "mamba2.context_length": 128,
    "mamba2.embedding_length": 64,
    "mamba2.attention.layer_norm_rms_epsilon": 1e-5,
    "mamba2.ssm.conv_kernel": 4,
    "mamba2.ssm.inner_size": 128,
    "mamba2.ssm.state_size": 32,
    "mamba2.ssm.time_step_rank": 4,
    "mamba2.ssm.group_count": 1,
}


def read_mamba(**changes: object):
    return read_config(MAMBA | {f"mamba2.ssm.{key}": value for key, value in changes.items()}, 100)  # type: ignore[arg-type]


def test_a_state_follows_from_the_metadata() -> None:
    (layer, _) = read_mamba().state_shape
    assert (layer.conv, layer.state) == (3 * (128 + 2 * 32), 128 * 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_size": 1 << 20}, "a state of 562,038,272 bytes in each layer .* at most 268,435,456 are supported"),
        ({"conv_kernel": 1 << 30}, "a state of 824,633,736,448 bytes in each layer"),
        ({"conv_kernel": 2**31 - 1, "state_size": 1 << 22}, r"a state of 72,\d{3},\d{3},\d{3},\d{3},\d{3} bytes"),
        ({"conv_kernel": 1}, "a convolution over 1 token"),
        ({"conv_kernel": 1 << 40}, r"mamba2\.ssm\.conv_kernel = 1,099,511,627,776: must be at most 2,147,483,647"),
        ({"inner_size": 1 << 40}, r"mamba2\.ssm\.inner_size = 1,099,511,627,776: must be at most 2,147,483,647"),
        ({"state_size": 1 << 28}, "rows of 536,871,040 elements, at most 16,777,216 are supported"),
        ({"time_step_rank": 3}, "3 heads with a state in 1 groups, 128 elements in all: they do not fit together"),
        ({"group_count": 3}, "4 heads with a state in 3 groups, 128 elements in all: they do not fit together"),
    ],
)
def test_states_that_can_not_be_are_refused_with_the_figures(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_mamba(**changes)


def test_a_short_convolution_that_can_not_be_is_refused_with_the_figures() -> None:
    lfm = {"lfm2." + key.removeprefix("llama."): value for key, value in LLAMA.items() if key.startswith("llama.")}
    lfm |= {"general.architecture": "lfm2", "lfm2.attention.head_count_kv": [0, 2], "lfm2.shortconv.l_cache": 1 << 22}
    with pytest.raises(ModelError, match="a state of 1,073,741,568 bytes in each layer"):
        read_config(lfm, 100)  # type: ignore[arg-type]
