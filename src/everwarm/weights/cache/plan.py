"""What a budget for weights will mean, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from everwarm.sizes import Share
from everwarm.weights.cache.place import experts_by_layer, largest_layer, ring_bytes, stages
from everwarm.weights.cache.policy import POLICIES, Item


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """What a budget will mean."""

    total_bytes: int
    least_bytes: int  # a smaller budget is refused
    kept_bytes: int
    streamed_bytes: int  # read again for each forward pass
    ring_bytes: int  # memory beside the budget for what is streamed, one layer ahead


def plan_budget(sizes: Mapping[str, int], budget: int | Share) -> BudgetPlan:
    """For tensors that are used once per pass each; experts count as if all of them were."""
    total, least = sum(sizes.values()), largest_layer(sizes)
    limit = int(budget.fraction * total) if isinstance(budget, Share) else budget
    if total <= limit:
        return BudgetPlan(total, least, total, 0, 0)
    experts = experts_by_layer(sizes)
    passes, layers = stages(sizes)
    for layer, names in experts.items():
        passes[layers[layer]].extend(names)
    used = [Item(name, sizes[name], sizes[name] / 1e9, 1.0) for stage in passes for name in stage]
    kept = POLICIES["value"]().plan(used, limit, ())
    streamed = [sum(sizes[name] for name in stage if name not in kept) for stage in passes]
    return BudgetPlan(total, least, sum(sizes[name] for name in kept), sum(streamed), ring_bytes(streamed, ahead=1))
