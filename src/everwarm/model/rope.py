"""Rotary frequencies: one per pair of elements, with the file's scaling and frequency factors already applied.

A rotation is then `position * frequency`, times one magnitude; the kernels need to know nothing else.
"""

import math

import numpy as np
import numpy.typing as npt

from everwarm.kernels.backend import Rotary
from everwarm.model.spec import RopeSpec, Temperature


def make_rope(
    config: RopeSpec, factors: npt.NDArray[np.float32] | None, temperature: Temperature | None = None
) -> Rotary:
    """`factors` is a tensor of the file (Llama 3.1 and later, Phi 3): frequencies are divided by it."""
    exponents = np.arange(0, config.dims, 2, dtype=np.float64) / config.dims
    frequencies = config.base**-exponents
    magnitude = config.attention_factor
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "yarn":
        keep = _yarn_keep(config)
        frequencies = frequencies * keep + frequencies / config.factor * (1 - keep)
        magnitude *= 1.0 + 0.1 * math.log(config.factor)
    return Rotary(
        config.pairing,
        frequencies.astype(np.float32),
        magnitude,
        *((temperature.every, temperature.scale) if temperature else ()),
    )


def _yarn_keep(config: RopeSpec) -> npt.NDArray[np.float64]:
    """1 for pairs that turn often within the original context (kept), 0 for those that hardly turn (stretched)."""

    def pair_with(turns: float) -> float:
        return config.dims * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.base))

    low, high = pair_with(config.fast), pair_with(config.slow)
    if config.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(config.dims - 1.0, high)
    ramp = (np.arange(config.dims // 2) - low) / max(0.001, high - low)
    return np.asarray(1.0 - np.clip(ramp, 0.0, 1.0), np.float64)
