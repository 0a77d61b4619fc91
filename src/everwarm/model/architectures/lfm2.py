"""LFM 2: short convolutions, a layer of attention now and then, perhaps with experts."""

from dataclasses import replace

from everwarm.model.metadata import (
    Keys,
    check_state,
    read_attention,
    read_expert_width,
    read_experts,
    read_feed_forward,
    read_kv_heads,
)
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec, ShortConvSpec


def read(keys: Keys) -> Body:
    dense = routed = read_feed_forward(keys)
    if (experts := read_experts(keys)) is not None:
        routed = FeedForwardSpec(read_expert_width(keys), experts=replace(experts, selection_bias=True))
    leading = keys.get("leading_dense_block_count", 0) if experts is not None else 0
    conv = ShortConvSpec(keys.positive("shortconv.l_cache"), keys.positive("embedding_length"))
    check_state(keys, conv.taps, conv.channels)
    layers = []
    for number, kv_heads in enumerate(read_kv_heads(keys)):
        feed_forward = dense if number < leading else routed
        if kv_heads:
            layers.append(LayerSpec(read_attention(keys, "halves", qk_norm="head", kv_heads=kv_heads), feed_forward))
        else:
            layers.append(LayerSpec(None, feed_forward, recurrent=conv))
    return Body(tuple(layers))
