"""Prometheus metrics of tenants, with labels for a bounded number of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.histogram import Histogram
from prfaas.tenants import Tenant

MAX_LABELS = 100
"""Tenants with a label of their own; all others share one."""
OTHERS = "_other"
"""No tenant's name: those begin with a letter or a digit."""
NOBODY = "_none"
WAIT_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)


class TenantSources(Protocol):
    """Where gauges are read from."""

    @property
    def tenants(self) -> Mapping[str, Tenant]: ...

    def in_flight(self, tenant: str) -> int: ...

    def waiting(self, tenant: str) -> int: ...


class TenantMetrics(Collector):
    """Counts for the event loop's thread alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: set[str] = set()
        self._sources: TenantSources | None = None
        self._requests = Counter(
            "prfaas_gateway_tenant_requests",
            "Requests by tenant: `served`, `failed`, `left`, or the limit that refused them; "
            "`unauthorised` where no valid key came. Beyond 100 tenants the rest share `_other`.",
            ("tenant", "result"),
            registry=registry,
        )
        self._tokens = Counter(
            "prfaas_gateway_tenant_tokens",
            "Tokens charged to tenants, of the `prompt` or the `completion`.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._reloads = Counter(
            "prfaas_gateway_tenant_reloads",
            "Changes of the file of tenants that were `loaded` or `refused`.",
            ("result",),
            registry=registry,
        )
        self._lost_lines = Counter(
            "prfaas_gateway_audit_lost_lines",
            "Lines of the audit log that could not be written.",
            registry=registry,
        )
        self._wait = Histogram(
            "prfaas_gateway_turn_wait_seconds",
            "Waited for a turn, by priority of the tenant.",
            "priority",
            WAIT_BUCKETS,
        )
        registry.register(self._wait)
        registry.register(self)

    def watch(self, sources: TenantSources) -> None:
        """Read the gauges from here when scraped."""
        self._sources = sources

    def request(self, tenant: str, result: str) -> None:
        """Count one, under its tenant's name (empty: nobody's)."""
        self._requests.labels(self.label(tenant), result).inc()

    def tokens(self, tenant: str, prompt: int, completion: int) -> None:
        label = self.label(tenant)
        self._tokens.labels(label, "prompt").inc(prompt)
        self._tokens.labels(label, "completion").inc(completion)

    def waited(self, priority: int, seconds: float) -> None:
        self._wait.observe(str(priority), seconds)

    def reloaded(self, result: str) -> None:
        self._reloads.labels(result).inc()

    def lost_lines(self, count: int) -> None:
        self._lost_lines.inc(count)

    def label(self, tenant: str) -> str:
        """The name itself for the first so many."""
        if tenant in self._labels:
            return tenant
        if not tenant:
            return NOBODY
        if len(self._labels) >= MAX_LABELS:
            return OTHERS
        self._labels.add(tenant)
        return tenant

    def collect(self) -> Iterable[Metric]:
        known = GaugeMetricFamily("prfaas_gateway_tenants", "Tenants that may call.")
        busy = GaugeMetricFamily(
            "prfaas_gateway_tenant_in_flight_requests", "Being served.", labels=["tenant"]
        )
        waiting = GaugeMetricFamily(
            "prfaas_gateway_tenant_waiting_requests", "Waiting for a turn.", labels=["tenant"]
        )
        if self._sources is not None:
            known.add_metric([], len(self._sources.tenants))
            sums: dict[str, tuple[int, int]] = {}
            for name in self._sources.tenants:
                label = self.label(name)
                in_flight, queued = sums.get(label, (0, 0))
                sums[label] = (
                    in_flight + self._sources.in_flight(name),
                    queued + self._sources.waiting(name),
                )
            for label, (in_flight, queued) in sums.items():
                busy.add_metric([label], in_flight)
                waiting.add_metric([label], queued)
        yield from (known, busy, waiting)
