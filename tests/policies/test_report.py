"""A report draws every figure over rates, and each objective that there is across its figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.report_page import number
from policies.report_plots import Curve, at_limits, over_rates
from policies.scenario import Scenario
from policies.simulator.objectives import failing
from policies.simulator.result import Summary

SUMMARY = Summary(
    policy="p",
    requests=100,
    rate_per_s=1.0,
    ttft_mean_s=2.0,
    ttft_p50_s=1.5,
    ttft_p90_s=4.0,
    ttft_p99_s=8.0,
    slowdown_mean=2.0,
    slowdown_p90=3.0,
    slowdown_p99=6.0,
    longest_decile_p99_s=9.0,
    offload_share=0.5,
    reasons={},
    fallbacks={},
    moved_share=0.0,
    utilisation={"local_prefill": 0.5, "peer.link": 0.2},
    egress_gb=10.0,
    hit_share=0.0,
    parts_s={},
    itl_mean_s=0.02,
    itl_p90_s=0.025,
)
ALL = {
    "ttft_p90_s": 10.0,
    "ttft_p99_s": 20.0,
    "itl_s": 0.03,
    "slowdown_p90": 8.0,
    "slowdown_p99": 16.0,
}
TOLD = {
    "TTFT P90": "objective: 10 s",
    "TTFT P99": "objective: 20 s",
    "ITL P90": "objective: 30 ms",
    "Slowdown P90": "objective: 8 times alone",
    "Slowdown P99": "objective: 16 times alone",
}
PRICES = {"local_instance_per_hour": 1.0, "remote_instance_per_hour": 1.0}


def scenario(**changes: Any) -> Scenario:
    local = {"prefill": "paper-h20", "instances": 2}
    return Scenario.model_validate({"scenario_version": 1, "local": local, **changes})


def curves() -> list[Curve]:
    over = replace(SUMMARY, rate_per_s=2.0, ttft_p90_s=12.0)
    return [Curve("ours", [SUMMARY, over]), Curve("theirs", [SUMMARY, over])]


def test_each_objective_has_a_line_in_its_plot_and_no_other_plot_has_one() -> None:
    plots = over_rates(curves(), scenario(objectives=ALL, prices=PRICES))
    assert {plot.title: plot.objective for plot in plots if plot.objective} == TOLD
    for plot in plots:
        assert ("stroke-dasharray" in plot.svg) == bool(plot.objective), plot.title
    assert plots[-1].title == "Cost"


def test_a_front_shows_what_each_objective_leaves_in_the_pages_colours() -> None:
    objectives = scenario(objectives={"slowdown_p90": 8.0, "itl_s": 0.03}).objectives
    slowdown, itl = at_limits([SUMMARY], objectives)
    assert slowdown.objective == TOLD["Slowdown P90"]
    assert itl.objective == TOLD["ITL P90"]
    assert "var(--ink)" in itl.svg
    assert "#123457" not in itl.svg
    assert at_limits([SUMMARY], objectives)[0].svg == slowdown.svg


def test_what_misses_an_objective_is_said_by_how_much() -> None:
    objectives = scenario(objectives={**ALL, "itl_s": 0.02, "slowdown_p90": 3.0}).objectives
    (missed,) = failing(SUMMARY, objectives)
    assert missed.figure.name == "ITL P90"
    assert missed.excess == pytest.approx(0.25)


def test_numbers_have_no_exponent() -> None:
    assert [number(v) for v in (0.16461, 23806.4, 7)] == ["0.1646", "23,806", "7"]
