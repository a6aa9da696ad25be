"""A histogram that takes many equal values at once, and costs what one of them costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Histogram(Collector):
    """Owns its counts; register it with a registry. For one thread: the event loop's.

    prometheus_client's own takes one value a call, under a lock: for the tokens of a stream that
    arrive together it was a good part of what relaying them costs.
    """

    def __init__(self, name: str, text: str, label: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._bounds = (*buckets, math.inf)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, of: str, value: float, count: int = 1) -> None:
        """`count` times `value`, under the label's value `of`."""
        counts = self._counts.get(of)
        if counts is None:
            counts = self._counts[of] = [0] * len(self._bounds)
            self._sums[of] = 0.0
        counts[bisect_left(self._bounds, value)] += count
        self._sums[of] += value * count

    def observe_each(self, of: str, values: Sequence[float]) -> None:
        """Several values, under the label's value `of`."""
        counts = self._counts.get(of)
        if counts is None:
            counts = self._counts[of] = [0] * len(self._bounds)
            self._sums[of] = 0.0
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
        self._sums[of] += sum(values)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for of, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip(self._bounds, counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == math.inf else str(float(bound)), float(total)))
            family.add_metric([of], buckets, self._sums[of])
        yield family
