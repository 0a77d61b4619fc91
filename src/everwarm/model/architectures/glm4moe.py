"""GLM 4.5 to 4.7 with experts: the first layers are dense, the others have routed experts and a shared one."""

from dataclasses import replace

from everwarm.model.metadata import (
    Keys,
    leading_dense,
    read_attention,
    read_expert_width,
    read_experts,
    read_feed_forward,
    refuse_sections,
)
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    refuse_sections(keys)
    attention = replace(read_attention(keys, "halves", qk_norm="head"), qk_norm_required=False)
    experts = read_experts(keys, routing="sigmoid", normalised=False)
    dense = LayerSpec(attention, read_feed_forward(keys), ffn_norm="post_attention_norm")
    routed = dense
    if experts is not None:
        width = read_expert_width(keys)
        experts = replace(experts, selection_bias=True, shared_width=width * keys.get("expert_shared_count", 0))
        routed = replace(dense, feed_forward=FeedForwardSpec(width, experts=experts))
    return leading_dense(keys, dense, routed)
