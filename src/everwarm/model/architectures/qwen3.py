"""Qwen 3, dense: each head of queries and keys is normed before it is rotated; no biases."""

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, repeated
from everwarm.model.spec import Body, LayerSpec


def read(keys: Keys) -> Body:
    return Body(repeated(keys, LayerSpec(read_attention(keys, "halves", qk_norm="head"), read_feed_forward(keys))))
