"""gpt-oss: experts of clamped gates with biases everywhere, sinks, and a window in every other layer."""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_expert_width, read_experts, read_window_layers
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    attention = replace(read_attention(keys, "halves", bias_required=True), sinks=True)
    assert attention.rope is not None
    attention = replace(attention, rope=replace(attention.rope, whole_pairs=False))
    everything = replace(attention, window=None)
    experts = read_experts(keys, routing="softmax of the chosen", normalised=False)
    feed_forward = FeedForwardSpec(read_expert_width(keys), "clamped", experts)
    return Body(
        tuple(
            LayerSpec(attention if window else everything, feed_forward, ffn_norm="post_attention_norm")
            for window in read_window_layers(keys, every=2)
        )
    )
