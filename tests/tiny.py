"""Tiny random models as real GGUF files, written with the `gguf` package. As a program: one, at the path given."""

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quant_shape_to_byte_shape

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class Tiny:
    """What to write. The vocabulary is the 256 bytes, three control tokens, and one token that is merged: zq."""

    architecture: str = "llama"
    type: str = "F32"  # of every matrix
    layers: int = 2
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 256
    context: int = 128
    tied: bool = True
    biases: bool = False
    rope_factors: bool = False
    qk_norm: bool = False
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)  # without the architecture's prefix; None removes a key
    drop: tuple[str, ...] = ()  # tensors to leave out
    add: dict[str, np.ndarray] = field(default_factory=dict)  # tensors to add
    template: str | None = CHATML
    sampling: dict[str, Any] = field(default_factory=dict)  # what the file recommends: `temp`, `top_k`, ...
    tokens: int | None = None  # pretend that the vocabulary has this many tokens

    @property
    def vocab(self) -> list[str]:
        return [*byte_alphabet(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "zq"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (len(self.vocab), self.width),
            "output_norm.weight": (self.width,),
        }
        if not self.tied:
            shapes["output.weight"] = (len(self.vocab), self.width)
        if self.rope_factors:
            shapes["rope_freqs.weight"] = (self.head_dim // 2,)
        for layer in range(self.layers):
            b = f"blk.{layer}."
            shapes |= {
                b + "attn_norm.weight": (self.width,),
                b + "attn_q.weight": (queries, self.width),
                b + "attn_k.weight": (keys, self.width),
                b + "attn_v.weight": (keys, self.width),
                b + "attn_output.weight": (self.width, queries),
                b + "ffn_norm.weight": (self.width,),
                b + "ffn_gate.weight": (self.ffn, self.width),
                b + "ffn_up.weight": (self.ffn, self.width),
                b + "ffn_down.weight": (self.width, self.ffn),
            }
            if self.qk_norm:
                shapes |= {b + "attn_q_norm.weight": (self.head_dim,), b + "attn_k_norm.weight": (self.head_dim,)}
            if self.biases:
                shapes |= {b + "attn_q.bias": (queries,), b + "attn_k.bias": (keys,), b + "attn_v.bias": (keys,)}
        return shapes

    def write(self, path: Path) -> dict[str, np.ndarray]:
        """Write the file; returns the weights in f32, as the gguf package dequantises them."""
        rng = np.random.default_rng(self.seed)
        writer = gguf.GGUFWriter(path, self.architecture)
        _add_metadata(writer, self)
        weights: dict[str, np.ndarray] = {}
        for name, shape in self.shapes().items():
            if name in self.drop:
                continue
            if len(shape) == 1:
                scale = 0.1 if name.endswith("bias") else 0.2
                data = (rng.standard_normal(shape) * scale + (not name.endswith("bias"))).astype(np.float32)
                weights[name] = np.abs(data) + 0.1 if name == "rope_freqs.weight" else data
                writer.add_tensor(name, weights[name])
            else:
                kind = gguf.GGMLQuantizationType[self.type]
                raw = random_blocks(rng, shape, kind)
                weights[name] = dequantize(raw, kind)
                writer.add_tensor(name, raw, raw_dtype=kind)
        for name, data in self.add.items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return weights


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Values of ordinary size in any type. Quantised: random bytes, of which blocks that decode to such are drawn."""
    if kind.name in ("F32", "F16", "BF16"):
        ordinary = (rng.standard_normal(shape) * 0.05).astype(np.float32)
        if kind.name == "BF16":
            return (ordinary.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return ordinary if kind.name == "F32" else ordinary.astype(np.float16)
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    drawn = rng.choice(ordinary_blocks(kind), int(np.prod(shape)) // elements)
    return drawn.reshape(quant_shape_to_byte_shape(shape, kind))


@cache
def ordinary_blocks(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of a quantised type that decode to ordinary values. They are found once: decoding candidates is slow."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = np.empty((0, size), np.uint8)
    while len(blocks) < 256:
        candidates = rng.integers(0, 256, (4096, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            greatest = np.abs(dequantize(candidates, kind)).max(axis=-1)
        blocks = np.concatenate([blocks, candidates[(greatest > 0.01) & (greatest < 0.3)]])
    return blocks


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_in = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(256)]


def _add_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    for name, recommended in tiny.sampling.items():
        getattr(writer, f"add_sampling_{name}")(recommended)
    values: dict[str, Any] = {
        "block_count": tiny.layers,
        "context_length": tiny.context,
        "embedding_length": tiny.width,
        "feed_forward_length": tiny.ffn,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": tiny.kv_heads,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    } | tiny.metadata
    for key, value in values.items():
        full = f"{tiny.architecture}.{key}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(full, value)
            case int():
                writer.add_uint32(full, value)
            case float():
                writer.add_float32(full, value)
            case str():
                writer.add_string(full, value)
            case list():
                writer.add_array(full, value)
    count = tiny.tokens or len(tiny.vocab)
    add_vocabulary(writer, [*tiny.vocab, *(f"extra{i}" for i in range(count))][:count], tiny.template)


def add_vocabulary(writer: gguf.GGUFWriter, tokens: list[str], template: str | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["z q"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)


if __name__ == "__main__":
    Tiny(type="Q4_0").write(Path(sys.argv[1]))
