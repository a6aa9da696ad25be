"""vLLM's /metrics under the names of several versions, and the load that follows from them."""

from __future__ import annotations

import pytest

from prfaas.errors import EngineUnavailable
from remote_prefill.vllm_metrics import LoadMeter, parse_metrics

PRESENT = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1000.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 4.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 10.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.5
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 10.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 4.0
# TYPE vllm:request_prefill_kv_computed_tokens histogram
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 900.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",num_cpu_blocks="None",num_gpu_blocks="400"} 1.0
# TYPE python_info gauge
python_info{implementation="CPython"} 1.0
"""

OLD = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 0.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
# TYPE vllm:time_per_output_token_seconds histogram
vllm:time_per_output_token_seconds_sum{model_name="m"} 1.0
vllm:time_per_output_token_seconds_count{model_name="m"} 100.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="m"} 500.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{model_name="m"} 1.0
vllm:request_prefill_time_seconds_count{model_name="m"} 2.0
# TYPE vllm:gpu_prefix_cache_hits counter
vllm:gpu_prefix_cache_hits_total{model_name="m"} 100.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="200"} 1.0
"""


def changed(text: str, **lines: float) -> str:
    """The text with other values for some metrics."""
    out = []
    for line in text.splitlines():
        for name, value in lines.items():
            if line.startswith(f"vllm:{name}" + "{"):
                line = f"{line.rpartition(' ')[0]} {value}"
        out.append(line)
    return "\n".join(out)


def meter() -> LoadMeter:
    return LoadMeter(block_tokens=32, max_tokens=4096)


def test_present_names_give_the_load() -> None:
    stats = meter().stats(parse_metrics(PRESENT))
    assert (stats.running, stats.waiting) == (3, 2)
    assert (stats.total_blocks, stats.free_blocks) == (400, 300)
    assert stats.context_tokens == 100 * 32
    assert stats.queue_tokens == 2 * 250
    assert stats.decode_step_s == 0


@pytest.mark.parametrize(("fetches", "waiting_kv"), [(1, 1), (5, 2)])
def test_what_waits_for_kv_is_no_prompt_to_compute(fetches: int, waiting_kv: int) -> None:
    """A fetch may still be known here after vLLM has let its request go."""
    stats = meter().stats(parse_metrics(PRESENT), fetches=fetches)
    assert (stats.waiting, stats.waiting_kv) == (2, waiting_kv)
    assert stats.queue_tokens == (2 - waiting_kv) * 250


def test_old_names_give_the_load_too() -> None:
    load = meter()
    stats = load.stats(parse_metrics(OLD))
    assert (stats.running, stats.free_blocks, stats.total_blocks) == (1, 100, 200)
    later = changed(
        OLD,
        time_per_output_token_seconds_sum=1.4,
        time_per_output_token_seconds_count=120.0,
        prompt_tokens_total=1500.0,
        gpu_prefix_cache_hits_total=300.0,
        request_prefill_time_seconds_sum=1.8,
        request_prefill_time_seconds_count=4.0,
    )
    stats = load.stats(parse_metrics(later))
    assert stats.decode_step_s == pytest.approx(0.02)
    assert stats.prefill_token_s == pytest.approx(0.8 / 800)


def test_where_a_version_has_both_names_the_present_one_counts_once() -> None:
    both = PRESENT + "# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.9\n"
    assert parse_metrics(both).usage == 0.25


def test_engines_behind_one_server_are_added_up() -> None:
    second = [
        line.replace('engine="0"', 'engine="1"')
        for line in PRESENT.splitlines()
        if line.startswith(("vllm:num_requests_running{", "vllm:kv_cache_usage_perc{",
                            "vllm:cache_config_info{"))
    ]  # fmt: skip
    found = parse_metrics(PRESENT + "\n".join(second) + "\n")
    assert (found.get("running"), found.usage, found.total_blocks) == (6, 0.25, 800)


def test_the_prefill_curve_is_calibrated_and_then_followed() -> None:
    load = meter()
    load.calibrated(0.1, 0.001)
    stats = load.stats(parse_metrics(PRESENT))
    assert (stats.prefill_base_s, stats.prefill_token_s) == (0.1, 0.001)
    later = changed(
        PRESENT,
        request_prefill_time_seconds_sum=2.4,
        request_prefill_time_seconds_count=5.0,
        request_prefill_kv_computed_tokens_sum=1000.0,
    )
    stats = load.stats(parse_metrics(later))
    assert stats.prefill_token_s == pytest.approx(0.001 + 0.3 * (0.003 - 0.001))
    # Ten tokens say what a step costs, not a token.
    short = changed(
        later,
        request_prefill_time_seconds_sum=2.9,
        request_prefill_time_seconds_count=6.0,
        request_prefill_kv_computed_tokens_sum=1010.0,
    )
    assert load.stats(parse_metrics(short)).prefill_token_s == stats.prefill_token_s


def test_counters_that_begin_anew_do_not_turn_back_time() -> None:
    load = meter()
    load.stats(parse_metrics(PRESENT))
    restarted = changed(
        PRESENT,
        inter_token_latency_seconds_sum=0.1,
        inter_token_latency_seconds_count=1.0,
        request_prefill_time_seconds_count=0.0,
    )
    assert load.stats(parse_metrics(restarted)).decode_step_s == 0


@pytest.mark.parametrize(
    "text", ["", "<html>no</html>", "up 1\n", PRESENT.replace("kv_cache_usage_perc", "other")]
)
def test_what_is_not_vllm_s_is_refused(text: str) -> None:
    with pytest.raises(EngineUnavailable):
        parse_metrics(text)
