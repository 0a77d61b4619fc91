"""Qwen 1.5 and 2 with experts: their weights are not normalised, and a shared expert has a gate."""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_expert_width, read_experts, repeated
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    experts = read_experts(keys, normalised=False)
    if experts is not None:
        shared = keys.positive("expert_shared_feed_forward_length", keys.positive("feed_forward_length"))
        experts = replace(experts, shared_width=shared, shared_gate=True)
    feed_forward = FeedForwardSpec(read_expert_width(keys), experts=experts)
    return Body(repeated(keys, LayerSpec(read_attention(keys, "halves", bias_required=True), feed_forward)))
