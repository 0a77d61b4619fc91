"""Gemma 4: heads of two sizes, keys that are values, shared keys and values, embeddings for each layer, experts."""

from typing import Any

from golden.oracles.case import Case

WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": WINDOWS * 2,
    "sliding_window": 19,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 260,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 100000.0, "partial_rotary_factor": 0.25},
    },
}
WEIGHTS = {
    r"[qk]_norm\.weight$": 0.5,  # scores have no other scale
    r"layer_scalar$": (0.5, 0.75, 0.875, 1.25),
    r"router\.scale$": (0.75, 1.0, 1.25, 1.5),
    r"per_expert_scale$": (0.5, 0.75, 1.25, 1.5),
    r"embed_tokens_per_layer": 0.5,
}

CASES = (
    Case(
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4 | {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        WEIGHTS,
        mistakes={"window of one more": {"sliding_window": 20}, "logits not capped": {"final_logit_softcapping": None}},
    ),
    Case(
        "gemma4-shared",
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "num_hidden_layers": 8,
            "layer_types": [*WINDOWS, *WINDOWS[1:], *WINDOWS],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 32,
            "use_double_wide_mlp": True,
        },
        WEIGHTS,
        mistakes={"window of one more": {"sliding_window": 20}},
    ),
    Case(
        "gemma4-experts",
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        WEIGHTS,
        experts=True,
        seed=3,
        mistakes={"another expert": {"top_k_experts": 3}},
    ),
)
