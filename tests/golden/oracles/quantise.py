"""A golden case with its matrices in Q4_1, which holds four evenly spaced levels without loss.

-3, -1, 1 and 3 are the codes 0, 5, 10 and 15 of Q4_1 (only its scale is rounded, to f16: by at most 1 in 4,000). So the
packed kernels, whose activations have 8 bits, can be compared with the same golden logits as f32.
"""

from pathlib import Path

import gguf
import numpy as np

BLOCK = 32
KEPT = ("norm", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "rope_f")
"""Parts of names of tensors that stay as they are, as in files that people have."""


def as_q4_1(source: Path, target: Path) -> Path:
    """Write the model again; returns the target."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values, packed = tensor.data, None
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32 and not any(part in tensor.name for part in KEPT):
            packed = _packed(values)
        if packed is not None:
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(tensor.name, values, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _packed(values: np.ndarray) -> np.ndarray | None:
    """The blocks of a matrix, a row of bytes for each of its rows; None if it does not have the four levels."""
    if values.ndim < 2 or values.shape[-1] % BLOCK:
        return None
    unit = np.abs(values).max(-1, keepdims=True) / 3
    codes = np.rint((values / np.where(unit == 0, 1, unit) + 3) * 2.5)
    if not np.isin(codes, [0, 5, 10, 15]).all() or np.abs(codes * 0.4 * unit - 3 * unit - values).max() > 1e-6:
        return None
    blocks = codes.astype(np.uint8).reshape(*values.shape[:-1], -1, BLOCK)
    scales = np.broadcast_to(unit[..., None] * np.asarray([0.4, -3.0], np.float32), (*blocks.shape[:-1], 2))
    nibbles = blocks[..., : BLOCK // 2] | (blocks[..., BLOCK // 2 :] << 4)
    packed = np.concatenate([np.ascontiguousarray(scales, np.float16).view(np.uint8), nibbles], axis=-1)
    return np.ascontiguousarray(packed.reshape(*values.shape[:-1], -1))
