"""Where a tensor belongs in a forward pass, read off its name.

In: names as GGUF files have them (`blk.3.attn_q.weight`; a matrix of an expert is `blk.3.ffn_up.7.weight`). Out: layer
and part of each, and the stages of a pass in order: each layer, then the rest. Experts are no part of a stage: which of
them a pass uses is known only when it gets there.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_BLOCK = re.compile(r"blk\.(\d+)\.(attn|ffn)?")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down)\.\d+\.")
_PARTS = {"attn": "attention", "ffn": "feed-forward"}


_LOOKED_UP = frozenset(
    {
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
        "per_layer_token_embd.weight",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """`layer` is None for what is outside of the layers: embedding, output."""

    layer: int | None
    part: str


def place_of(name: str) -> Place:
    found = _BLOCK.match(name)
    return Place(int(found[1]), _PARTS.get(found[2], "other")) if found else Place(None, "other")


def is_expert(name: str) -> bool:
    return _EXPERT.match(name) is not None


def experts_by_layer(names: Collection[str]) -> dict[int, list[str]]:
    """The tensors of experts; a layer without any is left out."""
    found: dict[int, list[str]] = {}
    for name in names:
        if match := _EXPERT.match(name):
            found.setdefault(int(match[1]), []).append(name)
    return found


def outside_of_passes(names: Collection[str]) -> frozenset[str]:
    """What no forward pass uses as a whole: of an embedding that is not the output too, some rows are looked up; the
    factors of the rotary frequencies are used when a model is opened.
    """
    return _LOOKED_UP | {"token_embd.weight"} if "output.weight" in names else _LOOKED_UP


def stages(names: Collection[str]) -> tuple[list[list[str]], dict[int, int]]:
    """Names by stage of a pass, in order, and the stage of each layer. What is outside of the layers comes last.
    Experts are left out.
    """
    by_layer: dict[int, list[str]] = {}
    outside = []
    unused = outside_of_passes(names)
    for name in names:
        if name in unused or is_expert(name):
            continue
        layer = place_of(name).layer
        if layer is None:
            outside.append(name)
        else:
            by_layer.setdefault(layer, []).append(name)
    order = sorted(by_layer)
    return [by_layer[layer] for layer in order] + [outside], {layer: at for at, layer in enumerate(order)}


def coming(at: int, count: int, ahead: int) -> list[int]:
    """A stage of `count`, and those up to `ahead` layers later. After the last layer: the outside, then the first."""
    found = [at]
    layers = 0
    while layers < ahead and (following := (found[-1] + 1) % count) != at:
        found.append(following)
        layers += following != count - 1
    return found


def ring_bytes(streamed: Sequence[int], ahead: int) -> int:
    """Most that is on its way at once, given what is streamed of each stage."""
    count = len(streamed)
    return max(sum(streamed[stage] for stage in coming(at, count, ahead)) for at in range(count))


def largest_layer(sizes: Mapping[str, int]) -> int:
    """Bytes of the layer that takes most, with all its experts: a long prompt may use them all."""
    totals: dict[int, int] = {}
    for name, size in sizes.items():
        if (layer := place_of(name).layer) is not None:
            totals[layer] = totals.get(layer, 0) + size
    return max(totals.values(), default=0)
