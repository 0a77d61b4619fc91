"""A whole answer with its receipt and what it took, collected from its events."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from everwarm.events import End, Event
from everwarm.kernels.backend import Backend
from everwarm.kv.receipt import Receipt
from everwarm.weights.cache.cache import WeightCache


@dataclass(frozen=True, slots=True)
class WeightUse:
    """What a generation asked of the weight cache."""

    hits: int
    prefetch_hits: int
    misses: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer with its receipt."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    tier: str
    ttft_s: float
    decode_tok_s: float | None  # None if there was only one token
    finish_reason: str
    receipt: Receipt
    weights: WeightUse
    time_s: Mapping[str, float]  # where it went: materialise, products, attention, other kernels, sampling, rest


def completed(
    stream: Callable[[], Iterator[Event | End]],
    weights: WeightCache,
    backend: Backend,
    on_event: Callable[[Event], None] | None = None,
) -> Completion:
    """The answer whose events a `stream` gives, once it has ended; `on_event` is told of each as it comes."""
    started = time.perf_counter()
    events: list[Event] = []
    first = last = started
    weights_before, kernels_before = weights.totals(), backend.spent()
    end: End | None = None
    for event in stream():
        if isinstance(event, End):
            end = event
            continue
        last = time.perf_counter()
        first = first if events else last
        events.append(event)
        if on_event:
            on_event(event)
    assert end is not None, "a stream ends with its end, or raises"
    receipt, decoded = end.receipt, len(events) - 1
    used = weights.totals() - weights_before
    time_s = {"materialise": used.stall_s}
    time_s |= {kind: spent - kernels_before[kind] for kind, spent in backend.spent().items()}
    time_s["sampling"] = end.sampling_s
    time_s["rest"] = last - started - sum(time_s.values())
    return Completion(
        text="".join(event.text for event in events),
        tokens=[event.token for event in events],
        prompt_tokens=receipt.prompt_tokens,
        cached_tokens=receipt.cached_tokens,
        tier=receipt.tier,
        ttft_s=first - started,
        decode_tok_s=decoded / (last - first) if decoded and last > first else None,
        finish_reason=end.finish_reason,
        receipt=receipt,
        weights=WeightUse(used.hits, used.prefetch_hits, used.misses, used.hit_rate),
        time_s=time_s,
    )
