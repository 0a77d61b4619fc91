"""Phi 3, 3.5 and 4-mini: rotary factors for short and for long contexts, of which one set is chosen when a model is
opened (`--context`): what is in the cache then never depends on how long a prompt happens to be.
"""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, repeated
from everwarm.model.spec import LONGROPE, Body, LayerSpec


def read(keys: Keys) -> Body:
    attention = read_attention(keys, "halves", longrope=True)
    assert attention.rope is not None
    long = keys.used_context > attention.rope.original_context
    attention = replace(attention, rope=replace(attention.rope, factors=LONGROPE[long]))
    return Body(repeated(keys, LayerSpec(attention, read_feed_forward(keys))))
