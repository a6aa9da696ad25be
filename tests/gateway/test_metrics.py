"""What is counted, and under which few labels."""

import math
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics, word
from gateway.records import RequestRecord
from prfaas.snapshot import Outcome
from prfaas.telemetry import LinkLimit, WatchUpdate
from prfaas.testing.gateway_setup import completion, link
from prfaas.testing.waiting import eventually


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"prfaas_gateway_{name}", labels) or 0.0


def record(**fields: Any) -> RequestRecord:
    made = RequestRecord("r", "chat", "t", "k", started_at=10.0, started_wall=0.0)
    for name, given in {"status": "200", "ended_at": 12.0, **fields}.items():
        setattr(made, name, given)
    return made


def test_a_finished_request_is_counted_by_target_and_status() -> None:
    metrics = GatewayMetrics()
    metrics.finished(record(first_event_at=10.5, transfer_id="t"))
    metrics.finished(record(status="404"))
    assert value(metrics, "requests_total", target="remote", status="200") == 1
    assert value(metrics, "requests_total", target="local", status="404") == 1
    assert value(metrics, "ttft_seconds_sum", target="remote") == 0.5
    assert value(metrics, "ttft_seconds_count", target="local") == 0
    assert value(metrics, "e2e_seconds_sum", target="local") == 2.0


def test_only_answers_that_broke_after_the_commit_count_as_broken() -> None:
    metrics = GatewayMetrics()
    metrics.finished(record(committed=True, error="engine_unavailable"))
    metrics.finished(record(committed=False, status="502", error="engine_unavailable"))
    metrics.finished(record(committed=True, status="499", error="cancelled"))
    metrics.finished(record(committed=True))
    assert value(metrics, "broken_streams_total", reason="engine_unavailable") == 1
    assert value(metrics, "broken_streams_total", reason="cancelled") == 0


@pytest.mark.parametrize(
    ("status", "fell_back"),
    [
        ("staged", False),
        ("aborted", False),
        ("partial", True),
        ("local", True),
        ("refused", True),
        ("failed", True),
    ],
)
def test_outcomes_and_fallbacks(status: str, fell_back: bool) -> None:
    metrics = GatewayMetrics()
    metrics.outcome(Outcome("t", status, reason="why_not", raw_bytes=10, wire_bytes=7))
    assert value(metrics, "outcomes_total", status=status) == 1
    assert value(metrics, "fallbacks_total", reason="why_not") == fell_back
    assert value(metrics, "kv_raw_bytes_total") == 10
    assert value(metrics, "kv_wire_bytes_total") == 7


def test_a_prompt_that_d_has_whole_is_an_outcome_and_no_fallback() -> None:
    metrics = GatewayMetrics()
    metrics.outcome(Outcome("t", "local", reason="prefix_at_d"))
    assert value(metrics, "outcomes_total", status="local") == 1
    assert value(metrics, "fallbacks_total", reason="prefix_at_d") == 0


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("peer_unavailable", "peer_unavailable"),
        ("x", "x"),
        ("", "other"),
        ("Some text", "other"),
        ("9lives", "other"),
        ("a" * 41, "other"),
        ('x"} 1', "other"),
    ],
)
def test_labels_from_outside_are_stable_words(reason: str, label: str) -> None:
    assert word(reason) == label


async def test_the_page_parses_and_shows_live_state(cluster: Any) -> None:
    cluster.d.change_link(limit=LinkLimit.LINK, queueing_s=0.02, rate_bytes_per_s=4e6)
    served = link(agent="scripted", limit=LinkLimit.RECEIVER, stalled_s=3.0)
    cluster.p.push(WatchUpdate(0, False, links=(served,)))
    where = {"engine": "d-0", "peer": "p", "instance": "p-0"}

    async def both_are_here() -> bool:
        d = await cluster.metric("prfaas_gateway_link_queueing_seconds", **where)
        p = await cluster.metric("prfaas_gateway_link_stalled_seconds", **where, end="p")
        return (d, p) == (0.02, 3.0)

    await eventually(both_are_here)
    await cluster.post(completion())
    _, text = await cluster.get("/metrics")
    families = {f.name: f for f in text_string_to_metric_families(text)}
    samples = {
        (s.name, *sorted(s.labels.values())): s.value
        for family in families.values()
        for s in family.samples
    }
    prefix = "prfaas_gateway_"
    assert samples[prefix + "link_goodput_bytes_per_second", "d-0", "p", "p-0"] == 50e6
    assert samples[prefix + "link_rtt_seconds", "d-0", "p", "p-0"] == 0.01
    assert samples[prefix + "link_ready", "d-0", "p", "p-0"] == 1
    assert samples[prefix + "link_queueing_seconds", "d-0", "p", "p-0"] == 0.02
    assert samples[prefix + "link_rate_bytes_per_second", "d-0", "p", "p-0"] == 4e6
    assert samples[prefix + "link_stalled_seconds", "d", "d-0", "p", "p-0"] == 0.0
    limits = {key[1:]: value for key, value in samples.items() if "link_limit" in key[0]}
    assert {tuple(sorted(key)) for key, value in limits.items() if value} == {
        tuple(sorted(("d", "d-0", "p", "p-0", "link"))),
        tuple(sorted(("d-0", "p", "p", "p-0", "receiver"))),
    }
    assert len(limits) == 8
    assert samples[prefix + "cache_events", "d-0"] == 1
    assert samples[prefix + "engine_up", "d-0"] == 1
    assert samples[prefix + "telemetry_connected", "d-0"] == 1
    assert samples[prefix + "telemetry_age_seconds", "p/p-0"] < 1
    assert samples[(prefix + "in_flight_requests",)] == 0
    assert samples[(prefix + "in_flight_requests_peak",)] == 1
    assert samples[(prefix + "fallback_granted_tokens",)] == 0
    difference = samples[(prefix + "tokenizer_difference_ratio",)]
    assert difference == 0 or math.isnan(difference)
    assert all(name.startswith(prefix) for name in families)
