"""Typed look-up of a model's keys in GGUF metadata, and the parts of a spec that most architectures share.

A key that would change the numbers and that nobody reads is an error, never ignored: an architecture refuses what it
does not implement.
"""

import math
from collections.abc import Sequence
from typing import TypeVar, cast, get_args

from everwarm.errors import ModelError
from everwarm.model.spec import (
    Activation,
    AttentionSpec,
    Body,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    MambaSpec,
    Pairing,
    QKNorm,
    RopeSpec,
    Routing,
    Scaling,
)
from everwarm.types import Metadata

GREATEST = 2**31 - 1
"""Of every count in the metadata: the kernels count in 32 bits."""

MOST_WIDTH = 1 << 24
"""Elements of a row of activations. The widest model has 53,248."""

MOST_EXPERTS = 1024
"""Of a layer. The models with most have 512."""

GATING: dict[int, Routing] = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen"}
"""By the number that files have for it."""

MOST_STATE_BYTES = 1 << 28
"""Of one layer and sequence. Those of published models have 1 to 16 MiB."""

Scalar = TypeVar("Scalar", int, float, str)


class Keys:
    """Keys of the form `<architecture>.<key>`."""

    def __init__(self, metadata: Metadata, vocabulary: int = 0, context: int | None = None) -> None:
        """`vocabulary` is the number of tokens that it has, `context` how many will be used at most, if that is less
        than the model's own limit.
        """
        self.metadata = metadata
        self.vocabulary = vocabulary
        self._context = context
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

    def per_layer(self, key: str, default: Scalar) -> tuple[Scalar, ...]:
        """One value for each layer: the file has a list of them, or one for all."""
        full, count = f"{self.architecture}.{key}", self.positive("block_count")
        values = self.metadata.get(full)
        if not isinstance(values, Sequence) or isinstance(values, str):
            return (self.get(key, default),) * count
        if len(values) < count:
            raise ModelError(f"{full} has {len(values):,} values, the model has {count:,} layers")
        kind = type(default)
        found = [kind(value) if isinstance(value, (int, float)) else value for value in values[:count]]
        if not all(isinstance(value, kind) for value in found):
            raise ModelError(f"{full}: expected one {kind.__name__} for each layer")
        return cast(tuple[Scalar, ...], tuple(found))

    def numbers(self, key: str) -> Sequence[int]:
        """A list of whole numbers; empty if the file has none."""
        values = self.metadata.get(f"{self.architecture}.{key}", ())
        if (
            not isinstance(values, Sequence)
            or isinstance(values, str)
            or any(type(value) is not int for value in values)
        ):
            raise ModelError(f"{self.architecture}.{key}: expected a list of whole numbers")
        return cast(Sequence[int], values)

    @property
    def used_context(self) -> int:
        most = self.positive("context_length")
        return min(most, self._context or most)

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
    if not keys.get("attention.causal", 1):
        raise ModelError(
            f"{keys.architecture}.attention.causal is false: only causal (text-generating) models are supported"
        )


def check_width(keys: Keys, *widths: int) -> None:
    if (widest := max(widths)) > MOST_WIDTH:
        raise ModelError(f"{keys.architecture}: rows of {widest:,} elements, at most {MOST_WIDTH:,} are supported")


def read_attention(
    keys: Keys,
    pairing: Pairing,
    *,
    qk_norm: QKNorm = "none",
    bias_required: bool = False,
    longrope: bool = False,
    kv_heads: int | None = None,
) -> AttentionSpec:
    """Attention as most architectures have it, the same in every layer. `kv_heads` where they differ."""
    width, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    kv_heads = keys.positive("attention.head_count_kv", heads) if kv_heads is None else kv_heads
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
        rope=read_rope(keys, pairing, head_dim, longrope=longrope),
        scale=1.0 / math.sqrt(head_dim),
        window=keys.positive("attention.sliding_window") if keys.get("attention.sliding_window", 0) else None,
        qk_norm=qk_norm,
        bias_required=bias_required,
    )


def read_feed_forward(keys: Keys, activation: Activation = "silu") -> FeedForwardSpec:
    width = keys.positive("feed_forward_length")
    check_width(keys, width)
    return FeedForwardSpec(width, activation)


def read_experts(keys: Keys, *, routing: Routing = "softmax", normalised: bool = True) -> ExpertsSpec | None:
    """What the keys say about experts; None if there are none. Where the file is silent, it is as the caller says."""
    count = keys.get("expert_count", 0)
    if not count:
        return None
    count, used = keys.positive("expert_count"), keys.positive("expert_used_count")
    groups = keys.positive("expert_group_count", 1)
    groups_used = keys.positive("expert_group_used_count", groups)
    if count > MOST_EXPERTS or used > count or count % groups or groups_used > groups:
        raise ModelError(
            f"{keys.architecture}: {used:,} of {count:,} experts, {groups_used:,} of {groups:,} groups: at most "
            f"{MOST_EXPERTS:,} experts in equal groups are supported; the file is damaged, or hostile"
        )
    if used > count // groups * groups_used:
        raise ModelError(f"{keys.architecture}: {used:,} experts can't be chosen from {groups_used:,} groups")
    if gating := keys.get("expert_gating_func", 0):
        if gating not in GATING:
            raise ModelError(
                f"{keys.architecture}.expert_gating_func = {gating}: this way to route is not supported yet"
            )
        routing = GATING[gating]
    return ExpertsSpec(
        count,
        used,
        routing,
        bool(keys.get("expert_weights_norm", int(normalised))),
        keys.get("expert_weights_scale", 0.0) or 1.0,
        groups,
        groups_used,
    )


def read_expert_width(keys: Keys) -> int:
    width = keys.positive("expert_feed_forward_length", keys.positive("feed_forward_length"))
    check_width(keys, width)
    return width


def read_rope(keys: Keys, pairing: Pairing, head_dim: int, *, longrope: bool = False) -> RopeSpec:
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
    known = [kind for kind in get_args(Scaling) if kind != "longrope" or longrope]
    if scaling not in known:
        raise ModelError(
            f"{keys.architecture}.rope.scaling.type = {scaling!r} is not supported; known are {', '.join(known)}"
        )
    attention_factor = keys.get("rope.scaling.attn_factor", 1.0)
    if scaling == "yarn" and factor > 1.0:
        attention_factor /= 1.0 + 0.1 * keys.get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)
    return RopeSpec(
        pairing=pairing,
        dims=dims,
        base=base,
        scaling="none" if factor == 1.0 else cast(Scaling, scaling),
        factor=factor,
        original_context=keys.positive("rope.scaling.original_context_length", keys.positive("context_length")),
        attention_factor=attention_factor,
        fast=keys.get("rope.scaling.yarn_beta_fast", 32.0),
        slow=keys.get("rope.scaling.yarn_beta_slow", 1.0),
    )


def repeated(keys: Keys, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """A model whose layers are all alike."""
    return (layer,) * keys.positive("block_count")


def read_kv_heads(keys: Keys) -> tuple[int, ...]:
    """Of each layer; 0 for one without attention."""
    counts = keys.per_layer("attention.head_count_kv", 0)
    if any(not 0 <= count <= GREATEST for count in counts):
        raise ModelError(f"{keys.architecture}.attention.head_count_kv: {min(counts):,} heads; the file is damaged")
    return counts


def read_recurrent_layers(keys: Keys) -> tuple[bool, ...]:
    """Which layers have a state instead of attention. Unless the file says which, each fourth (or so) has attention."""
    key = "attention.recurrent_layers"
    if f"{keys.architecture}.{key}" in keys.metadata:
        return tuple(bool(value) for value in keys.per_layer(key, 0))
    every = keys.positive("full_attention_interval", 4)
    return tuple((number + 1) % every != 0 for number in range(keys.positive("block_count")))


def read_state_heads(keys: Keys) -> tuple[int, int, int]:
    """Heads with a state, groups of them, and elements of each head."""
    heads, groups = keys.positive("ssm.time_step_rank"), keys.positive("ssm.group_count")
    inner, state, taps = (keys.positive(f"ssm.{key}") for key in ("inner_size", "state_size", "conv_kernel"))
    channels = inner + 2 * groups * state
    check_width(keys, channels, heads)
    if heads % groups or inner % heads:
        raise ModelError(
            f"{keys.architecture}: {heads:,} heads with a state in {groups:,} groups, {inner:,} elements in all: "
            "they do not fit together; the file is damaged"
        )
    check_state(keys, taps, channels, inner * state)
    return heads, groups, inner // heads


def check_state(keys: Keys, taps: int, channels: int, elements: int = 0) -> None:
    """Of one layer and sequence: the last rows of a convolution over `taps` tokens, and what else it keeps."""
    if taps < 2:
        raise ModelError(f"{keys.architecture}: a convolution over {taps:,} token: the file is damaged")
    size = 4 * ((taps - 1) * channels + elements)
    if size > MOST_STATE_BYTES:
        raise ModelError(
            f"{keys.architecture}: a state of {size:,} bytes in each layer (a convolution of {channels:,} channels "
            f"over {taps:,} tokens, and {elements:,} numbers), at most {MOST_STATE_BYTES:,} are supported; the file is "
            "damaged, or hostile"
        )


def read_mamba(keys: Keys) -> MambaSpec:
    heads, groups, head_dim = read_state_heads(keys)
    return MambaSpec(keys.positive("ssm.conv_kernel"), heads, groups, head_dim, keys.positive("ssm.state_size"))


def read_window_layers(keys: Keys, every: int) -> tuple[bool, ...]:
    """Whether each layer sees a window only. Unless the file says which, each `every`-th sees everything."""
    key = "attention.sliding_window_pattern"
    given = keys.metadata.get(f"{keys.architecture}.{key}")
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(bool(value) for value in keys.per_layer(key, 0))
    every = keys.positive(key, every)
    return tuple((number + 1) % every != 0 for number in range(keys.positive("block_count")))


def read_skipped(keys: Keys) -> int:
    """Layers at the end that predict further tokens (MTP): they are part of the file, and not computed."""
    skipped = keys.get("nextn_predict_layers", 0)
    if not 0 <= skipped < keys.positive("block_count"):
        raise ModelError(f"{keys.architecture}.nextn_predict_layers = {skipped:,}: more than there are layers")
    return skipped


def leading_dense(keys: Keys, dense: LayerSpec, routed: LayerSpec) -> Body:
    """A model whose first layers are dense, while the others have experts."""
    skipped = read_skipped(keys)
    count, leading = keys.positive("block_count") - skipped, keys.get("leading_dense_block_count", 0)
    return Body(tuple(dense if number < leading else routed for number in range(count)), skipped_layers=skipped)


def refuse_sections(keys: Keys) -> None:
    """Rotary positions in sections are for images: such a file rotates other pairs than its relatives without them."""
    if any(keys.numbers("rope.dimension_sections")):
        raise ModelError(f"{keys.architecture}.rope.dimension_sections: rope in sections is not supported yet")
