"""Metrics for Prometheus: what each request took, told as it ends, and what the caches hold, asked when scraped.

Everything has the prefix everwarm_ and base units. No label holds a name that a client has chosen. A tenant sees the
figures of its own requests and agents; what all tenants do together is for operators.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from everwarm.server.keys import Caller
from everwarm.server.request_metrics import AllRequests, RequestMetrics
from everwarm.server.serving import Serving

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_STEPS = (0, 1, 2, 4)


class Metrics(Collector):
    """All metrics of one served model."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._registry = registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each: when it began
        ProcessCollector(namespace="everwarm", registry=registry)
        registry.register(self)
        self._tenants = {tenant: _Tenant(serving, tenant) for tenant in serving.keys.tenants}
        by_tenant = {tenant: figures.requests for tenant, figures in self._tenants.items()}
        self.requests = AllRequests(RequestMetrics(registry), by_tenant)

    def text(self, caller: Caller) -> bytes:
        """What the caller may see, as Prometheus reads it: everything, or a tenant's own figures."""
        if caller.is_operator or caller.tenant is None:
            return generate_latest(self._registry)
        return generate_latest(self._tenants[caller.tenant].registry)

    def describe(self) -> list[Metric]:
        return []  # known only when asked; prometheus_client would ask before there is anything

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._weights()
        yield from self._store()

    def _engine(self) -> Iterator[Metric]:
        serving, engine = self._serving, self._serving.llm.engine
        yield _gauge("requests_active", "Requests that run or wait.", serving.active)
        yield _gauge("requests_limit", "Requests that may run or wait; more get 429.", serving.limits.most_queued)
        yield _gauge("sequences_running", "Sequences in the batch.", engine.running)
        yield _gauge("sequences_waiting", "Sequences that wait for room in the KV budget.", serving.llm.waiting)
        yield _counter("engine_steps", "Batches computed.", engine.steps)
        yield _counter("preemptions", "Sequences that gave up their memory to others for a while.", engine.preemptions)
        yield _counter("decode_passes", "Steps that gave tokens, added up over sequences.", engine.passes)
        yield _counter("drafted_tokens", "Rows computed for drafts of tokens.", engine.drafted)
        yield _counter("accepted_draft_tokens", "Of these right: tokens without a pass of their own.", engine.accepted)
        drafts = serving.llm.drafts
        yield _gauge("draft_memory_bytes", "What drafts are read from.", 0 if drafts is None else drafts.size_bytes)
        yield _histogram("batch_size", "Sequences in a step.", engine.batch_sizes, _SIZES)
        yield _histogram(
            "cancel_wait_steps", "Steps from the cancellation of a sequence until its blocks were free.",
            engine.cancel_waits, _STEPS,
        )  # fmt: skip

    def _weights(self) -> Iterator[Metric]:
        stats = self._serving.llm.weights.stats()
        info = {"instance": stats.instance, "policy": stats.policy, "mapped": str(stats.mapped).lower()}
        yield InfoMetricFamily("everwarm_weight_cache", "The weight cache; its instance never changes.", info)
        for name in ("hits", "prefetch_hits", "misses", "evictions", "unexpected_misses"):
            yield _counter(f"weight_cache_{name}", f"{name.replace('_', ' ').capitalize()}.", getattr(stats, name))
        yield _counter("weight_cache_stall_seconds", "The computation waited for weights.", stats.stall_s)
        yield _gauge("weight_cache_hit_ratio", "Of uses since the start, served from memory.", stats.hit_rate)
        yield _gauge("weight_cache_resident_bytes", "Held in memory.", stats.resident_bytes)
        yield _gauge("weight_cache_pinned_bytes", "Of these exempt from eviction.", stats.pinned_bytes)
        yield _gauge("weight_cache_budget_bytes", "What it may hold.", stats.budget)
        yield _gauge("weight_cache_model_bytes", "All weights of the model.", stats.total_bytes)

    def _store(self) -> Iterator[Metric]:
        store = self._serving.llm.agents.stats()
        counters, seconds = store.events, store.seconds
        held = GaugeMetricFamily("everwarm_tier_bytes", "Bytes of keys and values, by tier.", labels=["tier"])
        most = GaugeMetricFamily("everwarm_tier_budget_bytes", "What a tier may hold.", labels=["tier"])
        for tier, now, limit in (
            ("hot", store.hot_bytes, store.hot_budget),
            ("warm", store.warm_bytes + store.other_bytes, store.warm_quota),
        ):
            held.add_metric([tier], now)
            if limit is not None:
                most.add_metric([tier], limit)
        yield held
        yield most
        evicted = CounterMetricFamily("everwarm_evicted_blocks", "Blocks let go, by tier.", labels=["tier"])
        for tier in ("hot", "warm"):
            evicted.add_metric([tier], counters.get(f"{tier}_evictions", 0))
        yield evicted
        yield _gauge("agents", "Known agents of all tenants, with and without a name.", store.agents)
        yield _gauge("blocks_in_use", "Blocks in memory, of running sequences and kept.", store.blocks_in_use)
        yield _gauge("blocks_kept", "Of these known by their content: kept for the next turn.", store.blocks_kept)
        yield _gauge("store_read_only", "1 if agents are not saved.", int(bool(store.read_only)))
        yield _gauge("quarantined_files", "Damaged files set aside.", store.quarantined)
        for name, help_text in (
            ("corrupt", "Blocks and manifests that were damaged, and not used."),
            ("save_errors", "Turns and blocks that could not be saved."),
            ("read_errors", "Files that could not be read."),
            ("commits", "Turns saved."),
            ("saved_blocks", "Blocks written."),
            ("restored_blocks", "Blocks read back."),
            ("restored_bytes", "Bytes read back."),
        ):
            yield _counter(name if name != "corrupt" else "corrupt_blocks", help_text, counters.get(name, 0))
        saved = sum(counters.get(name, 0) for name in ("saved_bytes", "saved_tail_bytes", "manifest_bytes"))
        yield _counter("saved_bytes", "Bytes written.", saved)
        yield _counter("save_seconds", "Spent writing, beside the computation.", seconds.get("save", 0.0))
        yield _counter("restore_seconds", "Spent reading back.", seconds.get("restore", 0.0))


class _Tenant(Collector):
    """What one tenant may know: of its own requests and agents."""

    def __init__(self, serving: Serving, tenant: str) -> None:
        self._serving, self._tenant = serving, tenant
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        agents = self._serving.llm.agents.stats().agents_by_tenant.get(self._tenant, 0)
        yield _gauge("agents", "Known agents of this tenant, with and without a name.", agents)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"everwarm_{name}", help_text, value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"everwarm_{name}", help_text, value)


def _histogram(name: str, help_text: str, counts: Mapping[int, int], bounds: tuple[int, ...]) -> Metric:
    counts = dict(counts)
    buckets = [(str(float(most)), float(sum(n for size, n in counts.items() if size <= most))) for most in bounds]
    buckets.append(("+Inf", float(sum(counts.values()))))
    total = sum(size * n for size, n in counts.items())
    return HistogramMetricFamily(f"everwarm_{name}", help_text, buckets=buckets, sum_value=float(total))
