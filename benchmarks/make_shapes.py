"""Make GGUF files of random weights in the shape of models that no one has to download, to measure speed with.

    python benchmarks/make_shapes.py TOKENIZER.gguf OUT.gguf moe|skewed|mla|gemma3|qwen35

Speed depends on shapes and tensor types, not on what the weights say. `moe` has about 1B active of 4B parameters (32
experts, 4 of them for each token). `skewed` has the same experts in fewer and narrower layers (about 1.3B parameters),
and its router prefers some of them: the k-th most popular expert of a layer is about 1 / k as likely as the first. The
weight cache is measured with it. `mla` is DeepSeek-V2-Lite with fewer and smaller experts (about 1B), `gemma3` has the
shape of Gemma 3 1B, `qwen35` that of Qwen 3.5 0.8B with another vocabulary. The tokenizer is that of the GGUF given.
Types are those of a Q4_K_M file: Q4_K, Q6_K for half of the values and down projections and for the output, Q5_0 where
rows are no multiple of 256.
"""

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quant_shape_to_byte_shape

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def attention(block: str, width: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    yield f"{block}.attn_norm.weight", (width,)
    yield f"{block}.attn_q.weight", (heads * head_dim, width)
    yield f"{block}.attn_k.weight", (kv_heads * head_dim, width)
    yield f"{block}.attn_v.weight", (kv_heads * head_dim, width)
    yield f"{block}.attn_output.weight", (width, heads * head_dim)
    yield f"{block}.ffn_norm.weight", (width,)


def dense(block: str, width: int, hidden: int, suffix: str = "") -> Shapes:
    yield f"{block}.ffn_gate{suffix}.weight", (hidden, width)
    yield f"{block}.ffn_up{suffix}.weight", (hidden, width)
    yield f"{block}.ffn_down{suffix}.weight", (width, hidden)


def experts(block: str, width: int, hidden: int, count: int) -> Shapes:
    yield f"{block}.ffn_gate_inp.weight", (count, width)
    yield f"{block}.ffn_gate_exps.weight", (count, hidden, width)
    yield f"{block}.ffn_up_exps.weight", (count, hidden, width)
    yield f"{block}.ffn_down_exps.weight", (count, width, hidden)


def moe(vocabulary: int, skewed: bool = False) -> tuple[str, dict[str, Any], Shapes]:
    width, layers, heads, kv_heads, head_dim, hidden, count = 2048, 24, 32, 8, 64, 768, 32
    if skewed:
        width, layers, heads, kv_heads = 1024, 16, 16, 4
    keys = {
        "block_count": layers, "context_length": 32768, "embedding_length": width, "feed_forward_length": hidden,
        "expert_feed_forward_length": hidden, "expert_count": count, "expert_used_count": 4,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip

    def tensors() -> Shapes:
        yield "token_embd.weight", (vocabulary, width)
        for layer in range(layers):
            block = f"blk.{layer}"
            yield from attention(block, width, heads, kv_heads, head_dim)
            yield f"{block}.attn_q_norm.weight", (head_dim,)
            yield f"{block}.attn_k_norm.weight", (head_dim,)
            yield from experts(block, width, hidden, count)
            if skewed:
                yield f"{block}.ffn_gate_inp.bias", (count,)
        yield "output_norm.weight", (width,)
        yield "output.weight", (vocabulary, width)

    return "qwen3moe", keys, tensors()


def popularity(count: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Biases of a router. The best of several scores is the k-th one in proportion to 1 / k if they have biases of
    -ln k and noise of a Gumbel distribution, whose deviation is 1.28; the noise is what the router makes of a row.
    """
    noise = ROUTER * math.sqrt(width)
    return -np.log(1 + rng.permutation(count)) * noise / 1.28


def mla(vocabulary: int) -> tuple[str, dict[str, Any], Shapes]:
    width, layers, heads, rank, plain, rope, value, hidden, count = 2048, 27, 16, 512, 128, 64, 128, 256, 12
    keys = {
        "block_count": layers, "context_length": 32768, "embedding_length": width, "feed_forward_length": 4096,
        "expert_feed_forward_length": hidden, "expert_count": count, "expert_used_count": 4, "expert_shared_count": 2,
        "expert_weights_scale": 1.0, "leading_dense_block_count": 1, "attention.head_count": heads,
        "attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank,
        "attention.key_length_mla": plain + rope, "attention.value_length_mla": value, "attention.kv_lora_rank": rank,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4, "rope.dimension_count": rope,
        "expert_gating_func": 1, "vocab_size": vocabulary,
    }  # fmt: skip

    def tensors() -> Shapes:
        yield "token_embd.weight", (vocabulary, width)
        for layer in range(layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (width,)
            yield f"{block}.attn_q.weight", (heads * (plain + rope), width)
            yield f"{block}.attn_kv_a_mqa.weight", (rank + rope, width)
            yield f"{block}.attn_kv_a_norm.weight", (rank,)
            yield f"{block}.attn_k_b.weight", (heads, rank, plain)
            yield f"{block}.attn_v_b.weight", (heads, value, rank)
            yield f"{block}.attn_output.weight", (width, heads * value)
            yield f"{block}.ffn_norm.weight", (width,)
            if layer == 0:
                yield from dense(block, width, 4096)
            else:
                yield from experts(block, width, hidden, count)
                yield from dense(block, width, 2 * hidden, "_shexp")
        yield "output_norm.weight", (width,)
        yield "output.weight", (vocabulary, width)

    return "deepseek2", keys, tensors()


def gemma3(vocabulary: int) -> tuple[str, dict[str, Any], Shapes]:
    width, layers, heads, kv_heads, head_dim, hidden = 1152, 26, 4, 1, 256, 6912
    keys = {
        "block_count": layers, "context_length": 32768, "embedding_length": width, "feed_forward_length": hidden,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.sliding_window": 512,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip

    def tensors() -> Shapes:
        yield "token_embd.weight", (vocabulary, width)
        for layer in range(layers):
            block = f"blk.{layer}"
            yield from attention(block, width, heads, kv_heads, head_dim)
            yield f"{block}.attn_q_norm.weight", (head_dim,)
            yield f"{block}.attn_k_norm.weight", (head_dim,)
            yield f"{block}.post_attention_norm.weight", (width,)
            yield from dense(block, width, hidden)
            yield f"{block}.post_ffw_norm.weight", (width,)
        yield "output_norm.weight", (width,)

    return "gemma3", keys, tensors()


def qwen35(vocabulary: int) -> tuple[str, dict[str, Any], Shapes]:
    width, layers, heads, kv_heads, head_dim, hidden, states, state = 1024, 24, 8, 2, 256, 3584, 16, 128
    inner = states * state
    keys = {
        "block_count": layers, "context_length": 32768, "embedding_length": width, "feed_forward_length": hidden,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4,
        "ssm.conv_kernel": 4, "ssm.state_size": state, "ssm.group_count": states, "ssm.time_step_rank": states,
        "ssm.inner_size": inner,
    }  # fmt: skip

    def tensors() -> Shapes:
        yield "token_embd.weight", (vocabulary, width)
        for layer in range(layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (width,)
            yield f"{block}.post_attention_norm.weight", (width,)
            yield from dense(block, width, hidden)
            if (layer + 1) % 4 == 0:
                yield f"{block}.attn_q.weight", (2 * heads * head_dim, width)
                yield f"{block}.attn_k.weight", (kv_heads * head_dim, width)
                yield f"{block}.attn_v.weight", (kv_heads * head_dim, width)
                yield f"{block}.attn_output.weight", (width, heads * head_dim)
                yield f"{block}.attn_q_norm.weight", (head_dim,)
                yield f"{block}.attn_k_norm.weight", (head_dim,)
                continue
            yield f"{block}.attn_qkv.weight", (3 * inner, width)
            yield f"{block}.attn_gate.weight", (inner, width)
            yield f"{block}.ssm_conv1d.weight", (3 * inner, 4)
            yield f"{block}.ssm_a", (states,)
            yield f"{block}.ssm_dt.bias", (states,)
            yield f"{block}.ssm_beta.weight", (states, width)
            yield f"{block}.ssm_alpha.weight", (states, width)
            yield f"{block}.ssm_norm.weight", (state,)
            yield f"{block}.ssm_out.weight", (width, inner)
        yield "output_norm.weight", (width,)

    return "qwen35", keys, tensors()


SHAPES = {"moe": moe, "skewed": partial(moe, skewed=True), "mla": mla, "gemma3": gemma3, "qwen35": qwen35}
ROUTER = 0.02  # deviation of its weights


def type_of(name: str, shape: tuple[int, ...], layer: int) -> gguf.GGMLQuantizationType:
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1 or "ffn_gate_inp" in name or "ssm_conv1d" in name:
        return kinds.F32
    if shape[-1] % 256:
        return kinds.Q5_0
    better = name.startswith("output") or (layer % 2 == 0 and ("ffn_down" in name or "attn_v." in name))
    return kinds.Q6_K if better else kinds.Q4_K


def blocks_of(kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """A thousand random blocks whose values are of ordinary size."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    found = np.empty((0, size), np.uint8)
    while len(found) < 1000:
        candidates = rng.integers(0, 256, (1 << 16, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            greatest = np.abs(dequantize(candidates, kind)).max(axis=-1)
        found = np.concatenate([found, candidates[(greatest > 0.02) & (greatest < 0.12)]])
    return found[:1000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    options = parser.parse_args()
    fields = {
        name: field
        for name, field in gguf.GGUFReader(options.tokenizer).fields.items()
        if name.startswith("tokenizer.")
    }
    architecture, keys, tensors = SHAPES[options.shape](len(fields["tokenizer.ggml.tokens"].contents()))
    writer = gguf.GGUFWriter(options.out, architecture)
    writer.add_name(f"random {options.shape}")
    for key, value in keys.items():
        kinds = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        kinds[type(value)](f"{architecture}.{key}", value)
    for name, field in fields.items():
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    rng = np.random.default_rng(0)
    known: dict[gguf.GGMLQuantizationType, np.ndarray] = {}
    parameters = 0
    for name, shape in tensors:
        parameters += math.prod(shape)
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        kind = type_of(name, shape, layer)
        if kind == gguf.GGMLQuantizationType.F32:
            if name.endswith("ffn_gate_inp.bias"):
                data = popularity(*shape, keys["embedding_length"], rng)
            elif name.endswith("ssm_a"):
                data = -np.ones(shape)
            else:
                data = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * ROUTER
            writer.add_tensor(name, data.astype(np.float32))
            continue
        if kind not in known:
            known[kind] = blocks_of(kind, rng)
        count = math.prod(shape) // gguf.GGML_QUANT_SIZES[kind][0]
        drawn = known[kind][rng.integers(0, 1000, count)]
        writer.add_tensor(name, drawn.reshape(quant_shape_to_byte_shape(shape, kind)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{options.out}: {parameters:,} parameters, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
