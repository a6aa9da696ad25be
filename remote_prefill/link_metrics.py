"""Metrics of an agent's links, read from their meters at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.telemetry import LinkInfo, LinkLimit

Links = Callable[[], Iterable[LinkInfo]]

_COMMON: tuple[tuple[str, str, Callable[[LinkInfo], float]], ...] = (
    (
        "goodput_bytes_per_second",
        "What the link can carry; 0: unknown.",
        lambda k: k.goodput_bytes_per_s,
    ),
    ("rate_bytes_per_second", "What has moved in the last second.", lambda k: k.rate_bytes_per_s),
    ("rtt_seconds", "Round trip.", lambda k: k.rtt_s),
    (
        "queueing_seconds",
        "Round trip over the shortest of the last minutes.",
        lambda k: k.queueing_s,
    ),
    (
        "stalled_seconds",
        "So long nothing has moved, although it should; 0 below a second.",
        (lambda k: k.stalled_s),
    ),
    (
        "to_come_bytes",
        "Wire bytes still to come for open sessions, as estimated.",
        lambda k: k.in_flight_bytes,
    ),
    ("age_seconds", "Since the other end was last heard.", lambda k: k.age_s),
)
_AT_P: tuple[tuple[str, str, Callable[[LinkInfo], float]], ...] = (
    (
        "under_way_bytes",
        "Handed to the transport and not verified by D.",
        lambda k: k.under_way_bytes,
    ),
    ("held_bytes", "Received and not verified by D, as it says.", lambda k: k.held_bytes),
    ("free_staging_bytes", "Free staging at D, as it says.", lambda k: k.free_staging_bytes),
)
_AT_D: tuple[tuple[str, str, Callable[[LinkInfo], float]], ...] = (
    ("held_bytes", "Received and not verified.", lambda k: k.held_bytes),
)


class LinkCollector(Collector):
    """Gauges and counters of `links`, labelled by P's names at D and by D's name at P."""

    def __init__(self, prefix: str, links: Links, *, at_p: bool) -> None:
        self._prefix = f"{prefix}_link"
        self._links = links
        self._at_p = at_p
        self._labels = ("agent",) if at_p else ("peer", "instance")

    def collect(self) -> Iterable[Metric]:
        links = list(self._links())
        for name, text, value in (*_COMMON, *(_AT_P if self._at_p else _AT_D)):
            gauge = GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=self._labels)
            for link in links:
                gauge.add_metric(self._names(link), value(link))
            yield gauge
        limit = GaugeMetricFamily(
            f"{self._prefix}_limit",
            "1 for what limits the link now: idle, sender, receiver or link.",
            labels=(*self._labels, "limit"),
        )
        for link in links:
            for each in LinkLimit:
                limit.add_metric((*self._names(link), each.value), float(link.limit is each))
        yield limit
        stalls = CounterMetricFamily(
            f"{self._prefix}_stalls",
            "How often nothing moved for a second, although it should.",
            labels=self._labels,
        )
        for link in links:
            stalls.add_metric(self._names(link), link.stalls)
        yield stalls
        if self._at_p:
            yield self._retransmitted(links)

    def _retransmitted(self, links: Iterable[LinkInfo]) -> Metric:
        counter = CounterMetricFamily(
            f"{self._prefix}_retransmitted_bytes",
            "Sent again by this host's kernel; absent where it does not say.",
            labels=self._labels,
        )
        for link in links:
            if link.retransmitted_bytes is not None:
                counter.add_metric(self._names(link), link.retransmitted_bytes)
        return counter

    def _names(self, link: LinkInfo) -> Sequence[str]:
        return (link.agent,) if self._at_p else (link.peer, link.instance)
