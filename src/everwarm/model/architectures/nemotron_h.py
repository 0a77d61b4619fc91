"""Nemotron H: each layer is one of Mamba 2, attention or feed-forward, with one norm before it."""

from dataclasses import replace

from everwarm.errors import ModelError
from everwarm.model.metadata import Keys, check_width, read_attention, read_kv_heads, read_mamba
from everwarm.model.spec import Body, FeedForwardSpec, LayerSpec


def read(keys: Keys) -> Body:
    mamba = read_mamba(keys)
    layers = []
    widths = keys.per_layer("feed_forward_length", 0)
    for kv_heads, width in zip(read_kv_heads(keys), widths, strict=True):
        if kv_heads:
            attention = replace(read_attention(keys, "halves", kv_heads=kv_heads), rope=None)
            layers.append(LayerSpec(attention, None))
        elif width:
            if width < 0:
                raise ModelError(f"{keys.architecture}.feed_forward_length = {width}: the file is damaged")
            check_width(keys, width)
            layers.append(LayerSpec(None, FeedForwardSpec(width, gated=False), ffn_norm="attn_norm"))
        else:
            layers.append(LayerSpec(None, None, recurrent=mamba))
    return Body(tuple(layers))
