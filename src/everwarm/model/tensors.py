"""Which tensors a model must have, with their shapes: checked once, so that the transformer can trust them.

A tensor that is missing, misshapen or of a type that we can't read is an error; so is one we don't know, because to
leave it out would compute something else than the file describes.
"""

from collections.abc import Mapping

from everwarm.errors import ModelError
from everwarm.model.spec import LayerSpec, ModelConfig
from everwarm.weights.dequant.dequant import SUPPORTED
from everwarm.weights.gguf.file import TensorInfo

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

_IGNORED = ("rotary_emb.inv_freq", "attn_rot_embd.weight")  # tables of old converters; they follow from the metadata

Shapes = dict[str, tuple[int, ...]]


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise ModelError unless `tensors` are those of this model."""
    required, optional = expected_shapes(config)
    for name, shape in (required | optional).items():
        info = tensors.get(name)
        if info is None:
            if name in required:
                raise ModelError(
                    f"tensor {name} is missing: the file is incomplete or not a {config.architecture} model"
                )
        elif info.shape != shape:
            raise ModelError(f"tensor {name}: shape {info.shape}, but the metadata asks for {shape}")
        elif info.type not in SUPPORTED:
            readable = ", ".join(sorted(kind.name for kind in SUPPORTED))
            raise ModelError(f"tensor {name}: type {info.type.name} is not supported; supported are {readable}")
    unknown = [
        name for name in tensors if name not in required and name not in optional and not name.endswith(_IGNORED)
    ]
    if unknown:
        raise ModelError(
            f"{len(unknown)} tensor(s) that a {config.architecture} model of {len(config.layers)} layers does not "
            f"have, such as {unknown[0]}: a variant that is not supported"
        )


def expected_shapes(config: ModelConfig) -> tuple[Shapes, Shapes]:
    """(required, optional) tensors by name, shapes outermost first."""
    required: Shapes = {EMBEDDING: (config.vocab_size, config.width), OUTPUT_NORM: (config.width,)}
    optional: Shapes = {
        OUTPUT: (config.vocab_size, config.width),
        ROPE_FACTORS: (config.layers[0].attention.rope.dims // 2,),
    }
    for number, layer in enumerate(config.layers):
        needed, possible = _layer_shapes(layer, config.width)
        required |= {f"blk.{number}.{name}": shape for name, shape in needed.items()}
        optional |= {f"blk.{number}.{name}": shape for name, shape in possible.items()}
    return required, optional


def _layer_shapes(layer: LayerSpec, width: int) -> tuple[Shapes, Shapes]:
    attention, ffn = layer.attention, layer.feed_forward.width
    queries, keys = attention.query_width, attention.kv_width
    required: Shapes = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (queries, width),
        "attn_k.weight": (keys, width),
        "attn_v.weight": (keys, width),
        "attn_output.weight": (width, queries),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (ffn, width),
        "ffn_up.weight": (ffn, width),
        "ffn_down.weight": (width, ffn),
    }
    optional: Shapes = {
        "attn_output.bias": (width,),
        "ffn_gate.bias": (ffn,),
        "ffn_up.bias": (ffn,),
        "ffn_down.bias": (width,),
    }
    biases: Shapes = {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    (required if attention.bias_required else optional).update(biases)
    if attention.qk_norm:
        required |= {"attn_q_norm.weight": (attention.head_dim,), "attn_k_norm.weight": (attention.head_dim,)}
    return required, optional
