"""Native kernels: against NumPy written out, over odd shapes; and against each other, bit for bit."""

import math

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from everwarm.kernels import _native, reference
from everwarm.kernels.backend import Rotary
from everwarm.kernels.native import aligned_bytes
from tiny import random_blocks

ISAS = _native.supported_isas()
QUANTISED = [name for name, (inputs, _) in _native.TENSOR_TYPES.items() if inputs > 1]
FLOATS = [name for name, (inputs, _) in _native.TENSOR_TYPES.items() if inputs == 1]


@pytest.fixture(params=ISAS)
def engine(request: pytest.FixtureRequest) -> _native.Engine:
    return _native.Engine(request.param, 2)


def packed(
    engine: _native.Engine, kind: str, outputs: int, inputs: int, seed: int = 0
) -> tuple[_native.Form, np.ndarray]:
    """A random matrix as a form, and as the gguf package dequantises it."""
    raw = random_blocks(np.random.default_rng(seed), (outputs, inputs), gguf.GGMLQuantizationType[kind])
    form = _native.Form(kind, outputs, inputs)
    memory = aligned_bytes(form.size_bytes)
    engine.pack(form, np.ascontiguousarray(raw).reshape(-1).view(np.uint8), memory)
    form.attach(memory)
    return form, dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(outputs, inputs)


def rows(values: np.ndarray) -> _native.Rows:
    result = _native.Rows(values.shape[1])
    result.set(np.ascontiguousarray(values, np.float32))
    return result


def quantised(x: np.ndarray) -> np.ndarray:
    """What activations become: groups of 32, scaled to 127, but for one that is twice as great as all others."""
    groups = x.reshape(len(x), x.shape[1] // 32, 32)
    size = np.abs(groups)
    order = np.sort(size, -1)
    outlier = (size == order[..., -1:]) & (order[..., -1:] > 2 * order[..., -2:-1])
    rest = np.where(outlier, np.float32(0), groups)
    greatest = np.abs(rest).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), greatest, out=np.zeros_like(greatest), where=greatest > 0)
    return np.where(outlier, groups, np.rint(rest * inverse) * (greatest / np.float32(127))).reshape(x.shape)


def unit(kind: str) -> int:
    return max(32, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])


def test_types_with_a_form_have_the_blocks_of_the_file() -> None:
    for name, sizes in _native.TENSOR_TYPES.items():
        assert sizes == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"} <= set(QUANTISED)
    assert {"F32", "F16", "BF16"} <= set(FLOATS)


@pytest.mark.parametrize("kind", QUANTISED + FLOATS)
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 70])
def test_a_form_holds_exactly_what_the_file_holds(kind: str, outputs: int) -> None:
    engine = _native.Engine(ISAS[0], 2)
    form, dense = packed(engine, kind, outputs, 2 * unit(kind))
    out = _native.Rows(form.inputs)
    order = np.random.default_rng(1).permutation(outputs).astype(np.int32)
    engine.embed(form, order, out)
    assert (out.numpy().view(np.uint32) == dense[order].astype(np.float32).view(np.uint32)).all()


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_form_takes_at_most_a_tenth_more_than_the_file(kind: str) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for outputs, inputs in ((576, 1536), (2048, 8192), (192, 512)):
        assert _native.Form(kind, outputs, inputs).size_bytes <= 1.1 * outputs * inputs / elements * size


@pytest.mark.parametrize("kind", QUANTISED + FLOATS)
@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 7, 13, 100])
def test_products_over_odd_shapes(engine: _native.Engine, kind: str, count: int) -> None:
    rng = np.random.default_rng(count)
    for outputs in (1, 16, 33, 48):
        form, dense = packed(engine, kind, outputs, 2 * unit(kind), seed=outputs)
        x = rng.standard_normal((count, form.inputs)).astype(np.float32)
        bias = rng.standard_normal(outputs).astype(np.float32)
        out = _native.Rows(outputs)
        engine.linear(rows(x), [form], [bias], [out], False)
        seen = x if kind in FLOATS else quantised(x)
        expected = seen.astype(np.float64) @ dense.astype(np.float64).T + bias
        np.testing.assert_allclose(out.numpy(), expected, atol=1e-4, rtol=1e-5)
        before = out.numpy().copy()
        engine.linear(rows(x), [form], [None], [out], True)
        np.testing.assert_allclose(out.numpy(), before + expected - bias, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", QUANTISED + FLOATS)
def test_a_row_is_the_same_bits_alone_in_a_batch_and_on_any_instruction_set(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((29, 2 * unit(kind))).astype(np.float32)
    results = []
    for isa in ISAS:
        for threads in (1, 2, 3):
            engine = _native.Engine(isa, threads)
            form, _ = packed(engine, kind, 50, 2 * unit(kind))
            for step in (29, 1, 3, 5, 8):
                parts = []
                for low in range(0, 29, step):
                    out = _native.Rows(50)
                    engine.linear(rows(x[low : low + step]), [form], [None], [out], False)
                    parts.append(out.numpy().copy())
                results.append(np.concatenate(parts).view(np.uint32))
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_with_different_numbers_of_outliers_do_not_mix(engine: _native.Engine, kind: str) -> None:
    """Rows of a tile take turns at their outliers: each must get its own, in order, also where others have none left.
    A single row computes its outliers one after the other.
    """
    groups = 2304 // 32  # more than are unpacked at a time
    x = np.random.default_rng(3).standard_normal((73, 32 * groups)).astype(np.float32)
    for row, count in enumerate([0, 1, groups, 5, 0, 40, 2, 3, 0, 0, 7, *[groups] * 6, *range(56)]):
        for group in np.linspace(0, groups - 1, count, dtype=int):
            x[row, 32 * group + (7 * row + 3 * group) % 32] = 30 + row + group
    form, _ = packed(engine, kind, 33, 32 * groups)
    together, alone = _native.Rows(33), _native.Rows(33)
    engine.linear(rows(x), [form], [None], [together], False)
    for row in range(len(x)):
        engine.linear(rows(x[row : row + 1]), [form], [None], [alone], False)
        assert (alone.numpy()[0].view(np.uint32) == together.numpy()[row].view(np.uint32)).all(), row


def test_several_products_share_their_rows(engine: _native.Engine) -> None:
    x = np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32)
    kinds = ["Q4_K", "F16", "Q6_K"]
    forms = [packed(engine, kind, 20 + 16 * i, 256, seed=i)[0] for i, kind in enumerate(kinds)]
    together = [_native.Rows(form.outputs) for form in forms]
    engine.linear(rows(x), forms, [None] * 3, together, False)
    for form, out in zip(forms, together, strict=True):
        alone = _native.Rows(form.outputs)
        engine.linear(rows(x), [form], [None], [alone], False)
        assert (alone.numpy() == out.numpy()).all()


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q8_0", "Q4_0"), ("F16", "Q5_0"), ("F32", "F32")])
@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated(engine: _native.Engine, kinds: tuple[str, str], count: int, activation: str) -> None:
    x = np.random.default_rng(0).standard_normal((count, 64)).astype(np.float32) * 4
    (gate, dense_gate), (up, dense_up) = (packed(engine, kind, 96, 64, seed=i) for i, kind in enumerate(kinds))
    (down, dense_down) = packed(engine, "Q8_0", 32, 96, seed=5)
    hidden, result = _native.Rows(96), _native.Rows(32)
    engine.gated(rows(x), [gate, up], [None, None], hidden, _native.Rows(96), activation)
    engine.linear(hidden, [down], [None], [result], False)
    g, u = (
        (x if kind in FLOATS else quantised(x)).astype(np.float64) @ dense.T.astype(np.float64)
        for kind, dense in zip(kinds, (dense_gate, dense_up), strict=True)
    )
    silu, gelu = g / (1 + np.exp(-g)), 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    h = ((silu if activation == "silu" else gelu) * u).astype(np.float32)
    # A value on the border between two codes may be rounded either way.
    np.testing.assert_allclose(result.numpy(), quantised(h) @ dense_down.T, atol=0.03 * np.abs(h).max() / 127 * 32)


@pytest.mark.parametrize("width", [16, 32, 100, 576])
def test_norm(engine: _native.Engine, width: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, width)).astype(np.float32) * 3, rng.standard_normal(width).astype(np.float32)
    out = _native.Rows(width)
    engine.norm(rows(x), weight, 1e-5, out, True)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 32), (4, 20)])
def test_each_head_is_normed_by_itself(engine: _native.Engine, heads: int, head_dim: int) -> None:
    x = np.random.default_rng(0).standard_normal((5, heads * head_dim)).astype(np.float32)
    weight = np.random.default_rng(1).standard_normal(head_dim).astype(np.float32)
    normed = rows(x)
    engine.norm_heads(normed, weight, 1e-5, heads)
    by_head = x.astype(np.float64).reshape(5, heads, head_dim)
    expected = by_head / np.sqrt((by_head**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(normed.numpy(), expected.reshape(x.shape), rtol=2e-6, atol=1e-6)
    with pytest.raises(ValueError, match="norm weight of a head"):
        engine.norm_heads(normed, weight[1:], 1e-5, heads)
    with pytest.raises(ValueError, match="in 7 heads"):
        engine.norm_heads(normed, weight, 1e-5, 7)


def test_a_batch_may_rotate_in_several_ways(engine: _native.Engine) -> None:
    batch = _native.Batch()
    batch.add(5, 2, [0])
    for adjacent in (True, False):
        batch.add_rotary(np.array([1.0, 0.25], np.float32), 1.0, adjacent)
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    for rope, pairing in enumerate(("adjacent", "halves")):
        table = reference.rotary_table(Rotary("", np.array([1.0, 0.25], np.float32), 1.0), np.array([5, 6], np.int32))
        turned = rows(x)
        engine.rotate(turned, 2, batch, rope)
        expected = reference.rotate(x.copy().reshape(2, 2, 4), table, pairing).reshape(2, 8)
        np.testing.assert_allclose(turned.numpy(), expected, atol=1e-6)
    with pytest.raises(ValueError, match="rotary 2 of 2"):
        engine.rotate(rows(x), 2, batch, 2)


def test_rotation_table_is_that_of_the_c_library(engine: _native.Engine) -> None:
    frequencies = (10000.0 ** -(np.arange(0, 64, 2) / 64)).astype(np.float32)
    for start in (0, 1, 1000, 131_000, 1_000_000):
        pool = _native.KVPool([(1, 64, 64, False)], "f16")
        batch = _native.Batch()
        batch.add(0, 0, [])
        batch = _native.Batch()
        batch.add(start, 1, [0] * (start // _native.BLOCK + 1))
        batch.add_rotary(frequencies, 1.0, True)
        x = rows(np.tile(np.array([1.0, 0.0], np.float32), (1, 32)))
        engine.rotate(x, 1, batch, 0)
        angles = (np.float32(start) * frequencies).astype(np.float64)
        pairs = x.numpy().reshape(32, 2)
        np.testing.assert_array_max_ulp(pairs[:, 0], np.cos(angles).astype(np.float32), 1)
        np.testing.assert_allclose(pairs[:, 1], np.sin(angles), atol=6e-8)
        del pool


def stored(values: np.ndarray, kind: str, outliers: int) -> np.ndarray:
    """Keys (with two outliers) or values (with none), (tokens, heads, dim), as attention sees what the pool holds."""
    if kind == "f16":
        return coded(values, values, keys=outliers > 0)
    limit = {"q8": 127, "q4": 7}[kind]
    groups = values.reshape(*values.shape[:-1], -1, 32).copy()
    places = np.argsort(-np.abs(groups), -1, kind="stable")[..., :outliers]
    greatest = np.take_along_axis(groups, places, -1).astype(np.float16).astype(np.float32)
    np.put_along_axis(groups, places, np.float32(0), -1)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(limit)).astype(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    result = np.clip(np.rint(groups * inverse), -limit, limit) * scale
    np.put_along_axis(result, places, greatest, -1)
    return coded(result.reshape(values.shape), values, keys=outliers > 0)


def coded(x: np.ndarray, original: np.ndarray, *, keys: bool) -> np.ndarray:
    """Integers times a power of two per token and head: a norm of keys below 32,000, values below 2,040."""
    norm, greatest = np.linalg.norm(original, axis=-1, keepdims=True), np.abs(original).max(-1, keepdims=True)
    size = norm / 32000 if keys else greatest / 2040
    power = np.exp2(np.ceil(np.log2(np.maximum(size, 2.0**-40))))
    return np.rint(x / power) * power


class Attention:
    """A few sequences in one pool, and what attention over them should give."""

    def __init__(self, heads: int, kv_heads: int, dim: int, kind: str, lengths: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.dim, self.kind = heads, kv_heads, dim, kind
        self.q, self.k, self.v = (
            [rng.standard_normal((n, h, dim)).astype(np.float32) for n in lengths] for h in (heads, kv_heads, kv_heads)
        )

    def compute(
        self, engine: _native.Engine, cuts: list[list[int]], window: int = 0, softcap: float = 0.0
    ) -> list[np.ndarray]:
        """Outputs per sequence; in step s, sequence i advances to cuts[s][i]."""
        pool = _native.KVPool([(self.kv_heads, self.dim, self.dim, False)] * 2, self.kind)
        done, blocks, outs = [0] * len(self.q), [[] for _ in self.q], [[] for _ in self.q]
        for cut in cuts:
            batch = _native.Batch()
            for i, end in enumerate(cut):
                while len(blocks[i]) * _native.BLOCK < end:
                    blocks[i].append(pool.allocate())
                batch.add(done[i], end - done[i], blocks[i])
            batch.place(pool)
            q, k, v = (self._rows(arrays, done, cut) for arrays in (self.q, self.k, self.v))
            engine.store_kv(pool, 1, k, v, batch)
            out = _native.Rows(self.heads * self.dim)
            engine.attention(pool, 1, q, batch, 0.3, window, softcap, out)
            at = 0
            for i, end in enumerate(cut):
                outs[i].append(out.numpy()[at : at + end - done[i]].copy())
                at += end - done[i]
            done = list(cut)
        return [np.concatenate(parts) for parts in outs]

    def _rows(self, arrays: list[np.ndarray], done: list[int], cut: list[int]) -> _native.Rows:
        parts = [a[d:e].reshape(e - d, math.prod(a.shape[1:])) for a, d, e in zip(arrays, done, cut, strict=True)]
        return rows(np.concatenate(parts))

    def expected(self, window: int = 0, softcap: float = 0.0) -> list[np.ndarray]:
        results = []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            k, v = (
                stored(x, self.kind, outliers).repeat(self.heads // self.kv_heads, axis=1).astype(np.float64)
                for x, outliers in ((k, 2), (v, 0))
            )
            step = np.linalg.norm(q, axis=-1, keepdims=True) / 32000  # queries are integers, too
            scores = np.einsum("ihd,jhd->hij", np.rint(q / step).astype(np.float64) * step, k) * 0.3
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            distance = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
            hidden = (distance < 0) | ((distance >= window) if window else False)
            scores = np.where(hidden, -np.inf, scores)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            results.append(np.einsum("hij,jhd->ihd", shares, v).reshape(len(q), -1))
        return results


def lengths_in_steps(lengths: list[int], step: int) -> list[list[int]]:
    return [[min(n, step * s) for n in lengths] for s in range(1, math.ceil(max(lengths) / step) + 1)]


@pytest.mark.parametrize("kind", ["f16", "q8", "q4"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 4, 32), (14, 2, 64), (2, 1, 128), (8, 1, 96)])
def test_attention(engine: _native.Engine, kind: str, heads: int, kv_heads: int, dim: int) -> None:
    case = Attention(heads, kv_heads, dim, kind, [1, 64, 131])
    for window, softcap in ((0, 0.0), (50, 0.0), (0, 2.0)):
        for got, wanted in zip(
            case.compute(engine, [[1, 64, 131]], window, softcap), case.expected(window, softcap), strict=True
        ):
            np.testing.assert_allclose(got, wanted, atol=1e-3)  # weights are rounded to 2^-14 of the greatest


@pytest.mark.parametrize("kind", ["f16", "q8", "q4"])
def test_attention_is_the_same_bits_in_any_steps_on_any_threads_and_instruction_set(kind: str) -> None:
    lengths = [1100, 70, 600]
    case = Attention(6, 2, 64, kind, lengths)
    first: list[np.ndarray] | None = None
    for isa in ISAS:
        for threads in (1, 2, 3):
            for steps in (
                [lengths],
                lengths_in_steps(lengths, 337),
                [[1090, 60, 590], *([1090 + i, 60 + i, 590 + i] for i in range(1, 11))],
            ):
                if isa == "portable" and threads != 2:
                    continue
                got = case.compute(_native.Engine(isa, threads), steps, window=0)
                first = first or got
                for a, b in zip(got, first, strict=True):
                    assert (a.view(np.uint32) == b.view(np.uint32)).all()


def test_nan_in_one_row_stays_in_that_row(engine: _native.Engine) -> None:
    form, _ = packed(engine, "Q4_1", 40, 64)
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    clean, dirty = _native.Rows(40), _native.Rows(40)
    engine.linear(rows(x), [form], [None], [clean], False)
    x[4, 7] = np.nan
    x[5, 7] = np.inf
    engine.linear(rows(x), [form], [None], [dirty], False)
    others = [i for i in range(9) if i not in (4, 5)]
    assert (clean.numpy()[others] == dirty.numpy()[others]).all()


@pytest.mark.parametrize("kind", ["f16", "q8", "q4"])
def test_a_token_that_is_not_finite_spoils_itself_and_those_after_it(engine: _native.Engine, kind: str) -> None:
    case = Attention(6, 2, 64, kind, [300])
    clean = case.compute(engine, [[300]])[0]
    for array, value in ((case.k, np.nan), (case.v, np.inf)):
        array[0][200, 1, 3] = value
        dirty = case.compute(engine, [[300]])[0]
        array[0][200, 1, 3] = 0
        assert (dirty[:200] == clean[:200]).all()
        assert np.isnan(dirty[200:, 3 * 64 :]).all()  # the heads that share the second KV head


@pytest.mark.parametrize("change", ["add", "norm_heads", "rotate"])
def test_rows_that_change_in_place_are_quantised_again(engine: _native.Engine, change: str) -> None:
    form, _ = packed(engine, "Q4_0", 64, 64)
    floats, _ = packed(engine, "F32", 64, 64)
    start = np.random.default_rng(0).standard_normal((2, 64), np.float32)
    batch = _native.Batch()
    batch.add(7, 2, [0])
    batch.add_rotary(np.ones(8, np.float32), 1.0, False)

    def changed(quantise_first: bool) -> np.ndarray:
        x, y = rows(start), _native.Rows(64)
        if quantise_first:
            engine.quantise(x)
        if change == "add":
            engine.linear(rows(start), [floats], [None], [x], True)
        elif change == "norm_heads":
            engine.norm_heads(x, np.full(32, 3, np.float32), 1e-5, 2)
        else:
            engine.rotate(x, 2, batch, 0)
        engine.linear(x, [form], [None], [y], False)
        return y.numpy().copy()

    np.testing.assert_array_equal(changed(True), changed(False))


class TestRefused:
    """Arguments that would read or write where they must not."""

    @pytest.fixture
    def engine(self) -> _native.Engine:
        return _native.Engine(ISAS[0], 1)

    def test_wrong_shapes(self, engine: _native.Engine) -> None:
        form, _ = packed(engine, "Q4_0", 16, 64)
        with pytest.raises(ValueError, match="rows of 32 for a form of 64 inputs"):
            engine.linear(rows(np.zeros((1, 32))), [form], [None], [_native.Rows(16)], False)
        with pytest.raises(ValueError, match="output rows of 17"):
            engine.linear(rows(np.zeros((1, 64))), [form], [None], [_native.Rows(17)], False)
        with pytest.raises(ValueError, match="bias: 3 values, expected 16"):
            engine.linear(rows(np.zeros((1, 64))), [form], [np.zeros(3, np.float32)], [_native.Rows(16)], False)
        with pytest.raises(ValueError, match="can't add 2 rows to 0"):
            engine.linear(rows(np.zeros((2, 64))), [form], [None], [_native.Rows(16)], True)

    def test_wrong_dtype(self, engine: _native.Engine) -> None:
        form, _ = packed(engine, "Q4_0", 16, 64)
        with pytest.raises(TypeError):
            engine.embed(form, np.zeros(1, np.int64), _native.Rows(64))
        with pytest.raises(TypeError):
            engine.norm(rows(np.zeros((1, 64))), np.zeros(64), 1e-5, _native.Rows(64), False)

    def test_tokens_out_of_range(self, engine: _native.Engine) -> None:
        form, _ = packed(engine, "Q4_0", 16, 64)
        for token in (-1, 16):
            with pytest.raises(ValueError, match=f"token {token} is not among 16"):
                engine.embed(form, np.array([token], np.int32), _native.Rows(64))

    def test_memory_of_wrong_size_or_alignment(self, engine: _native.Engine) -> None:
        form = _native.Form("Q4_0", 16, 64)
        with pytest.raises(ValueError, match="expected"):
            form.attach(aligned_bytes(form.size_bytes - 1))
        with pytest.raises(ValueError, match="aligned"):
            form.attach(aligned_bytes(form.size_bytes + 64)[1 : 1 + form.size_bytes])
        with pytest.raises(ValueError, match="bytes, expected"):
            engine.pack(form, np.zeros(5, np.uint8), aligned_bytes(form.size_bytes))

    def test_forms_that_do_not_exist(self) -> None:
        for kind, outputs, inputs in (
            ("Q4_0", 4, 33),
            ("Q4_K", 4, 128),
            ("Q8_K", 4, 256),
            ("Q4_0", 0, 32),
            ("Q4_0", 4, -32),
        ):
            with pytest.raises(ValueError, match="form"):
                _native.Form(kind, outputs, inputs)

    def test_sizes_near_the_greatest_int(self) -> None:
        """Their bytes as Python counts them. `outputs + 15` passes 2^31."""
        greatest = 2**31 - 1
        for kind, inputs, panel_bytes in (
            ("F32", 1, 16 * 4),
            ("BF16", 3, 16 * 3 * 2),
            ("Q4_0", 32, 256 + 32),
            ("Q8_0", 64, 2 * (512 + 32)),
            ("Q6_K", 256, 8 * (256 + 128 + 32) + 32),
        ):
            for outputs in (greatest, greatest - 14, greatest - 15, greatest - 16):
                panels = -(-outputs // 16)
                expected = panels * panel_bytes
                assert _native.Form(kind, outputs, inputs).size_bytes in range(expected, expected + 256)
        for kind in ("F32", "Q4_0"):
            with pytest.raises(ValueError, match=r"2147483647 x 2147483616 is more than 2\^56 elements"):
                _native.Form(kind, greatest, greatest - 31)

    def test_sizes_that_nothing_has(self) -> None:
        for width in (0, -1):
            with pytest.raises(ValueError, match="at least 1"):
                _native.Rows(width)
        for heads, dim in ((2**31 - 1, 2**31 - 32), (2**20, 32)):
            with pytest.raises(ValueError, match=r"at most 2\^24 elements"):
                _native.KVPool([(heads, dim, dim, False)], "f16")
        with pytest.raises(ValueError, match=r"1048577 layers, 1 to 2\^20 are possible"):
            _native.KVPool([(1, 32, 32, False)] * (2**20 + 1), "f16")
        with pytest.raises(ValueError, match="heads of 32 and 64"):  # a value can't be longer than the key it begins
            _native.KVPool([(1, 32, 64, True)], "f16")

    def test_form_without_memory(self, engine: _native.Engine) -> None:
        with pytest.raises(ValueError, match="without memory"):
            engine.linear(rows(np.zeros((1, 64))), [_native.Form("Q4_0", 16, 64)], [None], [_native.Rows(16)], False)
        for kind in ("Q4_0", "F32"):
            with pytest.raises(ValueError, match="embed: a form without memory"):
                engine.embed(_native.Form(kind, 16, 64), np.zeros(1, np.int32), _native.Rows(64))
            forms, out, spare = [_native.Form(kind, 32, 64)] * 2, _native.Rows(32), _native.Rows(32)
            with pytest.raises(ValueError, match="gated: a form without memory"):
                engine.gated(rows(np.zeros((1, 64))), forms, [None, None], out, spare, "silu")

    def test_rows_that_are_read_and_written_at_once(self, engine: _native.Engine) -> None:
        x, other = rows(np.zeros((1, 64))), _native.Rows(64)
        form, _ = packed(engine, "Q4_0", 64, 64)
        for out, spare in ((x, other), (other, x), (other, other)):
            with pytest.raises(ValueError, match="must be different rows"):
                engine.gated(x, [form, form], [None, None], out, spare, "silu")
        pool = _native.KVPool([(1, 64, 64, False)], "f16")
        batch = _native.Batch()
        batch.add(0, 1, [pool.allocate()])
        batch.place(pool)
        with pytest.raises(ValueError, match="the same rows"):
            engine.attention(pool, 0, x, batch, 1.0, 0, 0.0, x)

    def test_blocks_that_are_not_allocated(self, engine: _native.Engine) -> None:
        pool = _native.KVPool([(1, 64, 64, False)], "f16")
        x = rows(np.zeros((1, 64)))
        for block in (-1, 0, 5):
            batch = _native.Batch()
            batch.add(0, 1, [block])
            with pytest.raises(IndexError, match=f"KV block {block} is not allocated"):
                batch.place(pool)
        block = pool.allocate()
        batch = _native.Batch()
        batch.add(0, 1, [block])
        with pytest.raises(ValueError, match="no place yet"):
            engine.store_kv(pool, 0, x, x, batch)
        batch.place(pool)
        with pytest.raises(IndexError, match="layer 1 of 1"):
            engine.store_kv(pool, 1, x, x, batch)
        pool.release(block)
        with pytest.raises(IndexError):
            pool.release(block)
        assert pool.in_use == 0

    def test_spans_that_do_not_fit_their_blocks(self) -> None:
        with pytest.raises(ValueError, match="1 blocks can't hold 65 tokens"):
            _native.Batch().add(0, 65, [0])
        with pytest.raises(ValueError, match="negative"):
            _native.Batch().add(-1, 1, [0])

    def test_unknown_names(self) -> None:
        with pytest.raises(ValueError, match="supported are"):
            _native.Engine("sse9", 1)
        with pytest.raises(ValueError, match="threads"):
            _native.Engine(ISAS[0], 0)
        with pytest.raises(ValueError, match="f16, q8 or q4"):
            _native.KVPool([(1, 64, 64, False)], "q3")
        with pytest.raises(ValueError, match="multiples of"):
            _native.KVPool([(1, 40, 40, False)], "q8")


def test_rows_are_added_scaled_capped_and_weighed(engine: _native.Engine) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((5, 37)).astype(np.float32) * 30 for _ in range(2))
    x = rows(a)
    engine.add(x, rows(b), 0.25)
    np.testing.assert_allclose(x.numpy(), a + 0.25 * b, rtol=1e-6, atol=1e-6)
    x = rows(a)
    engine.scale(x, 0.5, 0.0)
    np.testing.assert_array_equal(x.numpy(), a * np.float32(0.5))
    x = rows(a)
    engine.scale(x, 2.0, 30.0)
    np.testing.assert_allclose(x.numpy(), 30 * np.tanh(a / 15), rtol=1e-5, atol=1e-5)
    x, by = rows(a), rng.standard_normal(37).astype(np.float32) * 0.05
    engine.weigh(x, rows(b), by)
    np.testing.assert_allclose(x.numpy(), a * reference.sigmoid(b @ by)[:, None], rtol=1e-4)


def test_queries_of_late_positions_are_sharpened(engine: _native.Engine) -> None:
    frequencies = np.array([1.0, 0.25], np.float32)
    pool = _native.KVPool([(1, 16, 16, False)], "f16")
    batch = _native.Batch()
    batch.add(1000, 70, [pool.allocate() for _ in range(20)])
    batch.add_rotary(frequencies, 1.5, True, 16, 0.1)
    x = np.random.default_rng(3).standard_normal((70, 4)).astype(np.float32)
    turned = rows(x)
    engine.rotate(turned, 1, batch, 0)
    table = reference.rotary_table(Rotary("", frequencies, 1.5, 16, 0.1), np.arange(1000, 1070, dtype=np.int32))
    np.testing.assert_allclose(
        turned.numpy(), reference.rotate(x.reshape(70, 1, 4).copy(), table, "adjacent")[:, 0], atol=2e-6
    )
