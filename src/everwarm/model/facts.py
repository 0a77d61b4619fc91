"""What can be said of a model before it is loaded: its config, and how large it is in use.

In: an open GGUF file. Out: a config whose tensors are all there (`read_model`), and figures that follow from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from everwarm.kernels.backend import FULL, STATE, WINDOW, Backend, reach
from everwarm.model import tensors
from everwarm.model.config import read_config
from everwarm.model.spec import ModelConfig
from everwarm.weights.cache.place import is_expert, outside_of_passes, place_of
from everwarm.weights.gguf.file import GGUFFile, TensorInfo


def read_model(file: GGUFFile, context: int | None = None) -> ModelConfig:
    """The config that a file describes; its tensors are cut into those that the layers use, and checked. Raises
    ModelError if it can't be run. `context` is how many tokens will be used at most.
    """
    embedding = file.stored.get(tensors.EMBEDDING)
    config = read_config(file.metadata, embedding.shape[0] if embedding else 0, len(file.stored), context)
    file.cut(tensors.cut(config, file.stored))
    tensors.check_tensors(config, file.tensors)
    return config


def active_parameters(config: ModelConfig, found: Mapping[str, TensorInfo]) -> int:
    """Parameters that a token uses: of the experts of a layer, as many as are chosen."""
    return round(sum(math.prod(info.shape) * _share(config, name) for name, info in found.items()))


def active_bytes(config: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Bytes that are read for a token, given the bytes of each tensor: a table of which one row is looked up is not
    counted.
    """
    looked_up = outside_of_passes(sizes)
    return round(sum(size * _share(config, name) for name, size in sizes.items() if name not in looked_up))


def _share(config: ModelConfig, name: str) -> float:
    """Of a tensor that a token uses, on average."""
    if not is_expert(name):
        return 1.0
    layer = place_of(name).layer
    feed_forward = None if layer is None else config.layers[layer].feed_forward
    experts = None if feed_forward is None else feed_forward.experts
    return 1.0 if experts is None else experts.used / experts.count


@dataclass(frozen=True, slots=True)
class KVSize:
    """What a backend keeps of a history, in all layers."""

    per_token: float  # of layers that see all tokens
    window_per_token: float  # of layers with a window
    reach: int  # tokens that the largest window sees
    state: int  # of layers with a state, for each sequence

    def at(self, tokens: int) -> float:
        """Bytes of a history of so many tokens while it is computed."""
        return tokens * self.per_token + min(tokens, self.reach) * self.window_per_token + self.state

    def fit_into(self, size: float) -> int:
        """How many tokens so many bytes hold."""
        size = max(0.0, size - self.state)
        within = int(size / (self.per_token + self.window_per_token))
        return within if within < self.reach else int((size - self.reach * self.window_per_token) / self.per_token)


def kv_size(config: ModelConfig, backend: Backend) -> KVSize:
    memory = backend.block_memory(config.kv_shape, config.state_shape)
    each = {kind: one.block_bytes / one.block_tokens for kind, one in memory.items()}
    state = memory[STATE].block_bytes if STATE in memory else 0
    return KVSize(each[FULL], each.get(WINDOW, 0.0), reach(config.kv_shape), state)
