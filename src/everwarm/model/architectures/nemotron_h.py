"""Nemotron H: each layer is one of Mamba 2, attention or feed-forward, with one norm before it.

With experts (`nemotron_h_moe`), every feed-forward has them and a shared one; none has a gate. In some models they work
on a shorter row, the latent.
"""

from dataclasses import replace

from everwarm.errors import ModelError
from everwarm.model.metadata import Keys, check_width, read_attention, read_experts, read_kv_heads, read_mamba
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    mamba, experts = read_mamba(keys), _read_experts(keys)
    layers = []
    widths = keys.per_layer("feed_forward_length", 0)
    for kv_heads, width in zip(read_kv_heads(keys), widths, strict=True):
        if kv_heads:
            attention = replace(read_attention(keys, "halves", kv_heads=kv_heads), rope=None)
            layers.append(LayerSpec(attention, None))
        elif width:
            if width < 0:
                raise ModelError(f"{keys.architecture}.feed_forward_length = {width}: the file is damaged")
            check_width(keys, width)
            feed_forward = experts or FeedForwardSpec(width, gated=False)
            layers.append(LayerSpec(None, feed_forward, ffn_norm="attn_norm"))
        else:
            layers.append(LayerSpec(None, None, recurrent=mamba))
    return Body(tuple(layers))


def _read_experts(keys: Keys) -> FeedForwardSpec | None:
    experts = read_experts(keys, routing="sigmoid", normalised=False)
    if experts is None:
        return None
    width, shared, latent = keys.positive("expert_feed_forward_length"), 0, 0
    if keys.get("expert_shared_count", 1):
        shared = keys.positive("expert_shared_feed_forward_length")
    if keys.get("moe_latent_size", 0):
        latent = keys.positive("moe_latent_size")
    check_width(keys, width, shared, latent)
    experts = replace(experts, selection_bias=True, shared_width=shared, latent_width=latent)
    return FeedForwardSpec(width, experts=experts, gated=False)
