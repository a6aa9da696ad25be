"""docs/metrics.md, read off the registries of the running code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.admission import Admission, FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.engines import Engines
from gateway.metrics import GatewayMetrics, LiveSources
from local_engine.metrics import EngineMetrics
from local_engine.requests import EngineStats
from prfaas.clock import SYSTEM_CLOCK
from prfaas.settings import load_settings
from remote_prefill.metrics import AgentMetrics, PrefillMetrics

_HEAD = """\
# Metrics

This page is generated (`make docs`). Gateways and engines serve `/metrics` on their own port;
agents on `agent.metrics_port` and `prefill.metrics_port`, where one is set. Counters end in
`_total`, histograms in `_bucket`, `_sum` and `_count`, as usual. Times are in seconds, sizes in
bytes. Engine metrics carry vLLM's names where vLLM has them.
"""

REGISTRIES = {
    "gateway/metrics.py": "Gateway",
    "local_engine/metrics.py": "Engine",
    "remote_prefill/metrics.py": "Agents",
}
"""Where registries are made, and the heading each is under; a test looks for others."""


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def metrics_page() -> str:
    """All of docs/metrics.md."""
    parts = [_HEAD]
    for title, registry in (
        ("Gateway", _gateway()),
        ("Engine", _engine()),
        ("D's agent", _agent()),
        ("P's agent", _prefill()),
    ):
        rows = ["| metric | type | labels | what it says |", "| --- | --- | --- | --- |"]
        for metric in sorted(_metrics(registry), key=lambda found: found.name):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            text = " ".join(metric.text.split()).replace("|", "\\|")
            rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {text} |")
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _metrics(registry: CollectorRegistry) -> Iterator[_Metric]:
    # Only the registry's own table knows the labels of a metric that has no samples yet.
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            names = tuple(labels or getattr(family, "_labelnames", ()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield _Metric(name, family.type, names, family.documentation)


def _gateway() -> CollectorRegistry:
    engine = {"name": "d-0", "url": "http://127.0.0.1:1", "agent": "127.0.0.1:2"}
    settings = load_settings(overrides={"gateway": {"engines": [engine]}})
    metrics = GatewayMetrics()
    unasked: Any = SimpleNamespace(difference=None)
    view = ClusterView(settings.gateway, settings.limits, SYSTEM_CLOCK)
    metrics.watch(
        LiveSources(
            view=view,
            admission=Admission(1),
            budget=FallbackBudget(1),
            engines=Engines({}, view, settings.limits, SYSTEM_CLOCK, unasked),
            tokenizer_check=unasked,
            clock=SYSTEM_CLOCK,
        )
    )
    return metrics.registry


def _engine() -> CollectorRegistry:
    metrics = EngineMetrics("m", EngineStats, version="0", paced="p", late_s=lambda: 0.0)
    registry: Any = metrics._registry
    assert isinstance(registry, CollectorRegistry)
    return registry


def _agent() -> CollectorRegistry:
    metrics = AgentMetrics()
    metrics.watch_links(tuple)
    metrics.gauges(
        sessions=_zero,
        staging_used=_zero,
        staging_waiting=_zero,
        ready_instances=_zero,
        engine_connected=_zero,
    )
    return metrics.registry


def _prefill() -> CollectorRegistry:
    metrics = PrefillMetrics()
    metrics.watch_links(tuple)
    metrics.gauges(
        sessions=_zero,
        queued=_zero,
        retention_used=_zero,
        ring_records=_zero,
        engine_connected=_zero,
    )
    return metrics.registry


def _zero() -> float:
    return 0.0
