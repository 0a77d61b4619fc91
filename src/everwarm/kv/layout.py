"""How keys and values of one model lie in a block: data, and its digest.

Layers that store alike are a group. All groups of a block lie in one buffer, layer behind layer.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from everwarm.kernels.backend import KVShape, LayerKV


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same things of a token."""

    kind: str  # full, window, latent or state
    layers: int
    k_width: int  # numbers per token and layer
    v_width: int
    type: str  # how a number is stored: f32, f16, q8, q4
    block_bytes: int  # of this group's buffer


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model."""

    block_tokens: int
    groups: tuple[Group, ...]

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups)

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()


def kv_layout(shape: KVShape, kv_type: str, block_tokens: int, layer_bytes: Sequence[int]) -> Layout:
    """Layers that store alike are one group; `layer_bytes` is what each layer takes of a block."""
    alike: dict[LayerKV, list[int]] = {}
    for number, layer in enumerate(shape):
        alike.setdefault(layer, []).append(number)
    return Layout(
        block_tokens,
        tuple(
            Group(
                "latent" if layer.latent else "full",
                len(numbers),
                layer.key_width,
                layer.value_width,
                kv_type,
                sum(layer_bytes[number] for number in numbers),
            )
            for layer, numbers in alike.items()
        ),
    )
