"""How close the planner comes to the paper's Table 6, and how fast it plans."""

from __future__ import annotations

import time

from bench.harness import Report
from policies.mix import mix_of_lengths
from policies.planner import best_plan
from policies.scenario import load_scenario
from policies.table6 import OUTPUT_TOKENS, PUBLISHED, reproduce, worst_error
from policies.throughput import Fleet
from policies.workload.generate import Lengths


def run(quick: bool) -> None:
    """Every published figure beside ours; both modes do the same work."""
    report = Report("planner", quick=quick)
    found = reproduce()
    for column, figures in PUBLISHED.items():
        for name, published in figures.items():
            ours = found[column][name]
            error = f"{ours / published - 1:+.1%}" if published else "exact"
            report.say(
                f"{column:<12} {name:<17} published {published:<8g} ours {ours:<9.4g} {error}"
            )
    report.add(
        "table6.worst_error",
        worst_error(found),
        "ratio",
        "threshold, rates, mean and P90 TTFT of three columns; a wrong number of nodes counts 1",
    )
    scenario, profiles = load_scenario("paper")
    fleet, mix = Fleet.of(scenario, profiles), mix_of_lengths(Lengths(), OUTPUT_TOKENS)
    started = time.process_time()
    plan = best_plan(fleet, mix, scenario.objectives)
    took_s = time.process_time() - started
    report.add(
        "queued.rate",
        plan.load.rate,
        "requests/s",
        "highest rate with TTFT P90 <= 10 s and P99 <= 20 s, against 3.24 without queues",
    )
    report.add("queued.cpu", took_s, "s", "CPU seconds of one plan with queues")
    report.finish()
