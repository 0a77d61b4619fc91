"""The numerics id: a digest of everything but the weights that changes what a model computes.

In: the model's specs, its rotary frequencies and the backend's own description of its arithmetic (version of the
kernels, groups of activations, KV type; not the instruction set, which changes no bit). Out: a hexadecimal digest.
Keys and values that were computed under another id must not be used.
"""

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass

from everwarm.kernels.backend import Backend, Rotary
from everwarm.model.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig


def numerics_id(
    config: ModelConfig, rotaries: Sequence[Rotary], backend: Backend, tensor_types: Collection[str] = ()
) -> str:
    """Names, vocabulary and context length are left out: they change no number."""
    said: dict[str, object] = {"backend": backend.numerics, "epsilon": config.norm_epsilon.hex()}
    for name in ("embedding_scale", "logit_scale", "logit_softcap", "per_layer_width"):
        if (value := getattr(config, name)) != ModelConfig.__dataclass_fields__[name].default:
            said[name] = float(value).hex()
    if not backend.changed_types.isdisjoint(tensor_types):
        said["products"] = "from bits"
    if (plain := _plain(config)) is not None and plain.attention is not None and plain.feed_forward is not None:
        attention = plain.attention
        rotary = rotaries[0]
        said |= {
            "heads": [
                len(config.layers), config.width, attention.heads, attention.kv_heads, attention.head_dim,
                plain.feed_forward.width,
            ],
            "scale": attention.scale.hex(),
            "window": attention.window,
            "pairing": rotary.pairing,
            "frequencies": rotary.frequencies.tobytes().hex(),
            "magnitude": float(rotary.magnitude).hex(),
        }  # fmt: skip
    else:
        said |= {
            "width": config.width,
            "layers": [_said(layer) for layer in config.layers],
            "rotary": [
                [rotary.pairing, rotary.frequencies.tobytes().hex(), float(rotary.magnitude).hex()]
                for rotary in rotaries
            ],
        }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _said(spec: object) -> dict[str, object]:
    """Every field of a spec that is not at its default: a field that is added later changes no id by itself."""
    assert is_dataclass(spec)
    said: dict[str, object] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            said[field.name] = _said(value) if is_dataclass(value) else value
    return said


def _plain(config: ModelConfig) -> LayerSpec | None:
    """The one layer that all are like, if it is as simple as the first models that could be run: their ids, and with
    them the agents that people have, must not change when a spec gets another field.
    """
    first = config.layers[0]
    attention = first.attention
    if attention is None or first.feed_forward is None:
        return None
    plain = LayerSpec(
        AttentionSpec(
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.rope,
            1.0 / math.sqrt(attention.head_dim),
            attention.window,
            bias_required=attention.bias_required,
        ),
        FeedForwardSpec(first.feed_forward.width),
    )
    return plain if all(layer == plain for layer in config.layers) else None
