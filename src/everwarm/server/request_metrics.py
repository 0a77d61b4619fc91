"""Metrics of requests: what each of them took, told as it ends. One set for all of them, and one per tenant."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from everwarm.server.log import Line

_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1, 5)


class RequestMetrics:
    """What requests took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "everwarm_requests", "Requests by route and status.", ("route", "status"), registry=registry
        )
        self._first = Histogram(
            "everwarm_time_to_first_token_seconds", "From the request to its first token, by tier of its prefix.",
            ("tier",), buckets=_FIRST, registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "everwarm_inter_token_seconds", "From one token of an answer to the next.",
            buckets=_BETWEEN, registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "everwarm_tokens", "Tokens of prompts, of these not computed again (cached), and of answers.", ("kind",),
            registry=registry,
        )  # fmt: skip
        self._lookups = Counter(
            "everwarm_lookups", "Prefixes looked up, by tier and cause.", ("tier", "reason"),
            registry=registry,
        )  # fmt: skip
        self._gone = Counter("everwarm_cancelled_requests", "Requests whose client went away.", registry=registry)
        self._joined = Counter(
            "everwarm_joined_requests", "Requests that were answered with the answer to another one.", registry=registry
        )
        for kind in ("prompt", "cached", "completion"):
            self._tokens.labels(kind)

    def observe(self, line: Line) -> None:
        """A request is over."""
        self._requests.labels(line.route, str(line.status)).inc()
        if line.status == 499:
            self._gone.inc()
        if (outcome := line.outcome) is None:
            return
        if outcome.joined:  # nothing was looked up or computed for it
            self._joined.inc()
            return
        if outcome.ttft_s is not None:
            self._first.labels(outcome.tier or "none").observe(outcome.ttft_s)
        for seconds in outcome.inter_token_s:
            self._between.observe(seconds)
        self._tokens.labels("prompt").inc(outcome.prompt_tokens)
        self._tokens.labels("cached").inc(outcome.cached_tokens)
        self._tokens.labels("completion").inc(outcome.completion_tokens)
        if outcome.tier:
            self._lookups.labels(outcome.tier, outcome.cause or "none").inc()


class AllRequests:
    """The figures of all requests together, and of each tenant's."""

    def __init__(self, together: RequestMetrics, by_tenant: Mapping[str, RequestMetrics]) -> None:
        self._together, self._by_tenant = together, by_tenant

    def observe(self, line: Line) -> None:
        """A request is over."""
        self._together.observe(line)
        if line.tenant is not None and line.tenant in self._by_tenant:
            self._by_tenant[line.tenant].observe(line)
