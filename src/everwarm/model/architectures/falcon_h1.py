"""Falcon H1: in every layer attention and Mamba 2 side by side. Its many multipliers are in the weights already."""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, read_mamba, repeated
from everwarm.model.spec import Body, LayerSpec


def read(keys: Keys) -> Body:
    mamba = replace(read_mamba(keys), norm=False)
    return Body(repeated(keys, LayerSpec(read_attention(keys, "halves"), read_feed_forward(keys), recurrent=mamba)))
