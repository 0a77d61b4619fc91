"""Gemma 4, its text part: layers that see a window and layers that see everything have heads of other sizes; the last
layers use keys and values of earlier ones; tokens have embeddings of their own in each layer; experts stand beside a
dense path. Which of these a model has, its keys say.
"""

import math
from dataclasses import replace

from everwarm.errors import ModelError
from everwarm.model.metadata import (
    Keys,
    check_width,
    read_expert_width,
    read_experts,
    read_rope,
    read_window_layers,
)
from everwarm.model.spec import AttentionSpec, Body, FeedForwardSpec, LayerSpec, RopeSpec


def read(keys: Keys) -> Body:
    windows = read_window_layers(keys, every=6)
    count = len(windows)
    first_shared = count - keys.get("attention.shared_kv_layers", 0)
    widths = keys.per_layer("feed_forward_length", 0)
    check_width(keys, *widths)
    layers = []
    for number, attention in enumerate(_attentions(keys, windows)):
        if number >= first_shared:
            attention = replace(attention, kv_of=_last(keys, windows[:first_shared], windows[number]))
        layers.append(LayerSpec(attention, _feed_forward(keys, widths[number]), norm_after=True, output_scale=True))
    return Body(
        tuple(layers),
        embedding_scale=math.sqrt(keys.positive("embedding_length")),
        logit_softcap=keys.get("final_logit_softcapping", 0.0),
        per_layer_width=keys.get("embedding_length_per_layer_input", 0),
    )


def _attentions(keys: Keys, windows: tuple[bool, ...]) -> list[AttentionSpec]:
    heads, kv_heads = keys.per_layer("attention.head_count", 0), keys.per_layer("attention.head_count_kv", 0)
    everything, local = keys.positive("attention.key_length"), keys.positive("attention.key_length_swa")
    window, base = keys.positive("attention.sliding_window"), keys.get("rope.freq_base_swa", 10000.0)
    rope = read_rope(keys, "halves", everything)
    local_rope = RopeSpec("halves", keys.positive("rope.dimension_count_swa", local), base, factors="")
    found = []
    for number, windowed in enumerate(windows):
        if heads[number] < 1 or kv_heads[number] < 1 or heads[number] % kv_heads[number]:
            raise ModelError(
                f"{keys.architecture}: {heads[number]} attention heads of layer {number} can't be shared by "
                f"{kv_heads[number]} KV heads"
            )
        found.append(
            AttentionSpec(
                heads[number],
                kv_heads[number],
                local if windowed else everything,
                local_rope if windowed else rope,
                1.0,
                window if windowed else None,
                qk_norm="head",
                v_norm=True,
                v_required=False,
            )
        )
    check_width(keys, *(attention.query_width for attention in found))
    return found


def _feed_forward(keys: Keys, width: int) -> FeedForwardSpec:
    experts = read_experts(keys)
    if experts is None:
        return FeedForwardSpec(width, "gelu")
    return FeedForwardSpec(read_expert_width(keys), "gelu", replace(experts, beside=width, expert_scales=True))


def _last(keys: Keys, windows: tuple[bool, ...], windowed: bool) -> int:
    """The last of these layers that sees as far."""
    found = [number for number, window in enumerate(windows) if window == windowed]
    if not found:
        raise ModelError(f"{keys.architecture}: no layer before {len(windows)} has keys and values to be shared")
    return found[-1]
