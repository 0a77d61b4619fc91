"""Which tensors a model must have, with their shapes: checked once, so that the transformer can trust them.

A tensor that is missing, misshapen or of a type that we can't read is an error; so is one we don't know, because to
leave it out would compute something else than the file describes.
"""

from collections.abc import Mapping

from everwarm.errors import ModelError
from everwarm.model.config import ModelConfig
from everwarm.weights.dequant import SUPPORTED
from everwarm.weights.gguf import TensorInfo

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

_IGNORED = ("rotary_emb.inv_freq", "attn_rot_embd.weight")  # tables of old converters; they follow from the metadata


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise ModelError unless `tensors` are those of this model."""
    if config.layers > len(tensors):  # before a list is made that is as long as the metadata say
        raise ModelError(f"block_count is {config.layers:,}, but the file has only {len(tensors):,} tensors")
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
            f"{len(unknown)} tensor(s) that a {config.architecture} model of {config.layers} layers does not have, "
            f"such as {unknown[0]}: a variant that is not supported"
        )


def expected_shapes(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(required, optional) tensors by name, shapes outermost first."""
    width, ffn = config.width, config.ffn_width
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    required: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width), OUTPUT_NORM: (width,)}
    optional: dict[str, tuple[int, ...]] = {OUTPUT: (config.vocab_size, width), ROPE_FACTORS: (config.rope.dims // 2,)}
    for layer in range(config.layers):
        block = f"blk.{layer}."
        required |= {
            block + "attn_norm.weight": (width,),
            block + "attn_q.weight": (queries, width),
            block + "attn_k.weight": (keys, width),
            block + "attn_v.weight": (keys, width),
            block + "attn_output.weight": (width, queries),
            block + "ffn_norm.weight": (width,),
            block + "ffn_gate.weight": (ffn, width),
            block + "ffn_up.weight": (ffn, width),
            block + "ffn_down.weight": (width, ffn),
        }
        (required if config.qkv_bias else optional).update(
            {block + "attn_q.bias": (queries,), block + "attn_k.bias": (keys,), block + "attn_v.bias": (keys,)}
        )
        optional |= {
            block + "attn_output.bias": (width,),
            block + "ffn_gate.bias": (ffn,),
            block + "ffn_up.bias": (ffn,),
            block + "ffn_down.bias": (width,),
        }
    return required, optional
