"""Links show in the metrics of both agents, under each side's name for the other."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.telemetry import LinkInfo, LinkLimit
from remote_prefill.link_metrics import LinkCollector
from remote_prefill.metrics import AgentMetrics, PrefillMetrics

LINK = LinkInfo(
    "fra",
    "p0",
    agent="d0",
    limit=LinkLimit.RECEIVER,
    goodput_bytes_per_s=5e6,
    rate_bytes_per_s=4e6,
    rtt_s=0.04,
    queueing_s=0.01,
    in_flight_bytes=900,
    under_way_bytes=800,
    held_bytes=700,
    free_staging_bytes=600,
    stalled_s=1.5,
    stalls=3,
    retransmitted_bytes=42,
    age_s=0.25,
)


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    text = generate_latest(registry).decode()
    return {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if "_link_" in s.name
    }


def test_p_names_the_d_agent_and_says_everything() -> None:
    metrics = PrefillMetrics()
    metrics.watch_links(lambda: (LINK,))
    found = samples(metrics.registry)
    prefix = "prfaas_prefill_link_"
    assert found == {
        (prefix + "goodput_bytes_per_second", "agent=d0"): 5e6,
        (prefix + "rate_bytes_per_second", "agent=d0"): 4e6,
        (prefix + "rtt_seconds", "agent=d0"): 0.04,
        (prefix + "queueing_seconds", "agent=d0"): 0.01,
        (prefix + "stalled_seconds", "agent=d0"): 1.5,
        (prefix + "to_come_bytes", "agent=d0"): 900,
        (prefix + "under_way_bytes", "agent=d0"): 800,
        (prefix + "held_bytes", "agent=d0"): 700,
        (prefix + "free_staging_bytes", "agent=d0"): 600,
        (prefix + "age_seconds", "agent=d0"): 0.25,
        (prefix + "stalls_total", "agent=d0"): 3,
        (prefix + "retransmitted_bytes_total", "agent=d0"): 42,
        (prefix + "limit", "agent=d0", "limit=idle"): 0,
        (prefix + "limit", "agent=d0", "limit=sender"): 0,
        (prefix + "limit", "agent=d0", "limit=receiver"): 1,
        (prefix + "limit", "agent=d0", "limit=link"): 0,
    }


def test_d_names_the_instance_and_says_nothing_that_it_cannot_know() -> None:
    metrics = AgentMetrics()
    metrics.watch_links(lambda: (LINK,))
    found = samples(metrics.registry)
    assert all(
        key[1:3] == ("instance=p0", "limit=receiver")
        for key, v in found.items()
        if (key[0].endswith("limit") and v)
    )
    assert found["prfaas_agent_link_rate_bytes_per_second", "instance=p0", "peer=fra"] == 4e6
    assert not any("retransmitted" in key[0] or "under_way" in key[0] for key in found)


def test_what_the_kernel_does_not_say_is_absent() -> None:
    registry = CollectorRegistry()
    unknown = LinkInfo("fra", "p0", agent="d0")
    registry.register(LinkCollector("prfaas_prefill", lambda: (unknown,), at_p=True))
    assert not any("retransmitted" in key[0] for key in samples(registry))
