"""Weights of four levels, which compress to almost nothing and still make every mistake visible.

All tensors are cut out of one table of random levels, each from a place of its own: a compressor finds the pieces
again. The length of the table is prime, so that rows, heads and experts of one tensor are all different.
"""

import re
import zlib
from collections.abc import Mapping

import numpy as np

TABLE = 8191
MATRIX = (-3.0, -1.0, 1.0, 3.0)
NORM = (0.625, 0.875, 1.125, 1.5)
BIAS = (-0.375, -0.125, 0.125, 0.375)

SPREAD: dict[str, float] = {
    r"(^|\.)(embed_tokens|embeddings|wte)\.weight$": 0.35,  # of the elements themselves
    r"lm_head\.weight$": 2.5,
    r"(q_proj|k_proj|q_b_proj)\.weight$": 1.4,
    r"(gate|router)\.(weight|proj\.weight)$": 2.0,
}
"""Spread of what a matrix makes of a normed row; 1 where nothing is said. Scores and routers need more."""


def fill(
    name: str, shape: tuple[int, ...], rules: Mapping[str, tuple[float, ...] | float], *, add_one: bool, seed: int
) -> np.ndarray:
    """The values of one tensor, float32."""
    rule = next((rule for pattern, rule in rules.items() if re.search(pattern, name)), None)
    if isinstance(rule, tuple):
        levels = rule
    elif len(shape) == 1 or (len(shape) == 2 and "bias" in name.rsplit(".", 1)[-1]):
        levels = BIAS
        if "norm" in name and name.endswith("weight"):
            levels = tuple(level - add_one for level in NORM)
        if rule is not None:
            levels = tuple(level * rule for level in levels)
    else:
        spread = next((spread for pattern, spread in SPREAD.items() if re.search(pattern, name)), 1.0)
        fan_in = 1 if "embed" in name else shape[-1]
        scale = rounded(spread * (rule or 1.0) / np.sqrt(5 * fan_in))
        levels = tuple(level * scale for level in MATRIX)
    table = np.random.default_rng(seed).integers(0, 4, TABLE)
    begin = zlib.crc32(name.encode()) % TABLE
    places = (begin + np.arange(int(np.prod(shape)))) % TABLE
    return np.asarray(levels, np.float32)[table[places]].reshape(shape)


def rounded(scale: float) -> float:
    """To 1, 1.25, 1.5 or 1.75 times a power of two: three times that is still exact in f16."""
    exponent = np.floor(np.log2(scale))
    return float(np.round(scale / 2**exponent * 4) / 4 * 2**exponent)
