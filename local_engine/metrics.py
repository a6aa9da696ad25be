"""Prometheus metrics of the engine: vLLM's names where vLLM has them, ours for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from local_engine.requests import EngineStats

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
E2E_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
CONTENT_TYPE = CONTENT_TYPE_LATEST
FINISH_REASONS = ("stop", "length", "abort", "error")
_LABELS = ("engine", "model_name")


class EngineMetrics:
    """Owns the registry of one engine's server; nothing to close.

    What the engine counts is read from its stats at each scrape; what only the server sees (times
    as a client has them, finish reasons with stop strings) is observed here.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        *,
        version: str,
        paced: str = "",
        late_s: Callable[[], float] | None = None,
    ) -> None:
        """`paced`: the profile's name; `late_s`: how far pacing fell behind, in all."""
        self._registry = CollectorRegistry()
        values = ("0", model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry)
            return family.labels(*values)

        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Request received to first token.", TTFT_BUCKETS_S
        )
        self._itl = histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens.", ITL_BUCKETS_S
        )
        self._tpot = histogram(
            "vllm:time_per_output_token_seconds",
            "`vllm:inter_token_latency_seconds` under its older name.",
            ITL_BUCKETS_S,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Request received to last token.", E2E_BUCKETS_S
        )
        success = Counter(
            "vllm:request_success",
            "Finished requests by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._success = {reason: success.labels(*values, reason) for reason in FINISH_REASONS}
        info = Gauge(
            "prfaas_engine_info",
            "Always 1; the labels say what runs. `paced`: step times come from `profile`.",
            ("model_name", "version", "paced", "profile"),
            registry=self._registry,
        )
        info.labels(model_name, version, "true" if paced else "false", paced).set(1)
        if late_s is not None:
            late = Gauge(
                "prfaas_engine_paced_late_seconds",
                "How far paced steps overran the profile's times, in all.",
                registry=self._registry,
            )
            late.set_function(late_s)
        self._registry.register(_StatsCollector(stats, values))

    def observe_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` that came together, `seconds` after the one before them."""
        for _ in range(tokens):
            self._itl.observe(seconds / tokens)
            self._tpot.observe(seconds / tokens)

    def observe_finished(self, reason: str, seconds: float) -> None:
        """`reason` is one of FINISH_REASONS."""
        self._success[reason].inc()
        self._e2e.observe(seconds)

    def render(self) -> bytes:
        """The page at /metrics, of type CONTENT_TYPE."""
        return generate_latest(self._registry)


_STATS_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_query_tokens", "Prompt tokens looked up in the cache."),
    ("vllm:prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in the cache."),
    ("vllm:external_prefix_cache_hits", "imported_tokens", "Prompt tokens imported from a peer."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of all requests."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
    ("vllm:num_preemptions", "preemptions", "Sequences preempted for their blocks."),
    ("prfaas_engine_computed_tokens", "computed_tokens", "Prompt tokens computed here."),
    ("prfaas_engine_exported_tokens", "exported_tokens", "Tokens whose KV was sent to a peer."),
    ("prfaas_engine_integrity_failures", "integrity_failures", "Self-checks that failed."),
)
_STATS_GAUGES = (
    ("vllm:num_requests_running", "running", "Sequences being decoded."),
    ("vllm:num_requests_waiting", "waiting", "Requests not yet decoding."),
    ("prfaas_engine_waiting_kv_requests", "waiting_kv", "Requests that wait for remote KV."),
    ("prfaas_engine_exporting_requests", "exporting", "Prefills for the agent under way."),
    ("prfaas_engine_queue_tokens", "queue_tokens", "Prompt tokens admitted, not yet computed."),
    ("prfaas_engine_context_tokens", "context_tokens", "KV tokens a decode step reads."),
    ("prfaas_engine_free_blocks", "free_blocks", "KV blocks nobody uses, cached ones included."),
    ("prfaas_engine_cached_blocks", "cached_blocks", "Unused KV blocks kept for reuse."),
    ("prfaas_engine_total_blocks", "total_blocks", "KV blocks in the pool."),
    (
        "prfaas_engine_free_states",
        "free_states",
        "State slots no sequence uses, those of cached prefixes included; 0 for models without.",
    ),
    ("prfaas_engine_kept_states", "kept_states", "State slots that keep a cached prefix."),
    ("prfaas_engine_total_states", "total_states", "State slots in the pool."),
    ("prfaas_engine_decode_step_seconds", "decode_step_s", "Moving mean of a decode step."),
    ("prfaas_engine_prefill_base_seconds", "prefill_base_s", "Measured: each prefill chunk."),
    ("prfaas_engine_prefill_token_seconds", "prefill_token_s", "Measured: each prefilled token."),
    (
        "prfaas_engine_prefill_token_context_seconds",
        "prefill_token_context_s",
        "Measured: each prefilled token, for each token of its context.",
    ),
    ("prfaas_engine_draining", "draining", "1 while new requests are refused."),
    ("prfaas_engine_port_connected", "port_connected", "1 while the agent is connected."),
)
"""Metric, field of EngineStats, help."""


class _StatsCollector:
    """Turns a snapshot of the engine's own numbers into metrics at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], values: tuple[str, str]) -> None:
        self._stats = stats
        self._values = values

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask an engine that has not started."""
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, field, text in _STATS_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._values, getattr(stats, field))
            yield counter
        for name, field, text in _STATS_GAUGES:
            yield self._gauge(name, text, getattr(stats, field))
        used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        yield self._gauge(
            "vllm:gpu_cache_usage_perc", "`vllm:kv_cache_usage_perc` under its older name.", used
        )
        outcomes = CounterMetricFamily(
            "prfaas_engine_kv_outcomes",
            "Requests with kv_transfer_params: `staged`, or why not.",
            labels=(*_LABELS, "outcome"),
        )
        for outcome, count in sorted(stats.kv_outcomes.items()):
            outcomes.add_metric((*self._values, outcome), count)
        yield outcomes

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family
