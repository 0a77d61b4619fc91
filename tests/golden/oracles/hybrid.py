"""Families with recurrent state: gated DeltaNet, short convolutions, Mamba 2."""

from golden.oracles.case import Case
from golden.oracles.dense import GRANITE, rope

STATE = {
    r"A_log$": (-2.0, -1.0, 0.0, 1.0),  # how fast the state is forgotten: slowly in some heads
    r"dt_bias$": (-2.0, -1.5, -1.0, -0.5),
    r"\.D$": (0.5, 0.75, 1.0, 1.25),
    r"conv1d\.weight$": 1.4,
}
LONG = {"length": 4097, "step": 64}

DELTA = {
    **rope(100000.0, partial_rotary_factor=0.25),
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_hidden_layers": 5,
    "max_position_embeddings": 8192,
}
SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
SECTIONS = {**rope(100000.0, partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True)}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
LFM2 = {
    **rope(100000.0),
    "head_dim": ...,
    "hidden_size": 128,
    "conv_L_cache": 3,
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "tie_word_embeddings": True,
}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
OLD_KINDS = ["mamba", "mamba", "attention", "mamba", "attention"]
"""The same, as the converter calls them."""
FALCON = {
    "mamba_d_ssm": 128,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.75,
    "ssm_out_multiplier": 1.5,
    "mlp_multipliers": [0.75, 1.5],
    "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.5],
    "key_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.75,
}
MAMBA2 = {
    "head_dim": 32,
    "num_heads": 4,
    "n_groups": 1,
    "state_size": 32,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 32,
    "intermediate_size": ...,
    "num_attention_heads": ...,
    "num_key_value_heads": ...,
    "max_position_embeddings": ...,
}
NEMOTRON = {
    "num_hidden_layers": ...,
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 32,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.0,
}
NO_EXPERTS = dict.fromkeys(["num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"], ...)

CASES = (
    Case("qwen3next", "Qwen3NextForCausalLM", DELTA | SPARSE, STATE, norms_add_one=True, experts=True),
    Case("qwen35", "Qwen3_5ForCausalLM", DELTA | SECTIONS, STATE, norms_add_one=True),
    Case(
        "qwen35-mtp",
        "Qwen3_5ForCausalLM",
        DELTA | SECTIONS | {"num_hidden_layers": 4},
        STATE,
        norms_add_one=True,
        mtp=("mtp.layers.0.", "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
        saved={"mtp_num_hidden_layers": 1},
    ),
    Case("qwen35-long", "Qwen3_5ForCausalLM", DELTA | SECTIONS, STATE, norms_add_one=True, **LONG),
    Case("qwen35moe", "Qwen3_5MoeForCausalLM", DELTA | SECTIONS | SPARSE, STATE, norms_add_one=True, experts=True),
    Case(
        "lfm2",
        "Lfm2ForCausalLM",
        LFM2 | {"block_auto_adjust_ff_dim": False, "conv_bias": False},
        {r"conv\.conv\.weight$": 1.4},
        mistakes={"rope base": rope(1000.0)},
    ),
    Case(
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        LFM2
        | {
            "num_dense_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "use_expert_bias": True,
        },
        {r"conv\.conv\.weight$": 1.4},
        experts=True,
        mistakes={"no bias in the choice": {"use_expert_bias": False}},
    ),
    Case(
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | MAMBA
        | {"mamba_n_heads": 8, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"shared_intermediate_size": 96, "num_hidden_layers": 5, "layer_types": KINDS, "mamba_n_groups": 1},
        STATE,
        saved={"layer_types": OLD_KINDS},
        mistakes={"scale of the residual": {"residual_multiplier": 1.0}},
    ),
    Case(
        "granitehybrid-experts",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | MAMBA
        | {"mamba_n_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"shared_intermediate_size": 64, "num_hidden_layers": 5, "layer_types": KINDS, "mamba_n_groups": 1},
        STATE,
        experts=True,
        saved={"layer_types": OLD_KINDS},
    ),
    Case(
        "falcon-h1",
        "FalconH1ForCausalLM",
        rope(100000.0) | MAMBA | FALCON | {"mamba_rms_norm": False, "projectors_bias": False},
        STATE,
        mistakes={"scale of keys": {"key_multiplier": 1.0}},
    ),
    Case(
        "falcon-h1-norm",
        "FalconH1ForCausalLM",
        rope(100000.0) | MAMBA | FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        STATE,
    ),
    Case("mamba2", "Mamba2ForCausalLM", MAMBA2, STATE),
    Case("mamba2-groups", "Mamba2ForCausalLM", MAMBA2 | {"n_groups": 2}, STATE, norm_groups=2),
    Case("mamba2-long", "Mamba2ForCausalLM", MAMBA2, STATE, **LONG),
    Case(
        "nemotron_h",
        "NemotronHForCausalLM",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
        STATE,
        saved={"hybrid_override_pattern": "M-*M-", "model_type": "only the fields of this file", **NO_EXPERTS},
    ),
    Case(
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        NEMOTRON | NEMOTRON_EXPERTS,
        STATE,
        experts=True,
        mistakes={"scale of the experts": {"routed_scaling_factor": 1.0}},
    ),
    Case(
        "nemotron_h_moe-latent",
        "NemotronHForCausalLM",
        NEMOTRON | NEMOTRON_EXPERTS | {"moe_latent_size": 32},
        STATE,
        experts=True,
    ),
)
