"""The dense families."""

from collections.abc import Sequence

from golden.oracles.case import Case

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


def rope(theta: float = 10000.0, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def two_ropes(scaling: dict[str, object], local: float = 1000.0, whole: float = 100000.0) -> dict[str, object]:
    """Bases of Gemma 3, for layers with a window and for the others."""
    return {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": {"rope_type": "default", "rope_theta": whole, **scaling},
        }
    }


SHORT = [1.0 + pair / 16 for pair in range(16)]
LONG = [1.0 + pair for pair in range(16)]


def longrope(
    original: int, dims: int, short: Sequence[float] = SHORT, long: Sequence[float] = LONG
) -> dict[str, object]:
    """Factors of Phi 3: `long` where the context is longer than the `original` one."""
    return rope(
        rope_type="longrope",
        short_factor=list(short[: dims // 2]),
        long_factor=list(long[: dims // 2]),
        original_max_position_embeddings=original,
    ) | {"original_max_position_embeddings": original}


GEMMA3 = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 32,
    "sliding_window": 19,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
GRANITE = {
    **rope(),
    "head_dim": ...,
    "hidden_size": 128,
    "attention_multiplier": 0.11,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
PHI3 = {"head_dim": ..., "hidden_size": 128, "sliding_window": None}
MINISTRAL = YARN | {
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}

CASES = (
    Case("llama", "LlamaForCausalLM", rope(), mistakes={"rope base": rope(20000.0)}),
    Case(
        "llama-rope3",
        "LlamaForCausalLM",
        rope(
            500000.0,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        mistakes={"no scaling of rope": rope(500000.0)},
    ),
    Case("llama-yarn", "LlamaForCausalLM", {"rope_parameters": YARN}, mistakes={"no yarn": rope()}),
    Case("llama-linear", "LlamaForCausalLM", rope(rope_type="linear", factor=4.0), mistakes={"no scaling": rope()}),
    Case(
        "qwen2",
        "Qwen2ForCausalLM",
        rope(1000000.0) | {"head_dim": ..., "hidden_size": 128},
        mistakes={"rope base": rope(10000.0)},
    ),
    Case("qwen3", "Qwen3ForCausalLM", rope(1000000.0), mistakes={"rope base": rope(10000.0)}),
    Case(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
        norms_add_one=True,
        mistakes={
            "window of one more": {"sliding_window": 25},
            "scores not capped": {"attn_logit_softcapping": None},
            "logits not capped": {"final_logit_softcapping": None},
            "scale": {"query_pre_attn_scalar": 33},
            "layers swapped": {"layer_types": ["full_attention", "sliding_attention"] * 2},
        },
    ),
    Case(
        "gemma3",
        "Gemma3ForCausalLM",
        GEMMA3 | two_ropes({}),
        norms_add_one=True,
        mistakes={
            "window of one more": {"sliding_window": 20},
            "global base in every layer": two_ropes({}, local=100000.0),
            "local base in every layer": two_ropes({}, whole=1000.0),
            "global layer elsewhere": {"layer_types": ["full_attention", *["sliding_attention"] * 6]},
        },
    ),
    Case(
        "gemma3-linear",
        "Gemma3ForCausalLM",
        GEMMA3 | two_ropes({"rope_type": "linear", "factor": 8.0}) | {"final_logit_softcapping": 6.0},
        norms_add_one=True,
        mistakes={"no scaling of rope": two_ropes({}), "logits not capped": {"final_logit_softcapping": None}},
    ),
    Case(
        "granite",
        "GraniteForCausalLM",
        GRANITE,
        mistakes={
            "scale of the scores": {"attention_multiplier": 32**-0.5},
            "scale of embeddings": {"embedding_multiplier": 1.0},
            "scale of the residual": {"residual_multiplier": 1.0},
            "scale of the logits": {"logits_scaling": 1.0},
        },
    ),
    Case(
        "phi3",
        "Phi3ForCausalLM",
        PHI3 | longrope(original=64, dims=32),
        mistakes={"short factors": longrope(original=64, dims=32, long=SHORT), "no longrope": rope()},
    ),
    Case(
        "phi3-short",
        "Phi3ForCausalLM",
        PHI3 | longrope(original=512, dims=32) | {"tie_word_embeddings": True},
        mistakes={"long factors": longrope(original=512, dims=32, short=LONG), "no longrope": rope()},
        context=256,
    ),
    Case(
        "phi3-partial",
        "Phi3ForCausalLM",
        PHI3 | rope(partial_rotary_factor=0.75) | {"original_max_position_embeddings": 1024},
        mistakes={"whole heads rotate": rope()},
    ),
    Case(
        "phi3-window",
        "Phi3ForCausalLM",
        PHI3 | rope() | {"sliding_window": 24, "original_max_position_embeddings": 1024},
        mistakes={"window of one more": {"sliding_window": 25}},
        no_llama_cpp="llama.cpp ignores the window of Phi 3",
    ),
    Case(
        "smollm3",
        "SmolLM3ForCausalLM",
        rope(5000000.0) | {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "tie_word_embeddings": True},
        mistakes={"rope in every layer": {"no_rope_layers": [1] * 5}},
    ),
    Case(
        "mistral3",
        "Ministral3ForCausalLM",
        {"rope_parameters": MINISTRAL},
        mistakes={
            "no temperature": {"rope_parameters": MINISTRAL | {"llama_4_scaling_beta": 0.0}},
            "no yarn": {"rope_parameters": MINISTRAL | {"factor": 1.0}},
            "other border of yarn": {"rope_parameters": MINISTRAL | {"beta_fast": 32.0}},
            "magnitude of yarn": {"rope_parameters": MINISTRAL | {"mscale_all_dim": 0.0}},
        },
    ),
    Case(
        "mistral3-plain",
        "MistralForCausalLM",
        rope(1000000.0) | {"sliding_window": None, "tie_word_embeddings": True},
        saved={"architectures": ["Mistral3ForConditionalGeneration"]},
    ),
    Case(
        "glm4",
        "Glm4ForCausalLM",
        rope(partial_rotary_factor=0.5) | {"attention_bias": True},
        mistakes={"whole heads rotate": rope(partial_rotary_factor=1.0)},
    ),
    Case("olmo2", "Olmo2ForCausalLM", rope(500000.0) | {"head_dim": ..., "hidden_size": 128}),
    Case(
        "olmo2-window",
        "Olmo3ForCausalLM",
        two_ropes({}, 500000.0, 500000.0) | {"head_dim": ..., "hidden_size": 128, "sliding_window": 24},
        mistakes={"window of one more": {"sliding_window": 25}},
    ),
    Case(
        "olmo2-yarn",
        "Olmo3ForCausalLM",
        {"head_dim": ..., "hidden_size": 128, "sliding_window": 24, **two_ropes(YARN, 10000.0)},
        mistakes={"no yarn": two_ropes({}, 10000.0, 10000.0), "window of one more": {"sliding_window": 25}},
    ),
)
