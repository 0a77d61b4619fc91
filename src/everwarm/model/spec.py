"""What a model is made of, as data: one spec per layer, and what is around the layers.

An architecture (`model.architectures`) reads these out of a file's metadata; the forward pass, the list of tensors, the
KV layout and the numerics id follow from them. A field that says nothing special has a default, so that a new one
changes nothing for models that do not use it.
"""

from dataclasses import dataclass
from typing import Literal

from everwarm.errors import ModelError
from everwarm.kernels.backend import KVShape

Pairing = Literal["adjacent", "halves"]
"""Which elements of a head rotate together: (0,1)(2,3)... as in llama's GGUF files, or (0,d/2)(1,d/2+1)... (NeoX)."""

Scaling = Literal["none", "linear", "yarn"]
Activation = Literal["silu", "gelu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, before frequency factors (those are a tensor)."""

    pairing: Pairing
    dims: int  # elements of each head that rotate
    base: float
    scaling: Scaling = "none"
    factor: float = 1.0  # how much longer the context is than in training
    original_context: int = 0  # yarn only
    attention_factor: float = 1.0  # yarn only: an extra factor on its magnitude


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float  # of the scores
    window: int | None = None  # a token sees at most this many tokens back, itself included
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay
    qk_norm: bool = False  # each head of queries and keys is normed before it is rotated
    bias_required: bool = False  # of q, k and v; where False, biases are used if the file has them

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A dense, gated feed-forward layer: down(activation(gate x) * up x)."""

    width: int
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Norm and attention, then norm and feed-forward, each added to what came in."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer."""

    architecture: str
    name: str
    width: int
    vocab_size: int
    context: int
    norm_epsilon: float
    layers: tuple[LayerSpec, ...]

    @property
    def kv_shape(self) -> KVShape:
        """Of all layers; raises ModelError if they differ."""
        groups = kv_groups(self.layers)
        if len(groups) > 1:
            raise ModelError(f"{self.architecture}: layers with KV of {len(groups)} shapes are not supported yet")
        return KVShape(len(self.layers), groups[0].kv_heads, groups[0].head_dim)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have one shape, so that a block of them is one buffer."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int


def kv_groups(layers: tuple[LayerSpec, ...]) -> tuple[KVGroup, ...]:
    """The KV layout that follows from the layers."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault((layer.attention.kv_heads, layer.attention.head_dim), []).append(number)
    return tuple(KVGroup(tuple(numbers), *shape) for shape, numbers in groups.items())
