from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from local_engine.metrics import EngineMetrics
from local_engine.requests import EngineStats

STATS = EngineStats(
    waiting=3,
    running=2,
    queue_tokens=700,
    free_blocks=25,
    total_blocks=100,
    preemptions=4,
    prefix_query_tokens=1000,
    prefix_hit_tokens=250,
    prompt_tokens=900,
    generated_tokens=80,
    imported_tokens=64,
    prefill_token_s=0.002,
    draining=True,
    kv_outcomes={"staged": 5, "peer_unavailable": 1},
)


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """Value by name and the labels that are not the same everywhere."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            inner = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{inner}}}"] = sample.value
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_running{}", 2),
        ("vllm:num_requests_waiting{}", 3),
        ("vllm:kv_cache_usage_perc{}", 0.75),
        ("vllm:gpu_cache_usage_perc{}", 0.75),
        ("vllm:prefix_cache_queries_total{}", 1000),
        ("vllm:prefix_cache_hits_total{}", 250),
        ("vllm:external_prefix_cache_hits_total{}", 64),
        ("vllm:prompt_tokens_total{}", 900),
        ("vllm:generation_tokens_total{}", 80),
        ("vllm:num_preemptions_total{}", 4),
        ("prfaas_engine_queue_tokens{}", 700),
        ("prfaas_engine_prefill_token_seconds{}", 0.002),
        ("prfaas_engine_draining{}", 1),
        ("prfaas_engine_kv_outcomes_total{outcome=staged}", 5),
        ("prfaas_engine_kv_outcomes_total{outcome=peer_unavailable}", 1),
        ("prfaas_engine_info{paced=false,profile=,version=1.2}", 1),
    ],
)
def test_what_the_engine_counts_is_shown(name: str, value: float) -> None:
    metrics = EngineMetrics("m", lambda: STATS, version="1.2")
    assert samples(metrics)[name] == value


def test_times_and_outcomes_of_requests_are_counted() -> None:
    metrics = EngineMetrics("m", EngineStats, version="1")
    metrics.observe_first_token(0.3)
    metrics.observe_tokens(0.2, 4)
    metrics.observe_finished("stop", 1.5)
    metrics.observe_finished("abort", 0.5)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_sum{}"] == 0.3
    assert found["vllm:inter_token_latency_seconds_count{}"] == 4
    assert found["vllm:inter_token_latency_seconds_sum{}"] == pytest.approx(0.2)
    assert found["vllm:time_per_output_token_seconds_count{}"] == 4
    assert found["vllm:e2e_request_latency_seconds_sum{}"] == 2.0
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["vllm:request_success_total{finished_reason=abort}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}"] == 0


def test_a_paced_engine_is_labelled_and_says_how_late_it_runs() -> None:
    metrics = EngineMetrics("m", EngineStats, version="1", paced="h20", late_s=lambda: 0.25)
    found = samples(metrics)
    assert found["prfaas_engine_info{paced=true,profile=h20,version=1}"] == 1
    assert found["prfaas_engine_paced_late_seconds{}"] == 0.25


def test_two_servers_in_one_process_do_not_mix() -> None:
    one, two = (EngineMetrics("m", EngineStats, version="1") for _ in range(2))
    one.observe_finished("stop", 1.0)
    assert samples(two)["vllm:request_success_total{finished_reason=stop}"] == 0
