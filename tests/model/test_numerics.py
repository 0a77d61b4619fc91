"""The numerics id changes with what changes numbers, and with nothing else."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from everwarm.kernels import _native
from everwarm.kernels.backend import Rotary
from everwarm.kernels.native import NativeBackend
from everwarm.kernels.reference import ReferenceBackend
from everwarm.model.numerics import numerics_id
from everwarm.model.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, RopeSpec

ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec("adjacent", 16, 10000.0), scale=0.25)
LAYER = LayerSpec(ATTENTION, FeedForwardSpec(128))
CONFIG = ModelConfig(
    architecture="llama", name="a", width=64, vocab_size=100, context=512, norm_epsilon=1e-5, layers=(LAYER, LAYER)
)
ROTARY = Rotary("adjacent", np.ones(8, np.float32), 1.0)


def native(isa: str = "portable", threads: int = 1, kv_type: str = "f16") -> NativeBackend:
    return NativeBackend(isa, threads, kv_type)


def test_instruction_set_threads_and_names_change_nothing() -> None:
    ids = {
        numerics_id(CONFIG, [ROTARY], native(isa, threads)) for isa in _native.supported_isas() for threads in (1, 2)
    }
    ids.add(numerics_id(replace(CONFIG, name="b", context=8192, vocab_size=101), [ROTARY], native()))
    assert len(ids) == 1


def changed(**attention: object) -> LayerSpec:
    return replace(LAYER, attention=replace(ATTENTION, **attention))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, norm_epsilon=1e-6),
        replace(CONFIG, width=96),
        replace(CONFIG, layers=(LAYER,) * 3),
        replace(CONFIG, layers=(changed(window=128),) * 2),
        replace(CONFIG, layers=(changed(kv_heads=4),) * 2),
        replace(CONFIG, layers=(changed(head_dim=32, scale=1 / math.sqrt(32)),) * 2),
        replace(CONFIG, layers=(changed(scale=0.5),) * 2),
        replace(CONFIG, layers=(changed(softcap=30.0),) * 2),
        replace(CONFIG, layers=(changed(qk_norm=True),) * 2),
        replace(CONFIG, layers=(LAYER, changed(window=128))),
        replace(CONFIG, layers=(LAYER, changed(rope=RopeSpec("adjacent", 16, 20000.0)))),
        replace(CONFIG, layers=(replace(LAYER, feed_forward=FeedForwardSpec(256)),) * 2),
        replace(CONFIG, layers=(replace(LAYER, feed_forward=FeedForwardSpec(128, "gelu")),) * 2),
    ],
)
def test_constants_change_it(config: ModelConfig) -> None:
    assert numerics_id(config, [ROTARY], native()) != numerics_id(CONFIG, [ROTARY], native())


def test_the_id_of_a_plain_model_is_what_it_was_before_layers_had_specs() -> None:
    """Or every agent that people have would be cold."""
    said = {
        "backend": native().numerics, "heads": [2, 64, 4, 2, 16, 128], "epsilon": (1e-5).hex(), "scale": (0.25).hex(),
        "window": None, "pairing": "adjacent", "frequencies": ROTARY.frequencies.tobytes().hex(),
        "magnitude": (1.0).hex(),
    }  # fmt: skip
    before = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    assert numerics_id(CONFIG, [ROTARY], native()) == before


def test_rotation_kv_type_and_backend_change_it() -> None:
    ids = [
        numerics_id(CONFIG, [rotary], native(kv_type=kv_type))
        for rotary in (
            ROTARY,
            replace(ROTARY, pairing="halves"),
            replace(ROTARY, magnitude=1.5),
            replace(ROTARY, frequencies=np.full(8, 2, np.float32)),
        )
        for kv_type in ("f16", "q8", "q4")
    ]
    ids.append(numerics_id(CONFIG, [ROTARY], ReferenceBackend(1)))
    assert len(set(ids)) == len(ids)


def test_types_that_were_computed_in_f32_before_change_it_on_the_native_backend_alone() -> None:
    plain = numerics_id(CONFIG, [ROTARY], native())
    assert numerics_id(CONFIG, [ROTARY], native(), {"F32", "Q4_K", "Q6_K"}) == plain
    assert len({plain, *(numerics_id(CONFIG, [ROTARY], native(), {"F32", kind}) for kind in ("Q2_K", "IQ3_S"))}) == 2
    assert native().changed_types < set(_native.TENSOR_TYPES)
    reference = ReferenceBackend(1)
    assert numerics_id(CONFIG, [ROTARY], reference, {"Q2_K"}) == numerics_id(CONFIG, [ROTARY], reference)
