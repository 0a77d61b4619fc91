"""How keys and values of one model lie in blocks: data, and its digest.

Layers that store alike are a group. All groups of a kind of block lie in one buffer, layer behind layer. A block of
kind `full` is what every history has from its beginning on; blocks of other kinds lie beside it where they are needed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from everwarm.kernels.backend import (
    EMPTY_BLOCK,
    FULL,
    STATE,
    WINDOW,
    KVShape,
    LayerKV,
    StateShape,
    places,
    state_places,
)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same things of a token."""

    kind: str  # full, latent, window or state
    layers: int
    k_width: int  # numbers per token and layer
    v_width: int
    type: str  # how a number is stored: f32, f16, q8, q4
    block_bytes: int  # of this group's buffer
    reach: int = 0  # of a window: how many tokens back it sees, the own one included

    @property
    def block_kind(self) -> str:
        """The kind of block that it lies in."""
        return self.kind if self.kind in (WINDOW, STATE) else FULL


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model."""

    block_tokens: int
    groups: tuple[Group, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of blocks."""
        return tuple(dict.fromkeys(group.block_kind for group in self.groups))

    def of_kind(self, kind: str) -> list[Group]:
        return [group for group in self.groups if group.block_kind == kind]

    def block_bytes(self, kind: str = FULL) -> int:
        return sum(group.block_bytes for group in self.of_kind(kind))

    @property
    def has_state(self) -> bool:
        return STATE in self.kinds

    @property
    def reach(self) -> int:
        """How many tokens before a position its windows need there; 0 if there are none."""
        return max((group.reach for group in self.groups), default=0)

    def as_json(self) -> dict[str, Any]:
        said = asdict(self)
        for group in said["groups"]:
            if not group["reach"]:  # as it was before there were windows
                del group["reach"]
        return said

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(self.as_json(), sort_keys=True).encode(), digest_size=16).hexdigest()


def kv_layout(
    shape: KVShape, states: StateShape, kv_type: str, block_tokens: int, layer_bytes: Mapping[str, Sequence[int]]
) -> Layout:
    """Layers that store alike are one group; `layer_bytes` is what each layer takes of a block of its kind. States are
    stored as they are computed.
    """
    alike: dict[LayerKV, list[int]] = {}
    for layer, (kind, number) in zip(shape, places(shape), strict=True):
        alike.setdefault(layer, []).append(layer_bytes[kind][number])
    groups = [Group(FULL, 0, 0, 0, kv_type, EMPTY_BLOCK)] if not any(not layer.window for layer in shape) else []
    ends = state_places(states)
    for same in dict.fromkeys(states):
        sizes = [4 * (ends[n + 1] - ends[n]) for n, one in enumerate(states) if one == same]
        groups.append(Group(STATE, len(sizes), same.conv, same.state, "f32", sum(sizes)))
    return Layout(
        block_tokens,
        (
            *(
                Group(
                    "latent" if layer.latent else WINDOW if layer.window else FULL,
                    len(sizes),
                    layer.key_width,
                    layer.value_width,
                    kv_type,
                    sum(sizes),
                    layer.window,
                )
                for layer, sizes in alike.items()
            ),
            *groups,
        ),
    )
