"""How keys and values of one model lie in a block: data, and its digest.

A block has one contiguous buffer per group. Today's models have one group of full attention; windows, latents (MLA) and
recurrent state will be further groups.
"""

import hashlib
import json
from dataclasses import asdict, dataclass


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
