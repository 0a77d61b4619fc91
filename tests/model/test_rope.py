"""Rotary frequencies, against values that transformers computes (`modeling_rope_utils`)."""

import numpy as np

from everwarm.model.rope import make_rope
from everwarm.model.spec import RopeSpec


def rope_config(**changes: object) -> RopeSpec:
    fields: dict[str, object] = {
        "pairing": "halves",
        "dims": 64,
        "base": 1_000_000.0,
        "scaling": "none",
        "factor": 1.0,
        "original_context": 32768,
        "attention_factor": 1.0,
    }
    return RopeSpec(**(fields | changes))  # type: ignore[arg-type]


def test_plain_frequencies() -> None:
    rope = make_rope(rope_config(base=10000.0, dims=8), None)
    np.testing.assert_allclose(rope.frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-7)
    assert rope.magnitude == 1.0


def test_linear_scaling_stretches_every_frequency() -> None:
    plain = make_rope(rope_config(), None).frequencies
    stretched = make_rope(rope_config(scaling="linear", factor=4.0), None).frequencies
    np.testing.assert_array_equal(stretched, plain / np.float32(4))


def test_factors_divide() -> None:
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    plain = make_rope(rope_config(), None).frequencies
    np.testing.assert_allclose(make_rope(rope_config(), factors).frequencies, plain / factors, rtol=3e-7)


def test_yarn_agrees_with_transformers() -> None:
    # Qwen2Config(hidden_size=896, num_attention_heads=14), yarn, factor 4, original context 32768, theta 1e6.
    expected = [
        1.0, 0.6493816375732422, 0.4216965138912201, 0.2738419771194458, 0.17782793939113617, 0.11547820270061493,
        0.07498941570520401, 0.04869675263762474, 0.03162277862429619, 0.02053525112569332, 0.01333521492779255,
        0.00865964312106371, 0.005154795479029417, 0.0030431177001446486, 0.0017785303061828017, 0.001026617712341249,
        0.0005833333707414567, 0.00032469083089381456, 0.0001757068675942719, 9.128064994001761e-05,
        4.4456985051510856e-05, 2.8869548259535804e-05, 1.8747356079984456e-05, 1.2174188668723218e-05,
        7.905693564680405e-06, 5.133812464919174e-06, 3.3338035336782923e-06, 2.1649109385180054e-06,
        1.405853367941745e-06, 9.129353202297352e-07, 5.928434347879374e-07, 3.8498163235090033e-07,
    ]  # fmt: skip
    rope = make_rope(rope_config(scaling="yarn", factor=4.0), None)
    np.testing.assert_allclose(rope.frequencies, expected, rtol=1e-6)
    np.testing.assert_allclose(rope.magnitude, 1.138629436111989, rtol=1e-12)
