"""The engine does an operation, a tape remembers it: the same operations, the same arguments, the same result."""

import ast
import gc
import inspect
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

import everwarm.kernels
from everwarm.kernels import _native
from everwarm.kernels.native import aligned_bytes

WIDTH, HEADS, TOKENS = 64, 2, 3
STUB = ast.parse((Path(inspect.getfile(everwarm.kernels)).parent / "_native.pyi").read_text())
METHODS = {
    item.name: {
        function.name: [argument.arg for argument in function.args.args]
        for function in item.body
        if isinstance(function, ast.FunctionDef) and not function.decorator_list and function.name != "__init__"
    }
    for item in STUB.body
    if isinstance(item, ast.ClassDef)
}


def bound(kind: type) -> dict[str, list[str]]:
    """Methods of a native class and their arguments, as nanobind tells them."""
    found = {}
    for name, method in vars(kind).items():
        if not name.startswith("_") and callable(method):
            said = method.__doc__.splitlines()[0]
            while (shorter := re.sub(r"\[[^\[\]]*\]", "", said)) != said:  # what a type is made of
                said = shorter
            found[name] = ["self", *re.findall(r"(\w+): ", said)]
    return found


def form(seed: int, outputs: int = WIDTH) -> tuple[_native.Form, "weakref.ref[np.ndarray]"]:
    memory = aligned_bytes(_native.Form("F32", outputs, WIDTH).size_bytes)
    memory.view(np.float32)[:] = np.random.default_rng(seed).standard_normal(memory.size // 4)
    made = _native.Form("F32", outputs, WIDTH)
    made.attach(memory)
    return made, weakref.ref(memory.base if memory.base is not None else memory)


def batch_of(pool: _native.KVPool) -> _native.Batch:
    batch = _native.Batch()
    batch.add(0, TOKENS, [pool.allocate()])
    batch.place(pool)
    batch.add_rotary(np.linspace(0.1, 1, 4, dtype=np.float32), 1.0, False)
    return batch


def test_stub_names_what_is_bound() -> None:
    assert bound(_native.Tape) == METHODS["Operations"]
    assert bound(_native.Engine) == METHODS["Operations"] | METHODS["Engine"]


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_what_a_tape_remembers_is_what_the_engine_does(isa: str) -> None:
    engine, tape, values = _native.Engine(isa, 1), _native.Tape(), np.random.default_rng(1).standard_normal
    forms = [form(seed)[0] for seed in range(3)]
    weight, head_weight = np.ones(WIDTH, np.float32), np.ones(WIDTH // HEADS, np.float32)
    start = values((TOKENS, WIDTH), np.float32)

    def operations(to: _native.Engine | _native.Tape, batch: _native.Batch, pool: _native.KVPool) -> list[_native.Rows]:
        x, h, q, k, v, out, spare = (_native.Rows(WIDTH) for _ in range(7))
        x.set(start)
        to.norm(x, weight, 1e-5, h, True)
        to.linear(h, forms, [None, weight, None], [q, k, v], False)
        to.norm_heads(q, head_weight, 1e-5, HEADS)
        to.rotate(q, HEADS, batch, 0)
        to.store_kv(pool, 0, k, v, batch)
        to.attention(pool, 0, q, batch, 0.5, 0, 0.0, out)
        to.linear(out, forms[:1], [None], [x], True)
        to.gated(x, forms[:2], [None, None], out, spare, "silu")
        return [x, h, q, k, v, out]

    pool = _native.KVPool([(HEADS, WIDTH // HEADS, WIDTH // HEADS, False)], "f16")
    done = [rows.numpy().copy() for rows in operations(engine, batch_of(pool), pool)]
    recorded = operations(tape, _native.Batch(), pool)
    assert all(rows.rows == 0 for rows in recorded[1:])
    engine.run(tape, batch_of(pool))
    for rows, expected in zip(recorded, done, strict=True):
        np.testing.assert_array_equal(rows.numpy(), expected)


def test_a_tape_keeps_what_it_refers_to() -> None:
    engine, tape = _native.Engine("portable", 1), _native.Tape()
    x, out = _native.Rows(WIDTH), _native.Rows(WIDTH)
    x.set(np.ones((TOKENS, WIDTH), np.float32))
    made, memory = form(1)
    bias = np.ones(WIDTH, np.float32)
    kept_bias, forms = weakref.ref(bias), [made]
    tape.linear(x, forms, [bias], [out], False)
    forms.clear()  # the tape must not rely on the caller's list
    del made, bias, x
    gc.collect()
    assert memory() is not None
    assert kept_bias() is not None
    engine.run(tape, _native.Batch())
    assert out.rows == TOKENS
    del tape
    gc.collect()
    assert memory() is None
    assert kept_bias() is None
