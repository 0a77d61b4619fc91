"""OLMo 2 and 3: norms stand behind attention and feed-forward only, and over whole rows of queries and keys. OLMo 3 has
windows in three layers of four, and stretches the context in the others only.
"""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, read_window_layers, repeated
from everwarm.model.spec import AttentionSpec, Body, LayerSpec, RopeSpec


def read(keys: Keys) -> Body:
    attention, feed_forward = read_attention(keys, "halves", qk_norm="row"), read_feed_forward(keys)

    def layer(attention: AttentionSpec) -> LayerSpec:
        return LayerSpec(attention, feed_forward, norm_before=False, norm_after=True)

    if attention.window is None:
        return Body(repeated(keys, layer(attention)))
    assert attention.rope is not None
    local = RopeSpec("halves", attention.rope.dims, keys.get("rope.freq_base_swa", attention.rope.base))
    windowed, everything = replace(attention, rope=local), replace(attention, window=None)
    return Body(tuple(layer(windowed if window else everything) for window in read_window_layers(keys, every=4)))
