"""Llama 1 to 3.x, Mistral, SmolLM2, TinyLlama."""

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, repeated
from everwarm.model.spec import LayerSpec


def layers(keys: Keys) -> tuple[LayerSpec, ...]:
    return repeated(keys, LayerSpec(read_attention(keys, "adjacent"), read_feed_forward(keys)))
