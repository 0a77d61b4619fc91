"""Make a llama-shaped GGUF of random weights, in several quantisations, to measure speed with.

Speed depends on shapes and tensor types, not on what the weights say, so a model of the 1B class (2048 wide, 16 layers,
32 heads over 8 of keys and values, tied output) needs no download: the tokenizer comes from the GGUF given, everything
else from a seed. What it generates is noise. llama.cpp does the quantising, so that the mix of tensor types is the one
people meet in files of that name; K-quants need widths that are multiples of 256, else llama.cpp takes other types.

    .venv-peers/bin/python benchmarks/make_model.py SMOLLM2.gguf OUTDIR --types Q4_0,Q4_K_M,Q8_0

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

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt

TYPES = {
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,  # written here, not quantised
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q5_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}
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
        progress(f"writing {shape.parameters():,} random weights")
        write_f16(source, shape, tokenizer, options.name, options.seed)
        for name, path in targets.items():
            if name != "F16":
                progress(f"quantising to {name}")
                quantise(source, path, TYPES[name], options.threads)
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


def write_f16(path: Path, shape: Shape, tokenizer: dict[str, gguf.ReaderField], name: str, seed: int) -> None:
    """Two passes over the tensors, first their descriptions, then the data, so that one at a time is in memory."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
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
        dtype = np.dtype(np.float32 if len(dimensions) == 1 else np.float16)
        size_bytes = math.prod(dimensions) * dtype.itemsize
        writer.add_tensor_info(tensor, dimensions, dtype, size_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for _, dimensions in shape.tensors():
        writer.write_tensor_data(weights(random, dimensions))
    writer.close()


def weights(random: np.random.Generator, dimensions: tuple[int, ...]) -> npt.NDArray[np.float16 | np.float32]:
    if len(dimensions) == 1:
        return np.ones(dimensions, np.float32)
    values = random.standard_normal(dimensions, np.float32)
    values *= WEIGHT_SCALE
    return values.astype(np.float16)


@llama_cpp.llama_log_callback
def log_warnings(level: int, text: bytes, _: object) -> None:
    """llama.cpp reports every tensor; only its warnings (3) and errors (4) matter here."""
    if level in (3, 4):
        sys.stderr.write(text.decode(errors="replace"))


def quantise(source: Path, target: Path, file_type: int, threads: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type
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
