"""From the text of vLLM's /metrics to the load of its engine, under old and new names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from prfaas.errors import EngineUnavailable
from prfaas_connect.port.messages import Stats

NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "step_seconds": (
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum",
    ),
    "steps": (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_count",
    ),
    "prefill_seconds": ("vllm:request_prefill_time_seconds_sum",),
    "prefills": ("vllm:request_prefill_time_seconds_count",),
    "computed_tokens": ("vllm:request_prefill_kv_computed_tokens_sum",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "prompts": ("vllm:request_prompt_tokens_count",),
    "prompt_tokens_of_requests": ("vllm:request_prompt_tokens_sum",),
    "cached_tokens": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "finished": ("vllm:request_success_total",),
    "preemptions": ("vllm:num_preemptions_total",),
}
"""What we read, by our name: vLLM's names, the present one first."""
CACHE_INFO = "vllm:cache_config_info"
REQUIRED = ("running", "waiting", "usage")
READ = (CACHE_INFO, *(name for names in NAMES.values() for name in names))
"""All that we read, by vLLM's names."""
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """One reading: sums over all engines of the server, blocks of each."""

    values: Mapping[str, float] = field(default_factory=dict)
    total_blocks: int = 0
    engines: int = 1

    def get(self, name: str) -> float:
        """0 where this version has no such metric."""
        return self.values.get(name, 0.0)

    @property
    def usage(self) -> float:
        """Used part of the KV cache, from 0 to 1."""
        return self.get("usage") / self.engines


def parse_metrics(text: str) -> VllmMetrics:
    """Raises EngineUnavailable where it is not the text of a vLLM we know."""
    ours = {name: ours for ours, names in NAMES.items() for name in names}
    ranks = {name: rank for names in NAMES.values() for rank, name in enumerate(names)}
    sums: dict[str, dict[int, float]] = {}
    engines: dict[int, set[str]] = {}
    blocks = 0
    # vLLM has thousands of lines, buckets for the most part, and is read several times a second.
    lines = [line for line in text.splitlines() if line.startswith(READ)]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name == CACHE_INFO:
                    blocks += _blocks(sample.labels)
                elif sample.name in ours:
                    by_rank = sums.setdefault(ours[sample.name], {})
                    rank = ranks[sample.name]
                    by_rank[rank] = by_rank.get(rank, 0.0) + sample.value
                    if ours[sample.name] == "usage":
                        engines.setdefault(rank, set()).add(sample.labels.get("engine", ""))
    except ValueError as exc:
        raise EngineUnavailable(f"/metrics of vLLM cannot be read: {exc}") from exc
    # Versions in between have both names; the present one counts, never their sum.
    values = {name: by_rank[min(by_rank)] for name, by_rank in sums.items()}
    missing = [NAMES[name][0] for name in REQUIRED if name not in values]
    if missing:
        raise EngineUnavailable(f"/metrics of vLLM lacks {', '.join(missing)}")
    return VllmMetrics(values, blocks, len(engines[min(engines)]))


def _blocks(labels: Mapping[str, str]) -> int:
    for name in ("num_gpu_blocks", "num_cpu_blocks"):
        text = labels.get(name, "")
        if text.isdigit() and int(text):
            return int(text)
    return 0


class LoadMeter:
    """From readings, each against the one before, to what KvPort calls Stats.

    vLLM tells counts of requests, not their tokens: waiting ones are taken for as long as prompts
    were on average. `prefill_token_s` is measured at start (`calibrated`) and then follows what its
    requests took.
    """

    def __init__(self, *, block_tokens: int, max_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self._last: VllmMetrics | None = None
        self._step_s = 0.0
        self._base_s = 0.0
        self._token_s = 0.0

    def calibrated(self, base_s: float, token_s: float) -> None:
        """The prefill curve as measured on an idle engine."""
        self._base_s, self._token_s = max(0.0, base_s), max(0.0, token_s)

    def stats(self, now: VllmMetrics, *, total_blocks: int = 0, fetches: int = 0) -> Stats:
        """The load at this reading, while the agent brings KV for `fetches` of what waits."""
        last, self._last = self._last, now
        if last is not None and not _restarted(last, now):
            self._follow(last, now)
        running, waiting = int(now.get("running")), int(now.get("waiting"))
        blocks = now.total_blocks or total_blocks
        used = round(now.usage * blocks)
        waiting_kv = min(waiting, fetches)
        queue_tokens = (waiting - waiting_kv) * self._mean_prompt(now)
        return Stats(
            queue_tokens=int(queue_tokens),
            waiting=waiting,
            running=running,
            context_tokens=min(used * self._block_tokens, running * self._max_tokens),
            free_blocks=max(0, blocks - used),
            total_blocks=blocks,
            decode_step_s=self._step_s,
            prefill_base_s=self._base_s,
            prefill_token_s=self._token_s,
            prefill_token_context_s=0.0,
            waiting_kv=waiting_kv,
        )

    def _follow(self, last: VllmMetrics, now: VllmMetrics) -> None:
        steps = now.get("steps") - last.get("steps")
        if steps > 0:
            seconds = now.get("step_seconds") - last.get("step_seconds")
            self._step_s = _smooth(self._step_s, seconds / steps)
        prefills = now.get("prefills") - last.get("prefills")
        tokens = now.get("computed_tokens") - last.get("computed_tokens")
        if not tokens:
            tokens = (now.get("prompt_tokens") - last.get("prompt_tokens")) - (
                now.get("cached_tokens") - last.get("cached_tokens")
            )
        seconds = now.get("prefill_seconds") - last.get("prefill_seconds")
        # A prefill of a few tokens says how long a step is, not what a token costs.
        if prefills > 0 and tokens / prefills >= 64:
            each = max(0.0, seconds / prefills - self._base_s) / (tokens / prefills)
            self._token_s = _smooth(self._token_s, each)

    def _mean_prompt(self, now: VllmMetrics) -> float:
        prompts = now.get("prompts")
        if not prompts:
            return 0.0
        return now.get("prompt_tokens_of_requests") / prompts


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)


def _restarted(last: VllmMetrics, now: VllmMetrics) -> bool:
    counters: Iterable[str] = ("steps", "prefills", "prompt_tokens", "finished")
    return any(now.get(name) < last.get(name) for name in counters)
