"""DeepSeek V2, V3 and R1, GLM 4.7 Flash and other models with MLA: keys and values are made of one latent per
token. The first layers are dense, the others have routed experts and shared ones.
"""

import math
from dataclasses import replace

from everwarm.errors import ModelError
from everwarm.model.metadata import (
    Keys,
    check_width,
    leading_dense,
    read_expert_width,
    read_experts,
    read_feed_forward,
    read_rope,
)
from everwarm.model.spec import AttentionSpec, Body, FeedForwardSpec, LatentSpec, LayerSpec, Routing, Temperature

GLM_47_FLASH_VOCABULARY = 154_880
"""Files of this model do not say that its router is a sigmoid."""


def read(keys: Keys) -> Body:
    attention = _attention(keys)
    dense = LayerSpec(attention, read_feed_forward(keys))
    unsaid: Routing = "sigmoid" if keys.vocabulary == GLM_47_FLASH_VOCABULARY else "softmax"
    experts = read_experts(keys, routing=unsaid, normalised=False)
    routed = dense
    if experts is not None:
        width = read_expert_width(keys)
        shared = width * keys.get("expert_shared_count", 0)
        experts = replace(experts, selection_bias=experts.routing == "sigmoid", shared_width=shared)
        routed = LayerSpec(attention, FeedForwardSpec(width, experts=experts))
    return leading_dense(keys, dense, routed)


def _attention(keys: Keys) -> AttentionSpec:
    heads, rank = keys.positive("attention.head_count"), keys.positive("attention.kv_lora_rank")
    if f"{keys.architecture}.attention.key_length_mla" not in keys.metadata:
        raise ModelError(
            f"{keys.architecture}.attention.key_length_mla is missing: the file was made before the projections of MLA "
            "were split; convert it anew, or fetch a newer one"
        )
    head_dim, value_dim = keys.positive("attention.key_length_mla"), keys.positive("attention.value_length_mla")
    rope = read_rope(keys, "adjacent", head_dim)
    check_width(keys, keys.positive("embedding_length"), heads * (rank + rope.dims), heads * value_dim)
    scale = 1.0 / math.sqrt(head_dim)
    multiplier = keys.get("rope.scaling.yarn_log_multiplier", 0.0)
    if rope.scaling == "yarn" and rope.factor > 1.0 and multiplier:
        # What YaRN would multiply queries and keys by, these models multiply scores by; files have a tenth of it.
        scale *= (1.0 + multiplier * math.log(rope.factor)) ** 2
        rope = replace(rope, attention_factor=1.0 / (1.0 + 0.1 * math.log(rope.factor)))
    temperature = None
    if (sharpen := keys.get("attention.temperature_scale", 0.0)) != 0.0:
        temperature = Temperature(keys.positive("attention.temperature_length"), sharpen)
    latent = LatentSpec(rank, head_dim - rope.dims, value_dim, keys.get("attention.q_lora_rank", 0))
    return AttentionSpec(heads, 1, head_dim, rope, scale, temperature=temperature, latent=latent)
