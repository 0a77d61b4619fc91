"""Qwen 2 and 2.5: queries, keys and values have biases."""

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, repeated
from everwarm.model.spec import Body, LayerSpec


def read(keys: Keys) -> Body:
    return Body(repeated(keys, LayerSpec(read_attention(keys, "halves", bias_required=True), read_feed_forward(keys))))
