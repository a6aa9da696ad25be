"""A counter of events by labels, for one thread: it costs what an addition costs."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Counts(Collector):
    """Owns its counts; register it with a registry. For the event loop's thread alone.

    prometheus_client's own looks its labels up and takes two locks each time.
    """

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def inc(self, *values: str) -> None:
        """One more under these values of the labels, in their order."""
        self._counts[values] = self._counts.get(values, 0) + 1

    def add(self, count: int, *values: str) -> None:
        """So many more, 0 or more."""
        self._counts[values] = self._counts.get(values, 0) + count

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric([str(value) for value in values], float(count))
        yield family
