"""Ministral 3 and its relatives: Llama with YaRN; queries of late positions are sharpened."""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, repeated
from everwarm.model.spec import Body, LayerSpec, Temperature


def read(keys: Keys) -> Body:
    attention = read_attention(keys, "adjacent")
    if (scale := keys.get("attention.temperature_scale", 0.0)) != 0.0:
        every = keys.positive("rope.scaling.original_context_length", keys.positive("context_length"))
        attention = replace(attention, temperature=Temperature(every, scale))
    return Body(repeated(keys, LayerSpec(attention, read_feed_forward(keys))))
