"""The numerics id: a digest of everything but the weights that changes what a model computes.

In: the model's constants, its rotary frequencies and the backend's own description of its arithmetic (version of the
kernels, groups of activations, KV type; not the instruction set, which changes no bit). Out: a hexadecimal digest.
Keys and values that were computed under another id must not be used.
"""

import hashlib
import json

from everwarm.kernels.backend import Backend, Rotary
from everwarm.model.config import ModelConfig


def numerics_id(config: ModelConfig, rotary: Rotary, backend: Backend) -> str:
    """Names, vocabulary and context length are left out: they change no number."""
    said = {
        "backend": backend.numerics,
        "heads": [config.layers, config.width, config.heads, config.kv_heads, config.head_dim, config.ffn_width],
        "epsilon": config.norm_epsilon.hex(),
        "scale": config.attention_scale.hex(),
        "window": config.window,
        "pairing": rotary.pairing,
        "frequencies": rotary.frequencies.tobytes().hex(),
        "magnitude": float(rotary.magnitude).hex(),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
