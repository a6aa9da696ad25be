"""`prfaas plan`: from a scenario and a workload to a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from policies.mix import RequestMix, mix_of_lengths, mix_of_requests
from policies.plan_report import make_report, to_text
from policies.prefix_cache import CacheSpec
from policies.scenario import Objectives, Profiles, Scenario, load_scenario
from policies.throughput import Fleet
from policies.workload.source import open_source
from prfaas.errors import ConfigError
from prfaas.profile import parse_as


def run_plan(
    spec: str,
    trace: Path | None,
    trace_format: str | None,
    gbit_per_s: float | None,
    objectives: Mapping[str, float],
    as_json: bool,
    at_rate: float | None = None,
) -> tuple[str, bool]:
    """The report as text or JSON, and whether there is a plan. Raises ConfigError."""
    scenario, profiles = load_scenario(spec)
    scenario = with_objectives(scenario, objectives)
    if gbit_per_s is not None:
        scenario = with_gbit(scenario, gbit_per_s)
    fleet = Fleet.of(scenario, profiles)
    mix, note = _mix(scenario, profiles, trace, trace_format)
    if len(scenario.peers) > 1:
        several = f"{len(scenario.peers)} peers are taken as one with all their instances and links"
        note = "\n".join(filter(None, (several, note)))
    report = make_report(scenario, fleet, mix, at_rate=at_rate)
    if as_json:
        return json.dumps(report.to_json(), indent=2) + "\n", report.plan is not None
    return to_text(report) + (f"\n{note}\n" if note else ""), report.plan is not None


def with_objectives(scenario: Scenario, given: Mapping[str, float]) -> Scenario:
    """The scenario with some objectives replaced. Raises ConfigError where they contradict."""
    if not given:
        return scenario
    kept = scenario.objectives.model_dump()
    if "ttft_p90_s" in given and "ttft_p99_s" not in given and kept["ttft_p99_s"] is not None:
        # One objective on the command line replaces what the file says of TTFT as a whole.
        kept["ttft_p99_s"] = None
    objectives = parse_as(Objectives, {**kept, **given}, "objectives", "objectives")
    return scenario.model_copy(update={"objectives": objectives})


def with_gbit(scenario: Scenario, gbit_per_s: float) -> Scenario:
    """The scenario with all links at another rate. Raises ConfigError where it has none."""
    if not scenario.peers:
        raise ConfigError(f"scenario {scenario.name} has no peer, so no link to set the rate of")
    peers = tuple(
        peer.model_copy(
            update={"link": peer.link.model_copy(update={"gbit_per_s": float(gbit_per_s)})}
        )
        for peer in scenario.peers
    )
    return scenario.model_copy(update={"peers": peers})


def _mix(
    scenario: Scenario, profiles: Profiles, trace: Path | None, trace_format: str | None
) -> tuple[RequestMix, str]:
    generator = scenario.workload
    if trace is None and generator.kind == "lengths":
        return mix_of_lengths(generator.prompt, generator.output or generator.output_tokens), ""
    source = open_source(trace, trace_format, generator)
    cache = CacheSpec.of(profiles.prefill.model, scenario.local.cache_tokens)
    return mix_of_requests(source, cache), source.note()
