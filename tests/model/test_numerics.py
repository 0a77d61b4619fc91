"""The numerics id changes with what changes numbers, and with nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from everwarm.kernels import _native
from everwarm.kernels.backend import Rotary
from everwarm.kernels.native import NativeBackend
from everwarm.kernels.reference import ReferenceBackend
from everwarm.model.config import ModelConfig, RopeConfig
from everwarm.model.numerics import numerics_id

CONFIG = ModelConfig(
    architecture="llama",
    name="a",
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_width=128,
    vocab_size=100,
    context=512,
    norm_epsilon=1e-5,
    rope=RopeConfig("adjacent", 16, 10000.0, "none", 1.0, 512, 1.0),
    window=None,
    qkv_bias=False,
)
ROTARY = Rotary("adjacent", np.ones(8, np.float32), 1.0)


def native(isa: str = "portable", threads: int = 1, kv_type: str = "f16") -> NativeBackend:
    return NativeBackend(isa, threads, kv_type)


def test_instruction_set_threads_and_names_change_nothing() -> None:
    ids = {numerics_id(CONFIG, ROTARY, native(isa, threads)) for isa in _native.supported_isas() for threads in (1, 2)}
    ids.add(numerics_id(replace(CONFIG, name="b", context=8192, vocab_size=101), ROTARY, native()))
    assert len(ids) == 1


@pytest.mark.parametrize(
    "change",
    [{"norm_epsilon": 1e-6}, {"window": 128}, {"kv_heads": 4}, {"head_dim": 32}, {"layers": 3}],
    ids=lambda change: next(iter(change)),
)
def test_constants_change_it(change: dict[str, int]) -> None:
    assert numerics_id(replace(CONFIG, **change), ROTARY, native()) != numerics_id(CONFIG, ROTARY, native())  # type: ignore[arg-type]


def test_rotation_kv_type_and_backend_change_it() -> None:
    ids = [
        numerics_id(CONFIG, rotary, native(kv_type=kv_type))
        for rotary in (
            ROTARY,
            replace(ROTARY, pairing="halves"),
            replace(ROTARY, magnitude=1.5),
            replace(ROTARY, frequencies=np.full(8, 2, np.float32)),
        )
        for kv_type in ("f16", "q8", "q4")
    ]
    ids.append(numerics_id(CONFIG, ROTARY, ReferenceBackend(1)))
    assert len(set(ids)) == len(ids)
