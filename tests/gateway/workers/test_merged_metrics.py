"""Metrics of several processes come out as those of one."""

from __future__ import annotations

import math
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.counts import Counts
from gateway.histogram import Histogram
from gateway.workers.merged_metrics import (
    ADDED,
    LEAST,
    Kept,
    collected,
    merged,
    read_counts,
    rendered,
)
from scripts.metrics_page import _gateway, _metrics

ALIKE = frozenset(
    f"prfaas_gateway_{name}"
    for name in (
        "breaker_open", "certificate_end_seconds", "discovered_members", "engine_out",
        "index_blocks", "link_goodput_bytes_per_second", "link_in_flight_bytes", "link_limit",
        "link_queueing_seconds", "link_rate_bytes_per_second", "link_ready", "link_rtt_seconds",
        "link_stalled_seconds", "link_wire_ratio", "process_restarts", "recent_prefix_blocks",
        "state_age_seconds", "state_gateways", "state_up", "telemetry_age_seconds", "tenants",
        "tokenizer_difference_ratio", "worker_snapshot_age_peak_seconds",
        "worker_snapshot_age_seconds", "worker_state_up",
    )
)  # fmt: skip
"""Gauges that all workers have alike, or one of them alone: the highest is told."""


class Process:
    """What one counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counts("prfaas_gateway_requests", "Requests.", "target", "status")
        self.ttft = Histogram("prfaas_gateway_ttft_seconds", "TTFT.", "target", (0.1, 1.0))
        self.registry.register(self.requests)
        self.registry.register(self.ttft)
        self.refused = Counter("prfaas_gateway_refused", "R.", ("why",), registry=self.registry)
        self.busy = self._gauge("prfaas_gateway_in_flight_requests")
        self.age = self._gauge("prfaas_gateway_telemetry_age_seconds")
        self.fed = self._gauge("prfaas_gateway_telemetry_connected")
        self.unknown = self._gauge("prfaas_gateway_tokenizer_difference_ratio")
        self.unknown.set(math.nan)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, "G.", registry=self.registry)


def values(text: bytes) -> dict[str, float]:
    return {
        sample.name
        + "".join(
            f" {value}" for value in sorted(sample.labels.values(), reverse=True)
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_each_gauge_of_a_gateway_has_a_rule() -> None:
    gauges = {each.name for each in _metrics(_gateway()) if each.kind == "gauge"}
    rules = (ADDED, LEAST, ALIKE)
    assert gauges - frozenset().union(*rules) == set(), "add it to ADDED, LEAST or ALIKE"
    assert sum(map(len, rules)) == len(frozenset().union(*rules))
    assert frozenset().union(*rules) - gauges == set()


def test_counts_add_up_and_gauges_go_by_their_rule() -> None:
    one, other = Process(), Process()
    one.requests.inc("local", "200")
    for _ in range(2):
        other.requests.inc("local", "200")
    other.requests.inc("remote", "503")
    one.ttft.observe("local", 0.05)
    other.ttft.observe("local", 0.5, 3)
    other.ttft.observe("remote", 5.0)
    one.refused.labels("full").inc()
    for process, number in ((one, 3), (other, 4)):
        process.busy.set(number)
        process.age.set(number)
        process.fed.set(number - 3)
    other.unknown.set(0.5)
    found = values(rendered(merged([collected(one.registry), collected(other.registry)])))
    assert found["prfaas_gateway_requests_total local 200"] == 3
    assert found["prfaas_gateway_requests_total remote 503"] == 1
    assert found["prfaas_gateway_ttft_seconds_bucket local 0.1"] == 1
    assert found["prfaas_gateway_ttft_seconds_bucket local 1.0"] == 4
    assert found["prfaas_gateway_ttft_seconds_count local"] == 4
    assert found["prfaas_gateway_ttft_seconds_sum local"] == 1.55
    assert found["prfaas_gateway_ttft_seconds_bucket remote +Inf"] == 1
    assert found["prfaas_gateway_refused_total full"] == 1
    assert found["prfaas_gateway_in_flight_requests"] == 7
    assert found["prfaas_gateway_telemetry_age_seconds"] == 4
    assert found["prfaas_gateway_telemetry_connected"] == 0
    assert found["prfaas_gateway_tokenizer_difference_ratio"] == 0.5


def test_one_alone_comes_out_as_it_is() -> None:
    one = Process()
    one.requests.inc("local", "200")
    one.ttft.observe("local", 0.05)
    one.refused.labels('a "quoted"\nreason').inc()
    assert rendered(merged([collected(one.registry)])) == generate_latest(one.registry)


def test_who_takes_the_place_of_a_dead_process_goes_on_from_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.counts"
    assert read_counts(path) == []
    name = "prfaas_gateway_requests_total local 200"
    for total in (1, 2, 3):
        process = Process()
        process.busy.set(9)
        kept = Kept(process.registry, path)
        process.requests.inc("local", "200")
        process.ttft.observe("local", 0.05)
        for _ in range(3):
            kept.write()
            found = values(rendered(kept.families()))
            assert (found[name], found["prfaas_gateway_ttft_seconds_count local"]) == (total, total)
    while_it_is_gone = values(rendered(read_counts(path)))
    assert while_it_is_gone[name] == 3
    assert "prfaas_gateway_in_flight_requests" not in while_it_is_gone
    path.write_bytes(b"\xc1")
    assert read_counts(path) == []
