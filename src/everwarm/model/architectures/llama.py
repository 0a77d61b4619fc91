"""Llama 1 to 3.x, Mistral, SmolLM2, TinyLlama; with experts, Mixtral."""

from everwarm.model.metadata import Keys, read_attention, read_experts, read_feed_forward, repeated
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    feed_forward = FeedForwardSpec(read_feed_forward(keys).width, experts=read_experts(keys))
    return Body(repeated(keys, LayerSpec(read_attention(keys, "adjacent"), feed_forward)))
