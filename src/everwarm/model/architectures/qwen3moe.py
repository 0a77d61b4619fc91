"""Qwen 3 with experts."""

from everwarm.model.metadata import Keys, read_attention, read_expert_width, read_experts, repeated
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    feed_forward = FeedForwardSpec(read_expert_width(keys), experts=read_experts(keys))
    return Body(repeated(keys, LayerSpec(read_attention(keys, "halves", qk_norm="head"), feed_forward)))
