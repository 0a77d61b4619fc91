"""Which tensors a model must have, with their shapes: checked once, so that the transformer can trust them.

Some files keep several matrices in one tensor: `cut` gives each its own name first.

A tensor that is missing, misshapen or of a type that we can't read is an error; so is one we don't know, because to
leave it out would compute something else than the file describes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from everwarm.errors import ModelError
from everwarm.model.spec import (
    LONGROPE,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    MambaSpec,
    ModelConfig,
    RecurrentSpec,
    ShortConvSpec,
)
from everwarm.weights.dequant.dequant import SUPPORTED
from everwarm.weights.gguf.file import TensorInfo
from everwarm.weights.types import TensorType

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"

_IGNORED = ("rotary_emb.inv_freq", "attn_rot_embd.weight")  # tables of old converters; they follow from the metadata

PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"
PER_LAYER_PRODUCT = "per_layer_model_proj.weight"
PER_LAYER_NORM = "per_layer_proj_norm.weight"

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)

Shapes = dict[str, tuple[int, ...]]


def cut(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the names that the layers use: those that hold several matrices are cut into them, and those of
    layers that are not computed are left out.
    """
    found: dict[str, TensorInfo] = {}
    skipped = tuple(f"blk.{len(config.layers) + number}." for number in range(config.skipped_layers))
    for name, info in tensors.items():
        if name.startswith(skipped):
            continue
        if name == "token_embd_norm.weight" and OUTPUT_NORM not in tensors:  # so LFM's files call it
            found[OUTPUT_NORM] = replace(info, name=OUTPUT_NORM)
            continue
        for piece in _pieces(config, info, tensors) or [info]:
            if piece.name in found or (piece.name != name and piece.name in tensors):
                raise ModelError(
                    f"tensor {name} holds {piece.name}, and the file has that elsewhere, too: it is damaged"
                )
            found[piece.name] = piece
    return found


def _pieces(config: ModelConfig, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """The matrices that a tensor holds; none if it is but one."""
    parts = info.name.split(".")
    if len(parts) < 3 or parts[0] != "blk" or not parts[1].isdecimal() or int(parts[1]) >= len(config.layers):
        return []
    layer, prefix = config.layers[int(parts[1])], f"blk.{parts[1]}."
    if layer.recurrent is not None and (found := _recurrent_pieces(layer.recurrent, info, prefix)):
        return found
    if info.name == f"{prefix}ffn_norm":  # so Falcon's files call it
        return [replace(info, name=f"{prefix}ffn_norm.weight")]
    if len(parts) != 4:
        return []
    name, kind = parts[2], parts[3]
    if layer.attention is not None and (found := _attention_pieces(layer.attention, info, prefix)):
        return found
    if layer.feed_forward is None:
        return []
    width = layer.feed_forward.width
    if name == "ffn_up" and info.shape[0] == 2 * width and f"{prefix}ffn_gate.weight" not in tensors:
        return _rows(info, [(f"{prefix}ffn_gate.{kind}", width), (f"{prefix}ffn_up.{kind}", width)])
    experts = layer.feed_forward.experts.count if layer.feed_forward.experts else 0
    if name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps") and kind != "scale":
        return _stack(info, experts, f"{prefix}{name.removesuffix('_exps')}", kind)
    if name == "ffn_gate_inp_shexp" and info.shape[:-1] == (1,):
        return [replace(info, shape=info.shape[1:])]
    if name == "ffn_gate_up_exps":
        both = [one for one in _stack(info, experts, f"{prefix}ffn_gate_up", kind) if one.shape[0] == 2 * width]
        return [
            piece
            for number, one in enumerate(both)
            for piece in _rows(
                one, [(f"{prefix}ffn_gate.{number}.{kind}", width), (f"{prefix}ffn_up.{number}.{kind}", width)]
            )
        ]
    return []


def _attention_pieces(attention: AttentionSpec, info: TensorInfo, prefix: str) -> list[TensorInfo]:
    name, kind = info.name.removeprefix(prefix).split(".")
    latent = attention.latent
    if name == "attn_qkv":
        rows = (attention.query_width, attention.kv_width, attention.kv_width)
        return _rows(info, [(f"{prefix}attn_{part}.{kind}", count) for part, count in zip("qkv", rows, strict=True)])
    if name in ("attn_k_b", "attn_v_b") and len(info.shape) == 3:
        return _stack(info, attention.heads, f"{prefix}{name}", kind)
    if name == "attn_kv_a_mqa" and latent is not None:
        rope = attention.head_dim - latent.plain
        return _rows(info, [(f"{prefix}attn_kv_a.{kind}", latent.rank), (f"{prefix}attn_k_rope.{kind}", rope)])
    return []


def _recurrent_pieces(spec: RecurrentSpec, info: TensorInfo, prefix: str) -> list[TensorInfo]:
    name = info.name.removeprefix(prefix)
    if name in ("ssm_conv1d.weight", "shortconv.conv.weight") and info.shape == (spec.channels, spec.taps):
        return [replace(info, shape=(spec.channels * spec.taps,))]
    if isinstance(spec, ShortConvSpec) and name == "shortconv.in_proj.weight":
        return _rows(info, [(f"{prefix}shortconv.{part}.weight", spec.channels) for part in "bcx"])
    if isinstance(spec, MambaSpec):
        if name == "ssm_in.weight":
            parts = ("z", spec.inner), ("xbc", spec.channels), ("step", spec.heads)
            return _rows(info, [(f"{prefix}ssm_{part}.weight", count) for part, count in parts])
        if name in ("ssm_a", "ssm_d", "ssm_norm.weight"):
            return [replace(info, shape=(math.prod(info.shape),))]
    return []


def _rows(info: TensorInfo, pieces: Sequence[tuple[str, int]]) -> list[TensorInfo]:
    """Names and rows, one behind the other."""
    total = sum(count for _, count in pieces)
    if info.shape[0] != total:
        raise ModelError(f"tensor {info.name}: {info.shape[0]:,} rows, but the metadata asks for {total:,}")
    starts = accumulate((count for _, count in pieces), initial=0)
    return [info.rows(name, first, count) for (name, count), first in zip(pieces, starts, strict=False)]


def _stack(info: TensorInfo, count: int, name: str, kind: str) -> list[TensorInfo]:
    """One matrix, or one bias, for each expert or head."""
    if len(info.shape) < 2 or info.shape[0] != count:
        raise ModelError(f"tensor {info.name}: shape {info.shape}, but the metadata asks for {count:,} of them")
    one = [info.rows(f"{name}.{number}.{kind}", number, 1) for number in range(info.shape[0])]
    return [replace(piece, shape=piece.shape[1:]) for piece in one]


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
        elif name.endswith("ffn_gate_inp.weight") and info.type not in FLOATS:
            raise ModelError(f"tensor {name}: a router of type {info.type.name} is not supported, only of floats")
    if sum(name in tensors for name in LONGROPE) == 1:
        raise ModelError(f"the file has only one of {' and '.join(LONGROPE)}: it is incomplete")
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
    optional: Shapes = {OUTPUT: (config.vocab_size, config.width)}
    for rope in {layer.attention.rope for layer in config.layers if layer.attention is not None}:
        if rope is not None:
            optional |= dict.fromkeys(LONGROPE if rope.factors in LONGROPE else [rope.factors], (rope.dims // 2,))
    if extra := config.per_layer_width:
        every = extra * len(config.layers)
        required |= {
            PER_LAYER_EMBEDDING: (config.vocab_size, every),
            PER_LAYER_PRODUCT: (every, config.width),
            PER_LAYER_NORM: (extra,),
        }
        for number in range(len(config.layers)):
            required |= {
                f"blk.{number}.inp_gate.weight": (extra, config.width),
                f"blk.{number}.proj.weight": (config.width, extra),
                f"blk.{number}.post_norm.weight": (config.width,),
            }
    for number, layer in enumerate(config.layers):
        needed, possible = _layer_shapes(layer, config.width)
        required |= {f"blk.{number}.{name}": shape for name, shape in needed.items()}
        optional |= {f"blk.{number}.{name}": shape for name, shape in possible.items()}
    return required, optional


def _layer_shapes(layer: LayerSpec, width: int) -> tuple[Shapes, Shapes]:
    required: Shapes = {}
    optional: Shapes = {}
    if layer.attention is not None:
        required, optional = _attention_shapes(layer.attention, width)
    if layer.recurrent is not None:
        needed, possible = _recurrent_shapes(layer.recurrent, width)
        required, optional = required | needed, optional | possible
    if layer.norm_before and (layer.attention is not None or layer.recurrent is not None):
        required |= {"attn_norm.weight": (width,)}
    if layer.feed_forward is not None:
        needed, possible = _feed_forward_shapes(layer, layer.feed_forward, width)
        required, optional = required | needed, optional | possible
    return required, optional


def _recurrent_shapes(spec: RecurrentSpec, width: int) -> tuple[Shapes, Shapes]:
    if isinstance(spec, ShortConvSpec):
        each = {f"shortconv.{part}.weight": (spec.channels, width) for part in "bcx"}
        conv: Shapes = {"shortconv.conv.weight": (spec.channels * spec.taps,)}
        return each | conv | {"shortconv.out_proj.weight": (width, spec.channels)}, {}
    heads = spec.value_heads if isinstance(spec, DeltaNetSpec) else spec.heads
    inner = spec.value_heads * spec.value_dim if isinstance(spec, DeltaNetSpec) else spec.inner
    required: Shapes = {
        "ssm_conv1d.weight": (spec.channels * spec.taps,),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_out.weight": (width, inner),
    }
    if isinstance(spec, MambaSpec):
        required |= {
            "ssm_z.weight": (inner, width),
            "ssm_xbc.weight": (spec.channels, width),
            "ssm_step.weight": (heads, width),
            "ssm_d": (heads,),
        }
        norm: Shapes = {"ssm_norm.weight": (inner,)}
        required |= norm if spec.norm else {}
        return required, {"ssm_conv1d.bias": (spec.channels,)} | norm
    required |= {
        "attn_qkv.weight": (spec.channels, width),
        "attn_gate.weight": (inner, width),
        "ssm_norm.weight": (spec.value_dim,),
    }
    small = ("ssm_ba",) if spec.joint else ("ssm_beta", "ssm_alpha")
    return required | {f"{name}.weight": (2 * heads // len(small), width) for name in small}, {}


def _feed_forward_shapes(layer: LayerSpec, spec: FeedForwardSpec, width: int) -> tuple[Shapes, Shapes]:
    required: Shapes = {}
    optional: Shapes = {}
    ffn, experts = spec.width, spec.experts
    parts = ("gate", "up", "down") if spec.gated else ("up", "down")
    outer = experts.latent_width or width if experts is not None else width
    for name in ("ffn_{}",) if experts is None else [f"ffn_{{}}.{number}" for number in range(experts.count)]:
        for part in parts:
            rows, columns = (outer, ffn) if part == "down" else (ffn, outer)
            required |= {f"{name.format(part)}.weight": (rows, columns)}
            optional |= {f"{name.format(part)}.bias": (rows,)}
    if layer.output_scale:
        optional |= {"layer_output_scale.weight": (1,)}
    if experts is not None:
        required |= _router_shapes(experts, width, spec.gated)
        if experts.expert_scales:
            optional |= {"ffn_down_exps.scale": (experts.count,)}
        optional |= {"ffn_gate_inp.bias": (experts.count,)}
    if layer.norm_before:
        required |= {f"{layer.ffn_norm}.weight": (width,)}
    if layer.norm_after:
        required |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    return required, optional


def _attention_shapes(attention: AttentionSpec, width: int) -> tuple[Shapes, Shapes]:
    if attention.latent is not None:
        return _latent_shapes(attention, attention.latent, width), {}
    queries, keys = attention.query_width, attention.kv_width
    asked = 2 * queries if attention.output_gate else queries
    required: Shapes = {"attn_q.weight": (asked, width), "attn_output.weight": (width, queries)}
    optional: Shapes = {"attn_output.bias": (width,)}
    stored: Shapes = {"attn_k.weight": (keys, width), "attn_v.weight": (keys, width)}
    if attention.kv_of is not None:  # files may have them all the same; they are not used
        optional |= stored
    elif attention.v_required:
        required |= stored
    else:
        required |= {"attn_k.weight": stored["attn_k.weight"]}
        optional |= {"attn_v.weight": stored["attn_v.weight"]}
    biases: Shapes = {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    (required if attention.bias_required else optional).update(biases)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "row"
        norms: Shapes = {
            "attn_q_norm.weight": (queries if whole else attention.head_dim,),
            "attn_k_norm.weight": (keys if whole else attention.head_dim,),
        }
        if attention.kv_of is not None:
            optional |= {"attn_k_norm.weight": norms.pop("attn_k_norm.weight")}
        (required if attention.qk_norm_required else optional).update(norms)
    if attention.sinks:
        required |= {"attn_sinks.weight": (attention.heads,)}
    return required, optional


def _latent_shapes(attention: AttentionSpec, latent: LatentSpec, width: int) -> Shapes:
    heads, rope = attention.heads, attention.head_dim - latent.plain
    shapes: Shapes = {
        "attn_kv_a.weight": (latent.rank, width),
        "attn_k_rope.weight": (rope, width),
        "attn_kv_a_norm.weight": (latent.rank,),
        "attn_output.weight": (width, heads * latent.value_dim),
    }
    if latent.query_rank:
        shapes |= {
            "attn_q_a.weight": (latent.query_rank, width),
            "attn_q_a_norm.weight": (latent.query_rank,),
            "attn_q_b.weight": (attention.query_width, latent.query_rank),
        }
    else:
        shapes |= {"attn_q.weight": (attention.query_width, width)}
    for head in range(heads):
        shapes |= {
            f"attn_k_b.{head}.weight": (latent.rank, latent.plain),
            f"attn_v_b.{head}.weight": (latent.value_dim, latent.rank),
        }
    return shapes


def _router_shapes(experts: ExpertsSpec, width: int, gated: bool) -> Shapes:
    shapes: Shapes = {"ffn_gate_inp.weight": (experts.count, width)}
    if experts.selection_bias:
        shapes |= {"exp_probs_b.bias": (experts.count,)}
    if shared := experts.shared_width:
        shapes |= {"ffn_gate_shexp.weight": (shared, width)} if gated else {}
        shapes |= {"ffn_up_shexp.weight": (shared, width), "ffn_down_shexp.weight": (width, shared)}
    if latent := experts.latent_width:
        shapes |= {"ffn_latent_down.weight": (latent, width), "ffn_latent_up.weight": (width, latent)}
    if beside := experts.beside:
        shapes |= {
            "ffn_gate.weight": (beside, width),
            "ffn_up.weight": (beside, width),
            "ffn_down.weight": (width, beside),
        }
        shapes |= {f"{name}.weight": (width,) for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")}
        shapes |= {"ffn_gate_inp.scale": (width,)}
    if experts.shared_gate:
        shapes |= {"ffn_gate_inp_shexp.weight": (width,)}
    return shapes
