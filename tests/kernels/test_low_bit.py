"""Types of few bits and uneven levels: products straight from the file's bits, equal bit for bit on every path."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from test_native import ISAS, packed, quantised, rows

from everwarm.kernels import _native
from everwarm.kernels.native import NativeBackend, aligned_bytes
from everwarm.weights.dequant.dequant import SUPPORTED
from everwarm.weights.types import TensorType
from tiny import random_blocks

FAST = ("Q2_K", "Q3_K", "IQ2_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "MXFP4")
COMPACT = ("IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ3_XXS", "TQ1_0", "TQ2_0", "NVFP4")
LOW_BIT = FAST + COMPACT
MORE_THAN_A_SLICE = 2304  # 72 groups of 32 inputs; kernels unpack 64 at a time


def form_of(kind: str, raw: np.ndarray, outputs: int, inputs: int) -> _native.Form:
    form = _native.Form(kind, outputs, inputs)
    memory = aligned_bytes(form.size_bytes)
    _native.Engine(ISAS[0], 1).pack(form, np.ascontiguousarray(raw).reshape(-1).view(np.uint8), memory)
    form.attach(memory)
    return form


def product(engine: _native.Engine, form: _native.Form, x: np.ndarray, step: int) -> np.ndarray:
    """All rows, `step` at a time, as bits."""
    parts = []
    for low in range(0, len(x), step):
        out = _native.Rows(form.outputs)
        engine.linear(rows(x[low : low + step]), [form], [None], [out], False)
        parts.append(out.numpy().copy())
    return np.concatenate(parts).view(np.uint32)


def on_every_path(compute: Callable[[_native.Engine], np.ndarray], threads: tuple[int, ...] = (1, 2, 3)) -> np.ndarray:
    """What every instruction set computes on any number of threads, after checking that it is the same."""
    results = [compute(_native.Engine(isa, count)) for isa in ISAS for count in threads]
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    return results[0]


def test_every_type_that_can_be_loaded_keeps_its_bits() -> None:
    backend = NativeBackend(ISAS[0], 1, "f16")
    for tensor_type in SUPPORTED:
        kind, size = backend.plan(tensor_type.name, (2048, 2048))
        assert kind == tensor_type.name
        assert size <= 1.15 * TensorType.size_bytes(tensor_type, 2048 * 2048)


@pytest.mark.parametrize("kind", LOW_BIT)
def test_a_row_is_the_same_bits_in_any_batch_on_any_threads_and_instruction_set(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((70, MORE_THAN_A_SLICE)).astype(np.float32)
    x[::3, ::50] *= 30  # outliers
    form, dense = packed(_native.Engine(ISAS[0], 2), kind, 50, MORE_THAN_A_SLICE)
    alone = on_every_path(lambda engine: product(engine, form, x, 1), threads=(2,))
    for step in (2, 3, 4, 5, 13, 70):
        threads = (1, 2, 3) if step in (13, 70) else (2,)
        together = on_every_path(lambda engine, step=step: product(engine, form, x, step), threads)
        np.testing.assert_array_equal(together, alone)
    expected = quantised(x).astype(np.float64) @ dense.astype(np.float64).T
    np.testing.assert_allclose(alone.view(np.float32), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kind", LOW_BIT)
def test_eight_bits_of_activations_are_all_that_is_lost(kind: str) -> None:
    """Against f64 of weights and activations as they are: each product is off by at most half a step of its group."""
    x = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    form, dense = packed(_native.Engine(ISAS[0], 2), kind, 33, 512, seed=3)
    found = product(_native.Engine(ISAS[0], 2), form, x, 9).view(np.float32)
    half_steps = np.abs(x).reshape(9, 16, 32).max(-1) / 127 / 2
    bound = np.einsum("rg,ogk->ro", half_steps, np.abs(dense.astype(np.float64)).reshape(33, 16, 32))
    error = np.abs(found - x.astype(np.float64) @ dense.astype(np.float64).T)
    assert (error <= bound * 1.001 + 1e-5).all()


@pytest.mark.parametrize("kind", LOW_BIT)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x55])
def test_extreme_codes_times_extreme_activations_do_not_saturate(kind: str, byte: int) -> None:
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = random_blocks(np.random.default_rng(2), (16, 512), gguf.GGMLQuantizationType[kind]).reshape(-1, size)
    raw = np.where(halves_of_blocks(kind), raw, np.uint8(byte))
    form = form_of(kind, raw, 16, 512)
    dense = dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(16, 512)
    signs = np.sign(dense[:2]).astype(np.float32) + (dense[:2] == 0)
    x = np.concatenate([np.ones((1, 512), np.float32), -np.ones((1, 512), np.float32), signs, -signs, signs, -signs])
    for step in (1, 3, 10):
        found = on_every_path(lambda engine, step=step: product(engine, form, x, step), threads=(1,))
        expected = x.astype(np.float64) @ dense.astype(np.float64).T
        np.testing.assert_allclose(found.view(np.float32), expected, rtol=1e-4, atol=1e-4 * np.abs(dense).sum(1).max())


def halves_of_blocks(kind: str) -> np.ndarray:
    """Which bytes of a block are its f16 scales (of MXFP4 and NVFP4: all scales): they stay as they are drawn."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    places = {"Q2_K": range(80, 84), "Q3_K": range(108, 110), "TQ1_0": range(52, 54), "TQ2_0": range(64, 66)}
    places |= {"IQ1_M": range(48, 56), "MXFP4": range(1), "NVFP4": range(4)}
    return np.isin(np.arange(size), list(places.get(kind, range(2))))


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_every_scale_of_the_4_bit_floats_is_right(kind: str) -> None:
    """Scales from the least to the greatest, many of them denormal or too great to be multiplied: as gguf has them."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    quants = (np.arange(elements // 2) * 0x11).astype(np.uint8)
    scales = np.repeat(np.arange(256, dtype=np.uint8), size - quants.size).reshape(256, -1)
    raw = np.concatenate([scales, np.broadcast_to(quants, (256, quants.size))], axis=1)
    form = form_of(kind, raw, 256, elements)
    with np.errstate(over="ignore"):
        dense = dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(256, elements)
    out = _native.Rows(elements)
    _native.Engine(ISAS[0], 1).embed(form, np.arange(256, dtype=np.int32), out)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), dense.view(np.uint32))
    one = np.zeros((1, elements), np.float32)
    one[0, 5] = 1.0  # kept as an outlier: the product is the weight itself
    found = on_every_path(lambda engine: product(engine, form, np.repeat(one, 6, axis=0), 6), threads=(1,))
    np.testing.assert_array_equal(found.view(np.float32)[0], dense[:, 5])
    found = on_every_path(lambda engine: product(engine, form, one, 1), threads=(1,))
    np.testing.assert_array_equal(found.view(np.float32)[0], dense[:, 5])


@pytest.mark.parametrize("kind", LOW_BIT)
def test_the_fused_gate_is_the_same_bits_on_every_path(kind: str) -> None:
    x = np.random.default_rng(4).standard_normal((37, 512)).astype(np.float32)
    maker = _native.Engine(ISAS[0], 1)
    gate, up = (packed(maker, kind, 96, 512, seed=seed)[0] for seed in (1, 2))
    down, _ = packed(maker, "Q8_0", 32, 96, seed=3)

    def gated(engine: _native.Engine, step: int) -> np.ndarray:
        parts = []
        for low in range(0, 37, step):
            hidden, result = _native.Rows(96), _native.Rows(32)
            engine.gated(rows(x[low : low + step]), [gate, up], [None, None], hidden, _native.Rows(96), "silu")
            engine.linear(hidden, [down], [None], [result], False)
            parts.append(result.numpy().copy())
        return np.concatenate(parts).view(np.uint32)

    alone = on_every_path(lambda engine: gated(engine, 1), threads=(2,))
    for step in (4, 37):
        np.testing.assert_array_equal(on_every_path(lambda engine, step=step: gated(engine, step)), alone)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ3_S", "MXFP4"])
def test_several_products_of_different_types_share_their_rows(kind: str) -> None:
    x = np.random.default_rng(5).standard_normal((7, 256)).astype(np.float32)
    engine = _native.Engine(ISAS[0], 2)
    forms = [packed(engine, name, 20 + 16 * i, 256, seed=i)[0] for i, name in enumerate(("Q4_K", kind, "F16", kind))]
    together = [_native.Rows(form.outputs) for form in forms]
    engine.linear(rows(x), forms, [None] * 4, together, False)
    for form, out in zip(forms, together, strict=True):
        np.testing.assert_array_equal(out.numpy().view(np.uint32), product(engine, form, x, 7))


def grid_digest() -> str:
    """Of products with every type that has a grid, alone and together, on the best instruction set."""
    x = np.random.default_rng(6).standard_normal((9, 512)).astype(np.float32)
    engine = _native.Engine(ISAS[0], 1)
    digest = hashlib.sha256()
    for kind in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        form, _ = packed(engine, kind, 48, 512)
        for step in (1, 9):
            digest.update(product(engine, form, x, step).tobytes())
    return digest.hexdigest()


def test_a_processor_without_vbmi_computes_the_same_bits() -> None:
    """The AVX-512 kernels look grids up in registers where they can, in memory elsewhere."""
    here = Path(__file__).parent
    environment = os.environ | {"EVERWARM_WITHOUT_VBMI": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    program = [sys.executable, "-c", "import test_low_bit; print(test_low_bit.grid_digest())"]
    found = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == grid_digest()
