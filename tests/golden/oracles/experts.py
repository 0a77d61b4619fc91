"""Families with experts, and those with compressed keys and values."""

from golden.oracles.case import Case
from golden.oracles.dense import GRANITE, YARN, rope
from golden.oracles.levels import BIAS

FEW = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = {
    "head_dim": ...,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    **FEW,
}
MLA_WEIGHTS = {r"kv_a_proj_with_mqa": 1.4, r"kv_b_proj": 1.4}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 64,
    "head_dim": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GPT_OSS_WEIGHTS = {
    r"experts\.gate_up_proj$": (-3 / 8, -1 / 8, 1 / 8, 3 / 8),  # so much that some are beyond 7, where they are cut
    r"experts\.down_proj$": (-3 / 32, -1 / 32, 1 / 32, 3 / 32),
    r"_proj_bias$": BIAS,
}
GPT_OSS_YARN = YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
EVEN_YARN = GPT_OSS_YARN | {"rope_theta": 224478.4309, "original_max_position_embeddings": 201}
"""llama.cpp rounds the borders between pairs that are kept and pairs that are stretched to whole pairs; gpt-oss does
not (`truncate` is false). With these values the borders are whole: 0 and 9.
"""
DEEPSEEK_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
V3 = {"q_lora_rank": 32, "norm_topk_prob": True, "n_routed_experts": 16, "n_shared_experts": 1}
SIGMOID = {"scoring_func": "sigmoid"}

CASES = (
    Case(
        "llama-experts",
        "MixtralForCausalLM",
        rope() | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
        experts=True,
        mistakes={"another expert": {"num_experts_per_tok": 3}},
    ),
    Case(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        rope(1000000.0)
        | FEW
        | {"head_dim": ..., "num_experts": 8, "shared_expert_intermediate_size": 64, "hidden_size": 128},
        experts=True,
        mistakes={"weights add up to one": {"norm_topk_prob": True}, "another expert": {"num_experts_per_tok": 3}},
    ),
    Case(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        rope(1000000.0) | FEW | {"num_experts": 8, "norm_topk_prob": True},
        experts=True,
        mistakes={"weights of all": {"norm_topk_prob": False}, "another expert": {"num_experts_per_tok": 3}},
    ),
    Case(
        "granitemoe",
        "GraniteMoeForCausalLM",
        GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
        experts=True,
        mistakes={"scale of the residual": {"residual_multiplier": 1.0}},
    ),
    Case(
        "granitemoe-shared",
        "GraniteMoeSharedForCausalLM",
        GRANITE
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
        },
        experts=True,
    ),
    Case(
        "glm4moe",
        "Glm4MoeForCausalLM",
        rope(partial_rotary_factor=0.5)
        | FEW
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        seed=1,
        experts=True,
        mistakes={"scale of the experts": {"routed_scaling_factor": 1.0}},
    ),
    Case(
        "glm4moe-plain",
        "Glm4MoeForCausalLM",
        rope(partial_rotary_factor=0.5)
        | FEW
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "attention_bias": False,
        },
        experts=True,
    ),
    Case(
        "glm4moe-mtp",
        "Glm4MoeForCausalLM",
        rope(partial_rotary_factor=0.5)
        | FEW
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "attention_bias": False,
        },
        experts=True,
        mtp=("model.layers.4.", "model.layers.4.", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
        saved={"num_nextn_predict_layers": 1},
    ),
    Case(
        "gpt-oss",
        "GptOssForCausalLM",
        GPT_OSS | {"rope_parameters": EVEN_YARN},
        GPT_OSS_WEIGHTS,
        experts=True,
        mistakes={
            "window of one more": {"sliding_window": 25},
            "nothing is cut": {"swiglu_limit": 1000.0},
            "plain SiLU": {"swiglu_alpha": 1.0},
            "no yarn": rope(150000.0),
            "layers swapped": {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "another expert": {"num_experts_per_tok": 4},
        },
    ),
    Case(
        "gpt-oss-mxfp4",
        "GptOssForCausalLM",
        GPT_OSS | {"rope_parameters": GPT_OSS_YARN},
        GPT_OSS_WEIGHTS,
        experts=True,
        mxfp4=True,
        mistakes={"whole borders of yarn": {"rope_parameters": GPT_OSS_YARN | {"truncate": True}}},
        no_llama_cpp="llama.cpp rounds YaRN's borders to whole pairs, and activations beside MXFP4 to 8 bits",
    ),
    Case(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        MLA | rope() | {"q_lora_rank": 32, "topk_method": "greedy", "routed_scaling_factor": 2.0},
        MLA_WEIGHTS,
        experts=True,
        mistakes={"scale of the experts": {"routed_scaling_factor": 1.0}},
    ),
    Case(
        "deepseek2-lite",
        "DeepseekV2ForCausalLM",
        MLA
        | {"rope_parameters": DEEPSEEK_YARN}
        | {"q_lora_rank": None, "topk_method": "greedy", "num_hidden_layers": 26, "n_routed_experts": 4}
        | {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
        MLA_WEIGHTS,
        experts=True,
    ),
    Case(
        "deepseek2-groups",
        "DeepseekV2ForCausalLM",
        MLA
        | rope()
        | {"q_lora_rank": 32, "topk_method": "group_limited_greedy"}
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        MLA_WEIGHTS,
        experts=True,
        mistakes={"no groups": {"topk_method": "greedy"}},
        no_llama_cpp="llama.cpp rates a group by its two best experts, which is how V3 does it; V2 takes the best",
    ),
    Case(
        "deepseek2-v3",
        "DeepseekV3ForCausalLM",
        MLA | V3 | {"rope_parameters": DEEPSEEK_YARN, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        MLA_WEIGHTS,
        experts=True,
        saved=SIGMOID,
        mistakes={
            "no groups": {"topk_group": 4},
            "weights of all": {"norm_topk_prob": False},
            "scale of the experts": {"routed_scaling_factor": 1.0},
            "scale of yarn": {"rope_parameters": DEEPSEEK_YARN | {"mscale_all_dim": 0.0}},
        },
    ),
    Case(
        "deepseek2-plain",
        "DeepseekV3ForCausalLM",
        MLA | V3 | rope() | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
        MLA_WEIGHTS,
        experts=True,
        saved=SIGMOID,
    ),
    Case(
        "deepseek2-glm",
        "Glm4MoeLiteForCausalLM",
        MLA | V3 | rope() | {"first_k_dense_replace": ..., "v_head_dim": 64, "routed_scaling_factor": 1.8},
        MLA_WEIGHTS,
        experts=True,
        saved=SIGMOID | {"first_k_dense_replace": 1},
    ),
)
