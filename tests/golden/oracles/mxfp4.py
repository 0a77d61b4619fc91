"""Experts of a saved gpt-oss model, put into MXFP4 as its published files have them.

MXFP4 holds 1 and 3 times a power of two without loss. transformers computes with the values, our reader and llama.cpp's
converter see blocks of 32 codes with a scale.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CODES = {1.0: 2, 3.0: 5, -1.0: 10, -3.0: 13}
"""Of e2m1: a sign, two bits of exponent, one of mantissa."""


def pack_experts(folder: Path) -> None:
    """Rewrite what transformers has saved."""
    (path,) = folder.glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name + "_blocks"], tensors[name + "_scales"] = pack(tensor.transpose(-1, -2))
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def pack(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, rows, columns) to codes (experts, rows, blocks, 16), two in a byte, and one scale for each block."""
    unit = matrices.abs().min()
    exponent = int(torch.log2(unit))
    assert 2.0**exponent == unit
    codes = torch.zeros_like(matrices, dtype=torch.uint8)
    for value, code in CODES.items():
        codes[matrices == value * unit] = code
    blocks = codes.reshape(*codes.shape[:-1], -1, 16, 2)
    scales = torch.full(blocks.shape[:-2], exponent + 127, dtype=torch.uint8)
    return (blocks[..., 0] | (blocks[..., 1] << 4)).contiguous(), scales
