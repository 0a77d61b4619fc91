"""Rotary frequencies: one per pair of elements, with the file's scaling and frequency factors already applied.

A rotation is then `position * frequency`, times one magnitude; the kernels need to know nothing else.
"""

import math

import numpy as np
import numpy.typing as npt

from everwarm.kernels.backend import Rotary
from everwarm.model.spec import RopeSpec

_YARN_FAST, _YARN_SLOW = 32.0, 1.0  # turns over the original context beyond / below which a pair is kept / stretched


def make_rope(config: RopeSpec, factors: npt.NDArray[np.float32] | None) -> Rotary:
    """`factors` is the file's `rope_freqs.weight` (Llama 3.1 and later): frequencies are divided by it."""
    exponents = np.arange(0, config.dims, 2, dtype=np.float64) / config.dims
    frequencies = config.base**-exponents
    magnitude = 1.0
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "yarn":
        keep = _yarn_keep(config)
        frequencies = frequencies * keep + frequencies / config.factor * (1 - keep)
        magnitude = config.attention_factor * (1.0 + 0.1 * math.log(config.factor))
    return Rotary(config.pairing, frequencies.astype(np.float32), magnitude)


def _yarn_keep(config: RopeSpec) -> npt.NDArray[np.float64]:
    """1 for pairs that turn often within the original context (kept), 0 for those that hardly turn (stretched)."""

    def pair_with(turns: float) -> float:
        return config.dims * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.base))

    low = max(0.0, math.floor(pair_with(_YARN_FAST)))
    high = min(config.dims - 1.0, math.ceil(pair_with(_YARN_SLOW)))
    ramp = (np.arange(config.dims // 2) - low) / max(0.001, high - low)
    return np.asarray(1.0 - np.clip(ramp, 0.0, 1.0), np.float64)
