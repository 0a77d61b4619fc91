"""The best that any cache could do on a trace of accesses, and the traces to ask that about.

In: names in the order of their accesses, sizes, a budget. Out: the byte-weighted hit rate of Belady's rule applied to
single bytes: of all that could be kept, the incoming tensor included, keep the bytes whose next use is nearest. No
cache has a higher hit rate on that trace, because it would have to keep whole tensors and does not know the future.
Traces are pure functions of their arguments.
"""

import heapq
import random
from collections.abc import Mapping, Sequence


def optimum(trace: Sequence[str], sizes: Mapping[str, int], budget: int, warmup: int = 0) -> float:
    """Hit bytes over accessed bytes after the first `warmup` accesses.

    Hits during the warm-up count for nothing, so it serves to choose what to start with: the nearest first uses.
    """
    following = [0] * len(trace)  # for each access, the next one of the same name; the length of the trace if none
    first: dict[str, int] = {}
    for at in range(len(trace) - 1, warmup - 1, -1):
        following[at] = first.get(trace[at], len(trace))
        first[trace[at]] = at

    free = budget
    kept: dict[str, int] = {}  # bytes
    farthest: list[int] = []  # heap of negated next uses of what is kept; a use that is past sinks to its bottom
    for use in sorted(first[name] for name in set(trace[:warmup]) if name in first):
        kept[trace[use]] = min(sizes[trace[use]], free)
        free -= kept[trace[use]]
        heapq.heappush(farthest, -use)

    hits = accessed = 0
    for at in range(warmup, len(trace)):
        name, size = trace[at], sizes[trace[at]]
        held = kept.pop(name, 0)
        hits += held
        accessed += size
        free += held
        if following[at] == len(trace):
            continue
        kept[name] = size
        free -= size
        heapq.heappush(farthest, -following[at])
        while free < 0:
            victim = trace[-farthest[0]]
            taken = min(kept[victim], -free)
            kept[victim] -= taken
            free += taken
            if not kept[victim]:
                heapq.heappop(farthest)
    return hits / accessed if accessed else 0.0


def scan(names: Sequence[str], passes: int) -> list[str]:
    """A dense model: every tensor, in order, in every pass."""
    return list(names) * passes


def random_trace(names: Sequence[str], count: int, seed: int) -> list[str]:
    """Every name as likely as every other."""
    return _generator(seed).choices(names, k=count)


def zipf(names: Sequence[str], count: int, exponent: float, seed: int) -> list[str]:
    """The k-th most popular name is 1 / k ** exponent as likely as the first; the seed decides which one that is."""
    generator = _generator(seed)
    popular = generator.sample(names, len(names))
    return generator.choices(popular, _popularity(len(names), exponent), k=count)


def moe(layers: int, experts: int, active: int, passes: int, exponent: float, seed: int) -> list[str]:
    """A mixture of experts: in every pass each layer uses `active` different ones, the popular ones more often.

    Which ones are popular differs from layer to layer.
    """
    generator = _generator(seed)
    popularity = _popularity(experts, exponent)
    of_layer = [generator.sample(popularity, experts) for _ in range(layers)]
    trace = []
    for layer in list(range(layers)) * passes:
        # The first to arrive when each arrives after an exponential time: draws by popularity without replacement.
        arrival = [generator.expovariate(rate) for rate in of_layer[layer]]
        chosen = sorted(heapq.nsmallest(active, range(experts), key=arrival.__getitem__))
        trace += [f"blk.{layer}.ffn_exps.{expert}" for expert in chosen]
    return trace


def _generator(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - nothing secret


def _popularity(count: int, exponent: float) -> list[float]:
    return [1 / rank**exponent for rank in range(1, count + 1)]
