"""Single operations of the NumPy backend at their edges; as a whole it is tested through the transformer."""

import numpy as np
import pytest

from everwarm.kernels import reference as ops
from everwarm.kernels.backend import LayerKV, Rotary
from everwarm.kv.index.pool import BlockPool, SequenceKV


def test_a_silu_gate_of_extreme_values_is_finite() -> None:
    gate = np.array([-1e4, -100, 0, 100, 1e4], np.float32)
    np.testing.assert_allclose(ops.activated_gate(gate, np.ones(5, np.float32)), [0, 0, 0, 100, 1e4], atol=1e-30)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not ops.rms_norm(np.zeros((1, 8), np.float32), np.ones(8, np.float32), 1e-5).any()


def test_attention_in_several_steps_is_attention_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    q, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 6, 8), (2, 50, 8), (2, 50, 8)))
    for window in (None, 7):
        whole = ops.attention(q, keys, values, 10, 0.3, window)
        monkeypatch.setattr(ops, "_SCORE_BYTES", 4 * 6 * 50 * 3)
        np.testing.assert_allclose(ops.attention(q, keys, values, 10, 0.3, window), whole, atol=1e-6)
        monkeypatch.undo()


def test_half_of_a_head_may_stay_unrotated() -> None:
    x = np.ones((3, 2, 8), np.float32)
    table = ops.rotary_table(Rotary("", np.array([1.0, 0.5], np.float32), 1.0), np.arange(3, dtype=np.int32))
    for pairing in ("adjacent", "halves"):
        turned = ops.rotate(x.copy(), table, pairing)
        assert (turned[..., 4:] == 1).all()
        assert (turned[0] == 1).all()
        np.testing.assert_allclose(np.square(turned[..., :4]).sum(-1), 4, rtol=1e-6)


def test_kv_grows_to_its_capacity_and_keeps_what_it_holds() -> None:
    blocks = ops.ReferenceBlocks((LayerKV(1, 2, 2),))
    kv = SequenceKV(BlockPool(blocks), capacity=1000)
    for position in range(0, 1000, 10):
        rows = np.full((10, 1, 2), position, np.float32)
        kv.reserve(kv.length + 10)
        blocks.append(kv, 0, rows, -rows)
        keys, values = blocks.read(kv, 0, kv.length + 10)
        kv.length += 10
    assert keys.shape == (1, 1000, 2)
    assert (keys[0, :, 0] == np.arange(1000) // 10 * 10).all()
    assert (values == -keys).all()
    with pytest.raises(AssertionError):
        kv.reserve(kv.length + 10)


def test_gelu_is_the_one_by_tanh() -> None:
    gate, up = np.linspace(-30, 30, 601, dtype=np.float32), np.linspace(2, 3, 601, dtype=np.float32)
    x = gate.astype(np.float64)
    expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * up
    np.testing.assert_allclose(ops.activated_gate(gate, up, "gelu"), expected, rtol=1e-4, atol=1e-6)


def test_soft_capped_attention_is_that_of_its_formula() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) * 3 for shape in ((5, 2, 8), (1, 5, 8), (1, 5, 8)))
    scores = 4 * np.tanh(np.einsum("ihd,jd->hij", q.astype(np.float64), k[0]) * 0.5 / 4)
    shares = np.exp(np.where(np.tri(5) > 0, scores, -np.inf))
    expected = np.einsum("hij,jd->ihd", shares / shares.sum(-1, keepdims=True), v[0]).reshape(5, 16)
    np.testing.assert_allclose(ops.attention(q, k, v, 0, 0.5, None, 4.0), expected, rtol=1e-4, atol=1e-5)
