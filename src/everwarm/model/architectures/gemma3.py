"""Gemma 3, its text part: five layers see a window, with rotary frequencies of their own, and each sixth everything.
Heads of queries and keys are normed.
"""

import math
from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, read_window_layers, repeated
from everwarm.model.spec import AttentionSpec, Body, LayerSpec, RopeSpec

LAYERS_27B = 62
"""Of the one size whose scores are scaled by the width of the model and not by that of a head; no key says so."""


def read(keys: Keys) -> Body:
    attention = read_attention(keys, "halves", qk_norm="head")
    if keys.positive("block_count") == LAYERS_27B:
        attention = replace(attention, scale=1.0 / math.sqrt(keys.positive("embedding_length") // attention.heads))
    feed_forward = read_feed_forward(keys, "gelu")

    def layer(attention: AttentionSpec) -> LayerSpec:
        return LayerSpec(attention, feed_forward, norm_after=True)

    if attention.window is None:
        layers = repeated(keys, layer(attention))
    else:
        assert attention.rope is not None
        # The window's layers keep the frequencies of training: what stretches the context is for the others.
        local = RopeSpec("halves", attention.rope.dims, keys.get("rope.freq_base_swa", 10000.0))
        windowed, everything = replace(attention, rope=local), replace(attention, window=None)
        layers = tuple(layer(windowed if window else everything) for window in read_window_layers(keys, every=6))
    return Body(
        layers,
        embedding_scale=math.sqrt(keys.positive("embedding_length")),
        logit_softcap=keys.get("final_logit_softcapping", 0.0),
    )
