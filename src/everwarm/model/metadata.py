"""Typed look-up of a model's keys in GGUF metadata, and the parts of a spec that most architectures share.

A key that would change the numbers and that nobody reads is an error, never ignored: an architecture refuses what it
does not implement.
"""

import math
from collections.abc import Sequence
from typing import TypeVar, cast, get_args

from everwarm.errors import ModelError
from everwarm.model.spec import AttentionSpec, FeedForwardSpec, LayerSpec, Pairing, RopeSpec, Scaling
from everwarm.types import Metadata

GREATEST = 2**31 - 1
"""Of every count in the metadata: the kernels count in 32 bits."""

MOST_WIDTH = 1 << 24
"""Elements of a row of activations. The widest model has 53,248."""

Scalar = TypeVar("Scalar", int, float, str)


class Keys:
    """Keys of the form `<architecture>.<key>`."""

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


def refuse_variants(keys: Keys) -> None:
    """What no architecture of ours computes."""
    if experts := keys.get("expert_count", 0):
        raise ModelError(f"{keys.architecture}.expert_count = {experts}: mixtures of experts are not supported yet")
    if not keys.get("attention.causal", 1):
        raise ModelError(
            f"{keys.architecture}.attention.causal is false: only causal (text-generating) models are supported"
        )


def check_width(keys: Keys, *widths: int) -> None:
    if (widest := max(widths)) > MOST_WIDTH:
        raise ModelError(f"{keys.architecture}: rows of {widest:,} elements, at most {MOST_WIDTH:,} are supported")


def read_attention(
    keys: Keys, pairing: Pairing, *, qk_norm: bool = False, bias_required: bool = False
) -> AttentionSpec:
    """Attention that is the same in every layer."""
    width, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    kv_heads = keys.positive("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ModelError(f"{keys.architecture}: {heads} attention heads can't be shared by {kv_heads} KV heads")
    head_dim = keys.positive("attention.key_length", width // heads)
    if (value_dim := keys.positive("attention.value_length", head_dim)) != head_dim:
        raise ModelError(
            f"{keys.architecture}: value_length {value_dim} differs from key_length {head_dim}: not supported yet"
        )
    check_width(keys, width, heads * head_dim)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(keys, pairing, head_dim),
        scale=1.0 / math.sqrt(head_dim),
        window=keys.positive("attention.sliding_window") if keys.get("attention.sliding_window", 0) else None,
        qk_norm=qk_norm,
        bias_required=bias_required,
    )


def read_feed_forward(keys: Keys) -> FeedForwardSpec:
    width = keys.positive("feed_forward_length")
    check_width(keys, width)
    return FeedForwardSpec(width)


def read_rope(keys: Keys, pairing: Pairing, head_dim: int) -> RopeSpec:
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
    return RopeSpec(
        pairing=pairing,
        dims=dims,
        base=base,
        scaling="none" if factor == 1.0 else cast(Scaling, scaling),
        factor=factor,
        original_context=keys.positive("rope.scaling.original_context_length", keys.positive("context_length")),
        attention_factor=keys.get("rope.scaling.attn_factor", 1.0),
    )


def repeated(keys: Keys, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """A model whose layers are all alike."""
    return (layer,) * keys.positive("block_count")
