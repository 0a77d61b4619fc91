"""Gemma 2: every other layer sees a window, scores and logits are capped, and norms stand on both sides."""

import math
from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, read_window_layers
from everwarm.model.spec import Body, LayerSpec

LAYERS_27B = 46
"""Of the one size whose scores are scaled by the width of the model and not by that of a head; no key says so."""


def read(keys: Keys) -> Body:
    attention = read_attention(keys, "halves")
    if keys.positive("block_count") == LAYERS_27B:
        attention = replace(attention, scale=1.0 / math.sqrt(keys.positive("embedding_length") // attention.heads))
    attention = replace(attention, softcap=keys.get("attn_logit_softcapping", 50.0))
    windowed = replace(attention, window=keys.positive("attention.sliding_window", 4096))
    everything = replace(attention, window=None)
    feed_forward = read_feed_forward(keys, "gelu")
    return Body(
        tuple(
            LayerSpec(windowed if window else everything, feed_forward, norm_after=True)
            for window in read_window_layers(keys, every=2)
        ),
        embedding_scale=math.sqrt(keys.positive("embedding_length")),
        logit_softcap=keys.get("final_logit_softcapping", 30.0),
    )
