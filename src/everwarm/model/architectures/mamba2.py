"""Mamba 2: no attention at all."""

from everwarm.model.metadata import Keys, read_mamba, repeated
from everwarm.model.spec import Body, LayerSpec


def read(keys: Keys) -> Body:
    return Body(repeated(keys, LayerSpec(None, None, recurrent=read_mamba(keys))))
