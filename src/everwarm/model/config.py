"""GGUF metadata -> what a transformer needs to know about itself.

What differs between architectures is data: the `ARCHITECTURES` table and fields of `ModelConfig`, never a subclass. A
key that would change the numbers and that we don't implement (experts, an unknown rope scaling) is an error, never
ignored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast, get_args

from everwarm.errors import ModelError
from everwarm.kernels.backend import KVShape
from everwarm.types import Metadata

Pairing = Literal["adjacent", "halves"]
"""Which elements of a head rotate together: (0,1)(2,3)... as in llama's GGUF files, or (0,d/2)(1,d/2+1)... (NeoX)."""

GREATEST = 2**31 - 1
"""Of every count in the metadata: the kernels count in 32 bits."""

MOST_WIDTH = 1 << 24
"""Elements of a row of activations. The widest model has 53,248."""

Scaling = Literal["none", "linear", "yarn"]
Scalar = TypeVar("Scalar", int, float, str)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a name in `general.architecture` implies beyond the numbers in the metadata."""

    pairing: Pairing
    qkv_bias: bool  # must be there; where False, biases are used if the file has them


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(pairing="adjacent", qkv_bias=False),
    "qwen2": Architecture(pairing="halves", qkv_bias=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, before frequency factors (those are a tensor)."""

    pairing: Pairing
    dims: int  # elements of each head that rotate
    base: float
    scaling: Scaling
    factor: float  # how much longer the context is than in training
    original_context: int
    attention_factor: float  # yarn only: an extra factor on its magnitude


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer."""

    architecture: str
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    context: int
    norm_epsilon: float
    rope: RopeConfig
    window: int | None  # attention sees at most this many tokens back, itself included
    qkv_bias: bool

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def read_config(metadata: Metadata, vocab_size: int) -> ModelConfig:
    """The config that the file describes; `vocab_size` is the number of rows of the embedding table."""
    keys = _Keys(metadata)
    architecture = keys.architecture
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")

    if experts := keys.get("expert_count", 0):
        raise ModelError(f"{architecture}.expert_count = {experts}: mixtures of experts are not supported yet")
    if not keys.get("attention.causal", 1):
        raise ModelError(
            f"{architecture}.attention.causal is false: only causal (text-generating) models are supported"
        )

    width, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    kv_heads = keys.positive("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ModelError(f"{architecture}: {heads} attention heads can't be shared by {kv_heads} KV heads")
    head_dim = keys.positive("attention.key_length", width // heads)
    if (value_dim := keys.positive("attention.value_length", head_dim)) != head_dim:
        raise ModelError(
            f"{architecture}: value_length {value_dim} differs from key_length {head_dim}: not supported yet"
        )
    context = keys.positive("context_length")
    ffn_width = keys.positive("feed_forward_length")
    if (widest := max(width, heads * head_dim, ffn_width)) > MOST_WIDTH:
        raise ModelError(f"{architecture}: rows of {widest:,} elements, at most {MOST_WIDTH:,} are supported")
    return ModelConfig(
        architecture=architecture,
        name=str(metadata.get("general.name", "unnamed")),
        layers=keys.positive("block_count"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=ffn_width,
        vocab_size=vocab_size,
        context=context,
        norm_epsilon=keys.require("attention.layer_norm_rms_epsilon", 0.0),
        rope=_read_rope(keys, known.pairing, head_dim, context),
        window=keys.positive("attention.sliding_window") if keys.get("attention.sliding_window", 0) else None,
        qkv_bias=known.qkv_bias,
    )


def _read_rope(keys: "_Keys", pairing: Pairing, head_dim: int, context: int) -> RopeConfig:
    dims = keys.positive("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise ModelError(
            f"{keys.architecture}.rope.dimension_count = {dims}: must be even and at most the head's {head_dim}"
        )
    base = keys.get("rope.freq_base", 10000.0)
    # Files from before rope.scaling.* say scale_linear.
    factor = keys.get("rope.scaling.factor", 0.0) or keys.get("rope.scale_linear", 0.0) or 1.0
    scaling = keys.get("rope.scaling.type", "linear")
    if not (1 < base < math.inf and 0 < factor < math.inf):
        raise ModelError(
            f"{keys.architecture}: rope.freq_base {base} must be finite and above 1, scaling.factor {factor} above 0"
        )
    if scaling not in get_args(Scaling):
        raise ModelError(
            f"{keys.architecture}.rope.scaling.type = {scaling!r} is not supported; known are none, linear, yarn"
        )
    return RopeConfig(
        pairing=pairing,
        dims=dims,
        base=base,
        scaling="none" if factor == 1.0 else cast(Scaling, scaling),
        factor=factor,
        original_context=keys.positive("rope.scaling.original_context_length", context),
        attention_factor=keys.get("rope.scaling.attn_factor", 1.0),
    )


class _Keys:
    """Typed look-up of `<architecture>.<key>`."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise ModelError("general.architecture is missing: the file holds no model, perhaps only a vocabulary")
        self.architecture = architecture

    def get(self, key: str, default: Scalar) -> Scalar:
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if value is None:
            return default
        if isinstance(value, Sequence) and not isinstance(value, str):  # one value per layer
            if len(value) == 0 or any(item != value[0] for item in value):
                raise ModelError(f"{full} differs between layers: not supported yet")
            value = value[0]
        kind = type(default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is int and isinstance(value, bool):
            value = int(value)
        if not isinstance(value, kind):
            raise ModelError(f"{full} = {value!r}: expected {kind.__name__}")
        return value

    def require(self, key: str, like: Scalar) -> Scalar:
        if f"{self.architecture}.{key}" not in self.metadata:
            raise ModelError(f"{self.architecture}.{key} is missing from the file's metadata")
        return self.get(key, like)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.require(key, 0) if default is None else self.get(key, default)
        if not 1 <= value <= GREATEST:
            limit = "at least 1" if value < 1 else f"at most {GREATEST:,}"
            raise ModelError(f"{self.architecture}.{key} = {value:,}: must be {limit}; the file is damaged, or hostile")
        return value
