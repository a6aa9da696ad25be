"""Prometheus metrics of what gateways share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.histogram import Histogram

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)


class StateSource(Protocol):
    """Where gauges are read from."""

    @property
    def up(self) -> bool: ...

    @property
    def age_s(self) -> float: ...

    @property
    def shares(self) -> int: ...


class StateMetrics(Collector):
    """Counts for the event loop's thread alone; gauges have no samples where nothing is shared."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """None: for nobody to see."""
        self._source: StateSource | None = None
        self._exchanges = Counter(
            "prfaas_gateway_state_exchanges",
            "Exchanges with the store that gateways share: `ok` or `failed`.",
            ("result",),
            registry=registry,
        )
        self._losses = Counter(
            "prfaas_gateway_state_losses",
            "How often the store had lost what it knew.",
            registry=registry,
        )
        self._prefix_names = Counter(
            "prfaas_gateway_state_prefix_names",
            "Prefixes of prompts (one for 256 tokens) that this gateway `told` the others it sent "
            "to engines, or `heard` from them.",
            ("direction",),
            registry=registry,
        )
        self._sent = Counter(
            "prfaas_gateway_state_sent",
            "How often this gateway `told` the others between two exchanges what it had just sent, "
            "`heard` it of them, or `failed` to tell; the next exchange tells it anyway.",
            ("result",),
            registry=registry,
        )
        self._prefix_resets = Counter(
            "prfaas_gateway_state_prefix_resets",
            "How often all heard prefixes were forgotten, because some had been missed.",
            registry=registry,
        )
        self._seconds = Histogram(
            "prfaas_gateway_state_exchange_seconds",
            "An exchange with the store; no request waits for one.",
            "result",
            BUCKETS,
        )
        if registry is not None:
            registry.register(self._seconds)
            registry.register(self)

    def watch(self, source: StateSource) -> None:
        """Read the gauges from here when scraped."""
        self._source = source

    def exchanged(self, result: str, seconds: float) -> None:
        self._exchanges.labels(result).inc()
        self._seconds.observe(result, seconds)

    def lost(self) -> None:
        self._losses.inc()

    def sent(self, result: str) -> None:
        self._sent.labels(result).inc()

    def prefixes(self, told: int, heard: int, reset: bool) -> None:
        """What one exchange carried."""
        if told:
            self._prefix_names.labels("told").inc(told)
        if heard:
            self._prefix_names.labels("heard").inc(heard)
        if reset:
            self._prefix_resets.inc()

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "prfaas_gateway_state_up",
            "1 while the store answers; 0: this gateway goes on with what it knew, and with its "
            "share of budgets.",
        )
        age = GaugeMetricFamily(
            "prfaas_gateway_state_age_seconds", "Since the store was last heard."
        )
        shares = GaugeMetricFamily(
            "prfaas_gateway_state_gateways", "Gateways that share budgets, as this one knows it."
        )
        source = self._source
        if source is not None:
            up.add_metric([], source.up)
            age.add_metric([], source.age_s)
            shares.add_metric([], source.shares)
        yield from (up, age, shares)
