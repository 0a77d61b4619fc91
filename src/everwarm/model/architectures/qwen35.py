"""Qwen 3 Next, 3.5 and their relatives: three layers of gated DeltaNet to one of attention, perhaps with experts."""

from dataclasses import replace

from everwarm.model.metadata import (
    Keys,
    read_attention,
    read_expert_width,
    read_experts,
    read_feed_forward,
    read_recurrent_layers,
    read_skipped,
    read_state_heads,
)
from everwarm.model.spec import Body, DeltaNetSpec, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    attention = replace(read_attention(keys, "halves", qk_norm="head"), output_gate=True)
    heads, key_heads, value_dim = read_state_heads(keys)
    first = keys.architecture == "qwen3next"  # later files have the value heads in another order
    delta_net = DeltaNetSpec(
        taps=keys.positive("ssm.conv_kernel"),
        key_heads=key_heads,
        value_heads=heads,
        key_dim=keys.positive("ssm.state_size"),
        value_dim=value_dim,
        interleaved=not first,
        joint=first,
    )
    experts = read_experts(keys)
    if experts is None:
        feed_forward = read_feed_forward(keys)
    else:
        shared = keys.get("expert_shared_feed_forward_length", 0)
        experts = replace(experts, shared_width=shared, shared_gate=shared > 0)
        feed_forward = FeedForwardSpec(read_expert_width(keys), experts=experts)
    skipped = read_skipped(keys)
    layers = tuple(
        LayerSpec(None, feed_forward, ffn_norm="post_attention_norm", recurrent=delta_net)
        if recurrent
        else LayerSpec(attention, feed_forward, ffn_norm="post_attention_norm")
        for recurrent in read_recurrent_layers(keys)
    )
    return Body(layers[: len(layers) - skipped], skipped_layers=skipped)
