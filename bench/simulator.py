"""Simulated requests per CPU second, on the conversation trace where it is there."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.harness import Report, Samples
from policies.registry import make_policy
from policies.scenario import Profiles, Scenario, load_scenario
from policies.simulator.run import simulate, with_rate
from policies.workload.request import Request
from policies.workload.source import open_source, traces_folder
from prfaas.settings import PolicySettings

TRACE = "mooncake_conversation_trace.jsonl.gz"
ARMS = (("live_policy", "least_ttft"), ("threshold", "length_threshold"))


def run(quick: bool) -> None:
    """Best CPU time of several runs; other work on the machine can only make it longer."""
    report = Report("simulator", quick=quick)
    scenario, profiles = load_scenario("paper")
    local = scenario.local.model_copy(update={"prefill_instances": 3})
    scenario = scenario.model_copy(update={"local": local})
    path = traces_folder() / TRACE
    if path.is_file():
        requests = list(open_source(path, None, scenario.workload))
        what = f"conversation trace, {len(requests)} requests"
    else:
        requests = list(with_rate(scenario, 2.5).workload.stream())
        what = f"{path} is not there: generated, {len(requests)} requests"
    for row, policy in ARMS:
        samples = Samples(
            tuple(_rate(scenario, profiles, requests, policy) for _ in range(2 if quick else 7))
        )
        note = f"policy {policy}; {what}; one core, best of {samples.spread}"
        report.add(f"requests_per_s.{row}", max(samples.values), "requests/s", note)
    report.finish()


def _rate(scenario: Scenario, profiles: Profiles, requests: Sequence[Request], name: str) -> float:
    policy = make_policy(PolicySettings(name=name, threshold_tokens=8192))
    started = time.process_time()
    simulate(scenario, profiles, requests, policy)
    return len(requests) / (time.process_time() - started)
