"""Make a llama-shaped GGUF of random weights, in several quantisations, to measure speed with.

Speed depends on shapes and tensor types, not on what the weights say, so a model of the 1B class (2048 wide, 16 layers,
32 heads over 8 of keys and values, tied output) needs no download: the tokenizer comes from the GGUF given, everything
else from a seed. What it generates is noise. llama.cpp does the quantising, so that the mix of tensor types is the one
people meet in files of that name; K-quants need widths that are multiples of 256, else llama.cpp takes other types.
Types of few bits, for which llama.cpp wants to know more of the weights, are written as random blocks: every matrix
is of that type, and llama.cpp is not needed.

    .venv-peers/bin/python benchmarks/make_model.py SMOLLM2.gguf OUTDIR --types Q4_0,Q4_K_M,Q8_0
    python benchmarks/make_model.py SMOLLM2.gguf OUTDIR --types Q2_K,Q3_K,IQ2_XXS,IQ3_S,IQ4_XS,IQ4_NL,MXFP4

writes OUTDIR/random-1b.Q4_0.gguf and so on; the F16 they are made of (2.2 GB) stays only when it is asked for. A small
one for tests: --name random-tiny --width 256 --layers 2 --heads 4 --kv-heads 2 --feed-forward 512.
"""

import argparse
import ctypes
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from random_blocks import random_blocks

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")  # by llama.cpp
RANDOM_BLOCKS = (
    *("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
TYPES = ("F16", *QUANTISED, *RANDOM_BLOCKS)
FILE_TYPES = {"Q3_K": "MOSTLY_Q3_K_M", "MXFP4": "MOSTLY_MXFP4_MOE"}  # where the file's type has another name
WEIGHT_SCALE = 0.02  # what llama and its kin are initialised with


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    context: int
    vocabulary: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the file; a shape of one dimension is a norm's weight."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocabulary, self.width)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (self.width,)
            yield f"{block}.attn_q.weight", (query, self.width)
            yield f"{block}.attn_k.weight", (key_value, self.width)
            yield f"{block}.attn_v.weight", (key_value, self.width)
            yield f"{block}.attn_output.weight", (self.width, query)
            yield f"{block}.ffn_norm.weight", (self.width,)
            yield f"{block}.ffn_gate.weight", (self.feed_forward, self.width)
            yield f"{block}.ffn_up.weight", (self.feed_forward, self.width)
            yield f"{block}.ffn_down.weight", (self.width, self.feed_forward)
        yield "output_norm.weight", (self.width,)

    def parameters(self) -> int:
        return sum(math.prod(dimensions) for _, dimensions in self.tensors())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a random-weight llama-shaped GGUF.")
    parser.add_argument("tokenizer", type=Path, help="GGUF whose tokenizer is taken")
    parser.add_argument("out", type=Path, help="directory for the models")
    parser.add_argument("--types", default="Q4_0,Q4_K_M,Q8_0", help=f"comma-separated, of {', '.join(TYPES)}")
    parser.add_argument("--name", default="random-1b")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--feed-forward", type=int, default=8192)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()

    types = options.types.split(",")
    if unknown := [name for name in types if name not in TYPES]:
        parser.error(f"--types: {', '.join(unknown)} unknown; choose from {', '.join(TYPES)}")
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    try:
        tokenizer = tokenizer_fields(options.tokenizer)
    except (OSError, ValueError) as error:
        parser.error(f"{options.tokenizer}: no tokenizer could be read ({error})")
    shape = Shape(
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        feed_forward=options.feed_forward,
        context=options.context,
        vocabulary=len(tokenizer["tokenizer.ggml.tokens"].contents()),
    )

    options.out.mkdir(parents=True, exist_ok=True)
    targets = {name: options.out / f"{options.name}.{name}.gguf" for name in types}
    source = options.out / f"{options.name}.F16.gguf.partial"
    try:
        if not all(name in RANDOM_BLOCKS for name in targets):
            progress(f"writing {shape.parameters():,} random weights")
            write(source, shape, tokenizer, options.name, options.seed, "F16")
        for name, path in targets.items():
            if name in QUANTISED:
                progress(f"quantising to {name}")
                quantise(source, path, name, options.threads)
            elif name in RANDOM_BLOCKS:
                progress(f"writing {shape.parameters():,} random weights of {name}")
                write(path, shape, tokenizer, options.name, options.seed, name)
        if "F16" in targets:
            source.replace(targets["F16"])
    finally:
        source.unlink(missing_ok=True)
    sizes = {path.name: path.stat().st_size for path in targets.values()}
    for file, size_bytes in sizes.items():
        print(f"{file:32}{size_bytes:16,} bytes")
    print(json.dumps({"made": "random model", "seed": options.seed, "size_bytes": sizes}))


def tokenizer_fields(path: Path) -> dict[str, gguf.ReaderField]:
    """All metadata below `tokenizer.`: tokens, merges, types, ids, pre-tokenizer, chat template."""
    fields = {name: field for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError("it has no tokenizer.ggml.tokens")
    return fields


def write(
    path: Path, shape: Shape, tokenizer: dict[str, gguf.ReaderField], name: str, seed: int, type_name: str
) -> None:
    """Two passes over the tensors, first their descriptions, then the data, so that one at a time is in memory."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES.get(type_name, f"MOSTLY_{type_name}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, field in tokenizer.items():
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)

    for tensor, dimensions in shape.tensors():
        kind = gguf.GGMLQuantizationType["F32" if len(dimensions) == 1 else type_name]
        elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size_bytes = math.prod(dimensions) // elements * block_bytes
        writer.add_tensor_info(tensor, dimensions, np.dtype(np.float32), size_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for _, dimensions in shape.tensors():
        writer.write_tensor_data(weights(random, dimensions, type_name))
    writer.close()


def weights(random: np.random.Generator, dimensions: tuple[int, ...], type_name: str) -> npt.NDArray[Any]:
    if len(dimensions) == 1:
        return np.ones(dimensions, np.float32)
    if type_name != "F16":
        return random_blocks(random, dimensions, type_name)
    values = random.standard_normal(dimensions, np.float32)
    values *= WEIGHT_SCALE
    return values.astype(np.float16)


def quantise(source: Path, target: Path, type_name: str, threads: int) -> None:
    import llama_cpp

    @llama_cpp.llama_log_callback
    def log_warnings(level: int, text: bytes, _: object) -> None:
        """llama.cpp reports every tensor; only its warnings (3) and errors (4) matter here."""
        if level in (3, 4):
            sys.stderr.write(text.decode(errors="replace"))

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type_name}")
    params.nthread = threads
    llama_cpp.llama_log_set(log_warnings, ctypes.c_void_p(0))
    partial = target.with_name(target.name + ".partial")
    failed = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(partial), ctypes.byref(params))
    if failed:
        partial.unlink(missing_ok=True)
        raise SystemExit(f"{target}: llama.cpp could not quantise it; its reason stands above")
    partial.replace(target)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
