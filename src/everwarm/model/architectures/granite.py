"""Granite 3 and 4: Llama with scales on embeddings, scores, what is added, and logits; perhaps with experts, perhaps
with layers of Mamba 2 instead of most of its attention.
"""

from dataclasses import replace

from everwarm.errors import ModelError
from everwarm.model.metadata import (
    Keys,
    read_attention,
    read_experts,
    read_feed_forward,
    read_kv_heads,
    read_mamba,
    repeated,
)
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    kv_heads = read_kv_heads(keys) if keys.architecture == "granitehybrid" else ()
    attention = read_attention(keys, "adjacent", kv_heads=max(kv_heads, default=None))
    if (scale := keys.get("attention.scale", 0.0)) != 0.0:
        attention = replace(attention, scale=scale)
    if not keys.get("rope.scaling.finetuned", 1):  # so these files say that positions are not encoded
        attention = replace(attention, rope=None)
    logit_scale = keys.require("logit_scale", 1.0)
    if logit_scale == 0.0:
        raise ModelError(f"{keys.architecture}.logit_scale = 0: logits can't be divided by it; the file is damaged")
    experts = read_experts(keys)
    if experts is not None:
        experts = replace(experts, shared_width=keys.get("expert_shared_feed_forward_length", 0))
    layer = LayerSpec(
        attention,
        FeedForwardSpec(read_feed_forward(keys).width, experts=experts),
        residual_scale=keys.get("residual_scale", 0.0) or 1.0,
    )
    mamba = read_mamba(keys) if not all(kv_heads) else None
    return Body(
        tuple(layer if heads else replace(layer, attention=None, recurrent=mamba) for heads in kv_heads)
        or repeated(keys, layer),
        embedding_scale=keys.get("embedding_scale", 0.0) or 1.0,
        logit_scale=1.0 / logit_scale,
    )
