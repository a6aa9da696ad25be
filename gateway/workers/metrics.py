"""Prometheus metrics of the processes of one gateway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class LinkSource(Protocol):
    """A worker's link to the process that keeps the state."""

    @property
    def up(self) -> bool: ...

    @property
    def age_s(self) -> float: ...

    @property
    def peak_age_s(self) -> float: ...

    @property
    def losses(self) -> int: ...


class WorkerMetrics(Collector):
    """Has no samples in a gateway of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._process = ""
        self._restarts = 0
        self._link: LinkSource | None = None
        registry.register(self)

    def watch(self, process: str, restarts: int, link: LinkSource | None) -> None:
        """Of this process; `link` where it is a worker."""
        self._process, self._restarts, self._link = process, restarts, link

    def collect(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily("prfaas_gateway_workers", "Workers that answer.")
        restarts = _gauge("process_restarts", "How often it was started again.", "process")
        up = _gauge(
            "worker_state_up",
            "1 while the process that keeps the state answers this worker; 0: the worker goes on "
            "with what it knew.",
        )
        age = _gauge("worker_snapshot_age_seconds", "Of what it knows.")
        peak = _gauge("worker_snapshot_age_peak_seconds", "The most in the last minute or two.")
        losses = CounterMetricFamily(
            "prfaas_gateway_worker_state_losses",
            "How often it lost the process that keeps the state.",
            labels=["worker"],
        )
        if self._process:
            restarts.add_metric([self._process], self._restarts)
        link = self._link
        if link is not None:
            workers.add_metric([], 1)
            up.add_metric([self._process], link.up)
            age.add_metric([self._process], link.age_s)
            peak.add_metric([self._process], link.peak_age_s)
            losses.add_metric([self._process], link.losses)
        yield from (workers, restarts, up, age, peak, losses)


def _gauge(name: str, text: str, label: str = "worker") -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prfaas_gateway_{name}", text, labels=[label])
