"""One look at the server, as values: what it holds and what it computes. Taken beside the event loop."""

import os
import time
from dataclasses import dataclass
from typing import Any

from everwarm.server.serving import Serving

FIELDS = (
    "at", "running", "waiting", "active", "hot_bytes", "warm_bytes", "other_bytes", "process_bytes", "weight_bytes",
    "hits", "misses", "steps", "preemptions", "written", "computed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of the whole machine; its fields are `FIELDS`."""

    at: float
    running: int  # sequences in the batch
    waiting: int  # for room in the KV budget
    active: int  # requests that run or wait
    hot_bytes: int
    warm_bytes: int
    other_bytes: int  # of other models, on disk
    process_bytes: int
    weight_bytes: int
    hits: int  # of the weight cache
    misses: int
    steps: int
    preemptions: int
    written: int = 0  # tokens of answers since the start
    computed: int = 0  # tokens of prompts that were not cached

    def as_row(self) -> list[float]:
        return [round(getattr(self, name), 3) for name in FIELDS]


def take(serving: Serving) -> tuple[Sample, int]:
    """A sample, and a number that changes when blocks of agents have moved."""
    llm = serving.llm
    store, weights, engine = llm.agents.stats(), llm.weights.totals(), llm.engine
    sample = Sample(
        time.time(),
        engine.running,
        llm.waiting,
        serving.active,
        store.hot_bytes,
        store.warm_bytes,
        store.other_bytes,
        process_bytes(),
        llm.weights.resident_bytes,
        weights.hits + weights.prefetch_hits,
        weights.misses,
        engine.steps,
        engine.preemptions,
    )
    moved = hash((store.blocks_kept, store.agents, store.warm_bytes, sum(store.events.values())))
    return sample, moved


def budgets(serving: Serving) -> dict[str, Any]:
    """What may be held."""
    store, weights = serving.llm.agents.stats(), serving.llm.weights
    return {
        "hot_budget": store.hot_budget,
        "warm_quota": store.warm_quota,
        "weight_budget": weights.budget,
        "model_bytes": weights.total_bytes,
        "requests_limit": serving.limits.most_queued,
        "read_only_store": store.read_only,
        "quarantined": store.quarantined,
    }


def layers(serving: Serving) -> list[dict[str, Any]]:
    """The weights of each layer: how much of them is in memory."""
    found = serving.llm.weights.residency()
    order = sorted(found, key=lambda layer: -1 if layer is None else layer)
    return [{"layer": layer, "resident_bytes": found[layer][0], "bytes": found[layer][1]} for layer in order]


def process_bytes() -> int:
    """Memory of this process that is not backed by files which others could read as well."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
