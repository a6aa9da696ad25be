"""Metrics of several processes as those of one: counters and histograms add up, gauges by rule."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

ADDED = frozenset(
    f"prfaas_gateway_{name}"
    for name in (
        "in_flight_requests",
        "in_flight_requests_peak",
        "prompt_memory_pieces",
        "waiting_requests",
        "fallback_granted_tokens",
        "engine_in_flight_requests",
        "engine_most_requests",
        "tenant_in_flight_requests",
        "tenant_waiting_requests",
        "workers",
    )
)
"""Gauges of what each process has its own part of. The peaks need not have been at one time: their
sum is a bound."""
LEAST = frozenset(
    f"prfaas_gateway_{name}" for name in ("telemetry_connected", "cache_events", "engine_up")
)
"""Gauges of which the worst is told; of all others it is the highest."""

Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, array_like=True):
    """One metric with its samples: name, labels, value."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, Labels, float]]

    @property
    def counts(self) -> bool:
        """It only grows, so that what a process has counted stays true after its end."""
        return self.kind in ("counter", "histogram")


def collected(registry: CollectorRegistry) -> list[Family]:
    """All of a registry, as now."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [
                (sample.name, tuple(sample.labels.items()), float(sample.value))
                for sample in metric.samples
            ],
        )
        for metric in registry.collect()
    ]


def merged(parts: Iterable[list[Family]]) -> list[Family]:
    """Those of all parts together, in the order of the first that has each."""
    found: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for part in parts:
        for family in part:
            known = found.setdefault(
                family.name, (Family(family.name, family.kind, family.text, []), {})
            )
            values = known[1]
            for name, labels, value in family.samples:
                key = (name, labels)
                before = values.get(key)
                rule = _rule(family, name)
                values[key] = value if before is None else _together(rule, before, value)
    for family, values in found.values():
        family.samples = [(name, labels, value) for (name, labels), value in values.items()]
    return [family for family, _ in found.values()]


def _rule(family: Family, sample: str) -> Callable[[float, float], float]:
    if sample.endswith("_created"):
        return min
    if family.counts or family.name in ADDED:
        return _sum
    return min if family.name in LEAST else max


def _sum(one: float, other: float) -> float:
    return one + other


def _together(rule: Callable[[float, float], float], one: float, other: float) -> float:
    """What one process does not know, another one may."""
    if math.isnan(one):
        return other
    return one if math.isnan(other) else rule(one, other)


def rendered(families: list[Family]) -> bytes:
    """As `/metrics` serves them."""
    return generate_latest(_Registry(families))


class _Registry:
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


class Kept:
    """The counts of one process, in a file that the next one in its place goes on from, and that is
    read while there is none: so sums never fall. What it has not written yet dies with it.
    """

    def __init__(self, registry: CollectorRegistry, path: Path) -> None:
        self._registry = registry
        self._path = path
        self._before = read_counts(path)

    def families(self) -> list[Family]:
        """With what its predecessors had counted."""
        now = collected(self._registry)
        return merged((now, self._before)) if self._before else now

    def write(self) -> None:
        """Raises OSError."""
        counts = [family for family in self.families() if family.counts and family.samples]
        fresh = self._path.with_name(f"new-{self._path.name}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(counts))
        fresh.replace(self._path)


def read_counts(path: Path) -> list[Family]:
    """What a process had counted when it last wrote; nothing where it never did."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=list[Family])
    except (OSError, msgspec.MsgspecError):
        return []
