"""Routers and experts of the native backend, against the reference backend, and row by row."""

import numpy as np
import pytest

from everwarm.kernels import _native, reference
from everwarm.kernels.backend import Router
from everwarm.kernels.native import GATING, aligned_bytes
from kernels.test_native import engine, packed, quantised, rows

__all__ = ["engine"]


def float_form(engine: _native.Engine, weight: np.ndarray) -> _native.Form:
    form = _native.Form("F32", *weight.shape)
    memory = aligned_bytes(form.size_bytes)
    engine.pack(form, np.ascontiguousarray(weight).reshape(-1).view(np.uint8), memory)
    form.attach(memory)
    return form


def routing(experts: int, used: int, gating: str, **how: object) -> tuple[_native.Routing, Router]:
    said = {"normalised": True, "scale": 1.0, "groups": 1, "groups_used": 1} | how
    router = Router(experts, used, gating, **said)  # type: ignore[arg-type]
    return _native.Routing(
        experts, used, GATING.index(gating), router.normalised, router.scale, router.groups, router.groups_used
    ), router


@pytest.mark.parametrize(
    ("experts", "used", "gating", "how"),
    [
        (8, 2, "softmax", {}),
        (60, 4, "softmax", {"normalised": False, "scale": 2.5}),
        (33, 5, "softmax of the chosen", {}),
        (64, 6, "sigmoid", {"groups": 8, "groups_used": 3}),
        (64, 6, "softmax", {"groups": 8, "groups_used": 3, "normalised": False}),
        (16, 16, "sigmoid", {"scale": 1.5}),
        (1, 1, "softmax", {}),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_routing(
    engine: _native.Engine, experts: int, used: int, gating: str, how: dict[str, object], biased: bool
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((37, 48)).astype(np.float32)
    weight = rng.standard_normal((experts, 48)).astype(np.float32)
    bias, selection = ((rng.standard_normal(experts) * 0.3).astype(np.float32) for _ in range(2))
    routed, router = routing(experts, used, gating, **how)
    scores = _native.Rows(experts)
    given = (bias, selection) if biased else (None, None)
    engine.route(rows(x), float_form(engine, weight), *given, None, scores, routed)
    expected = reference.route(reference.linear(x, weight, given[0]), given[1], router)
    assert routed.chosen == expected.experts.reshape(-1).tolist()
    np.testing.assert_allclose(routed.weights, expected.weights.reshape(-1), rtol=2e-5)


def test_among_equal_experts_the_lower_is_chosen(engine: _native.Engine) -> None:
    routed, _ = routing(8, 3, "softmax")
    x = rows(np.ones((1, 16), np.float32))
    engine.route(x, float_form(engine, np.ones((8, 16), np.float32)), None, None, None, _native.Rows(8), routed)
    assert routed.chosen == [0, 1, 2]
    np.testing.assert_allclose(routed.weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F32", "F16"])
@pytest.mark.parametrize(
    ("activation", "biased"), [("silu", False), ("clamped", True), ("positive", False), ("positive", True)]
)
def test_experts(engine: _native.Engine, kind: str, activation: str, biased: bool) -> None:
    experts, used, width, hidden, count = 6, 2, 64, 96, 29
    rng = np.random.default_rng(1)
    x = rng.standard_normal((count, width)).astype(np.float32)
    made = [
        [
            packed(engine, kind, *shape, seed=10 * e + i)
            for i, shape in enumerate([(hidden, width)] * 2 + [(width, hidden)])
        ]
        for e in range(experts)
    ]
    biases = [
        [rng.standard_normal(size).astype(np.float32) if biased else None for size in (hidden, hidden, width)]
        for _ in range(experts)
    ]
    routed, router = routing(experts, used, "softmax")
    router_weight = rng.standard_normal((experts, width)).astype(np.float32)
    has_gates = activation != "positive"

    def computed(some: np.ndarray) -> np.ndarray:
        h, out = rows(some), _native.Rows(width)
        engine.route(h, float_form(engine, router_weight), None, None, None, _native.Rows(experts), routed)
        forms = [[made[e][i][0] if i or has_gates else None for e in range(experts)] for i in range(3)]
        extra = [[biases[e][i] for e in range(experts)] for i in range(3)]
        work = [_native.Rows(size) for size in (width, hidden, hidden, width, width)]
        engine.experts(h, routed, *forms, *extra, activation, work, out)
        return out.numpy().copy()

    found = computed(x)
    for row in (0, 7, count - 1):  # what a row gets does not depend on the others
        np.testing.assert_array_equal(computed(x[row : row + 1])[0], found[row])
    chosen = reference.route(reference.linear(x, router_weight), None, router)
    seen = quantised if kind.startswith("Q") else np.asarray  # by the product
    expected = np.zeros_like(x)
    for row in range(count):
        for rank in range(used):
            e = chosen.experts[row, rank]
            gate, up, down = (weight for _, weight in made[e])
            some = seen(x[row : row + 1])
            beside = reference.linear(some, up, biases[e][1])
            turned = reference.linear(some, gate, biases[e][0]) if has_gates else beside
            inner = seen(reference.activated_gate(turned, beside, activation))
            expected[row] += chosen.weights[row, rank] * reference.linear(inner, down, biases[e][2])[0]
    assert np.abs(found - expected).max() < (1e-2 if kind.startswith("Q") else 1e-4) * expected.std()


def test_an_expert_that_was_chosen_must_be_there(engine: _native.Engine) -> None:
    routed, _ = routing(2, 1, "softmax")
    h = rows(np.ones((1, 32), np.float32))
    engine.route(h, float_form(engine, np.eye(2, 32, dtype=np.float32)), None, None, None, _native.Rows(2), routed)
    form, _ = packed(engine, "Q4_0", 32, 32)
    work = [_native.Rows(32) for _ in range(5)]
    nobody = [None, None]
    engine.experts(h, routed, *[[form, None]] * 3, nobody, nobody, nobody, "silu", work, _native.Rows(32))
    with pytest.raises(ValueError, match="expert 0 has a gate, positive takes none"):
        engine.experts(h, routed, *[[form, None]] * 3, nobody, nobody, nobody, "positive", work, _native.Rows(32))
    with pytest.raises(ValueError, match="expert 0 was chosen and has no forms"):
        engine.experts(h, routed, *[[None, form]] * 3, nobody, nobody, nobody, "silu", work, _native.Rows(32))
