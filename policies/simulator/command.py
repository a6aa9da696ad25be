"""`prfaas simulate`: several policies on one workload, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from policies.mix import mix_of_requests
from policies.planner import Infeasible, best_plan
from policies.prefix_cache import CacheSpec
from policies.registry import make_policy
from policies.scenario import Profiles, QueueOrder, Scenario, load_scenario
from policies.simulator.result import Summary
from policies.simulator.run import simulate, with_rate
from policies.site_shape import with_prefill
from policies.throughput import Fleet
from policies.workload.source import Source, open_source
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command line asks for."""

    scenario: str
    policies: Sequence[str]
    settings: PolicySettings
    trace: Path | None = None
    trace_format: str | None = None
    rate_per_s: float | None = None
    start_s: float = 0.0
    prefill_nodes: int | None = None
    seed: int | None = None


def run_simulate(options: SimulateOptions, as_json: bool) -> tuple[str, list[str]]:
    """A row for each policy, and notes. Raises ConfigError."""
    scenario, profiles = load_scenario(options.scenario)
    notes: list[str] = []
    if options.settings.queue is not None:
        order = QueueOrder.model_validate(options.settings.queue.model_dump())
        scenario = scenario.model_copy(update={"queue_order": order})
        notes.append(f"queue order {order.name}, as the policy file has it")
    if options.prefill_nodes is not None:
        scenario = with_prefill(scenario, options.prefill_nodes)
    scenario, source = _workload(options, scenario)
    local = scenario.local
    if not local.colocated and local.prefill_instances is None:
        count = _planned_split(scenario, profiles, source)
        scenario = scenario.model_copy(
            update={"local": local.model_copy(update={"prefill_instances": count})}
        )
        notes.append(f"{count} of {local.instances} nodes prefill, as the planner has it")
    found: list[Summary] = []
    for name in options.policies:
        policy = make_policy(options.settings.model_copy(update={"name": name}))
        try:
            summary = simulate(scenario, profiles, source, policy).summary(options.start_s)
        except ValueError as error:
            raise ConfigError(f"--start: {error}") from error
        found.append(summary)
    if source.note():
        notes.append(source.note())
    if as_json:
        return json.dumps([asdict(summary) for summary in found], indent=2) + "\n", notes
    return table(found), notes


def table(rows: Sequence[Summary]) -> str:
    """For a terminal."""
    widest = max(len(row.policy) for row in rows)
    lines = [
        f"{rows[0].requests} requests, {rows[0].rate_per_s:.3g} a second",
        f"{'':<{widest}}  TTFT mean     P50     P90     P99  slowdown P90  P99  offloaded"
        "  reuse  egress GB  busy",
    ]
    for row in rows:
        busy = " ".join(f"{name} {share:.0%}" for name, share in row.utilisation.items())
        lines.append(
            f"{row.policy:<{widest}}  {row.ttft_mean_s:9.2f} {row.ttft_p50_s:7.2f} "
            f"{row.ttft_p90_s:7.2f} {row.ttft_p99_s:7.2f}  {row.slowdown_p90:12.2f} "
            f"{row.slowdown_p99:4.1f}  {row.offload_share:9.1%}  {row.hit_share:5.1%}  "
            f"{row.egress_gb:9.1f}  {busy}"
        )
        for what, counts in (("reasons", row.reasons), ("fallbacks", row.fallbacks)):
            if counts:
                told = ", ".join(f"{name} {count}" for name, count in counts.items())
                lines.append(f"{'':<{widest}}  {what}: {told}")
    return "\n".join(lines) + "\n"


def _workload(options: SimulateOptions, scenario: Scenario) -> tuple[Scenario, Source]:
    if options.trace is None:
        if options.rate_per_s is not None:
            scenario = with_rate(scenario, options.rate_per_s)
        if options.seed is not None:
            workload = scenario.workload.model_copy(update={"seed": options.seed})
            scenario = scenario.model_copy(update={"workload": workload})
        return scenario, open_source(None, None, scenario.workload)
    if options.seed is not None:
        raise ConfigError("--seed is for generated workloads: a trace has none")
    source = open_source(options.trace, options.trace_format, scenario.workload)
    if options.rate_per_s is None:
        return scenario, source
    first = last = 0.0
    count = 0
    for count, request in enumerate(source, 1):  # noqa: B007
        last = request.arrival_s
    speed = options.rate_per_s * (last - first) / max(1, count - 1)
    if speed <= 0:
        raise ConfigError("--rate: all requests of the trace come at once")
    return scenario, open_source(
        options.trace, options.trace_format, scenario.workload, speed=speed
    )


def _planned_split(scenario: Scenario, profiles: Profiles, source: Source) -> int:
    cache = CacheSpec.of(profiles.prefill.model, scenario.local.cache_tokens)
    mix = mix_of_requests(source, cache)
    fleet = Fleet.of(scenario, profiles)
    try:
        return best_plan(fleet, mix, scenario.objectives).load.split.prefill_instances
    except Infeasible as error:
        raise ConfigError(
            f"{error.message}; say how many nodes prefill: --prefill-nodes"
        ) from error
