"""What a store holds and has done, as values: for metrics, commands and tests. Nobody outside `kv` looks deeper."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One moment of a store."""

    agents: int  # of all tenants, with and without a name
    agents_by_tenant: Mapping[str, int]
    read_only: str  # why nothing is saved; empty if it is
    hot_bytes: int
    hot_budget: int | None
    blocks_in_use: int  # in memory: of running sequences, and kept
    blocks_kept: int  # of these known by their content
    warm_bytes: int  # of this model
    other_bytes: int  # of other models, and in quarantine
    warm_quota: int
    quarantined: int
    events: Mapping[str, int]
    seconds: Mapping[str, float]
