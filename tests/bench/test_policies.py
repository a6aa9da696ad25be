"""The policies' benchmark: all scenarios, figures computed once, intervals that are Student's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.policies import _geomean, _interval, _late, worst_scenario
from bench.policy_arms import Arm, Deadline, Memo, OutOfTime
from bench.policy_cases import WORKLOADS, Case, cases, ready


def test_scenarios_are_workloads_by_links_by_kinds_of_kv() -> None:
    found = list(cases())
    assert len({case.name for case in found}) == len(found) == len(WORKLOADS) * 7 * 2
    assert {case.gbit_per_s for case in found} == {100.0, 10.0, 5.0, 2.5}
    for kind in (True, False):
        of_kind = [case for case in found if case.dense is kind]
        assert sum(case.drops for case in of_kind) == len(WORKLOADS)
        assert sum(case.rtt_ms == 80 for case in of_kind) == len(WORKLOADS)
        assert sum(case.peers == 2 for case in of_kind) == len(WORKLOADS)
    wanted = sorted(found, key=_late)
    for first in range(0, len(wanted), len(WORKLOADS)):
        alike = wanted[first : first + len(WORKLOADS)]
        assert {case.workload for case in alike} == set(WORKLOADS), (
            "none is left out before another"
        )
        assert len({replace(case, workload="") for case in alike}) == 1


def test_a_site_is_planned_and_its_parts_differ() -> None:
    site = ready(Case("paper", 10), 200)
    assert 1 <= (site.scenario.local.prefill_instances or 0) < 8
    assert 0.5 < site.start_rate_per_s < 5
    training, testing = site.training(2.0), site.testing(0, 2.0)
    assert len(training) == len(testing) == 200
    assert [r.prompt_tokens for r in training] != [r.prompt_tokens for r in testing]
    fast = site.testing(0, 4.0)
    assert [r.prompt_tokens for r in fast] == [r.prompt_tokens for r in testing]
    assert fast[-1].arrival_s == pytest.approx(testing[-1].arrival_s / 2)


def test_a_figure_is_computed_once_for_the_same_arm(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> float:
        calls.append(1)
        return float(len(calls))

    arm = Arm("paper")
    assert Memo(tmp_path).get(arm, ("x", 1), compute) == 1
    assert Memo(tmp_path).get(arm, ("x", 1), compute) == 1
    for other, what in (
        (replace(arm, order="srpt"), ("x", 1)),
        (replace(arm, parameters=(("surge_s", 0.0),)), ("x", 1)),
        (arm, ("x", 2)),
    ):
        before = len(calls)
        Memo(tmp_path).get(other, what, compute)
        assert len(calls) == before + 1


def test_when_time_is_over_only_what_was_found_is_there(tmp_path: Path) -> None:
    over = Memo(tmp_path, Deadline(0.0))
    with pytest.raises(OutOfTime):
        over.get(Arm("paper"), ("x", 1), lambda: 1.0)
    assert Memo(tmp_path).get(Arm("paper"), ("x", 1), lambda: 2.0) == 2.0
    assert over.get(Arm("paper"), ("x", 1), lambda: 3.0) == 2.0


def test_the_interval_is_over_seeds_and_not_over_scenarios() -> None:
    one, other = Case("paper", 100), Case("paper", 10)
    ratios = [
        (case, seed, scale * math.exp(0.01 * seed))
        for case, scale in ((one, 0.5), (other, 2.0))
        for seed in range(3)
    ]
    assert _geomean(ratios) == pytest.approx(math.exp(0.01))
    # Three seeds at 0, 1 and 2%: half an interval is 4.303 x 1% / sqrt(3).
    half = 4.303 * 0.01 / math.sqrt(3)
    assert f"{math.exp(0.01 - half):.3f} to {math.exp(0.01 + half):.3f}" in _interval(ratios)
    assert "6 paired runs from 0.500 to 2.040" in _interval(ratios)


def test_the_worst_scenario_is_of_the_mean_of_its_seeds() -> None:
    one, other = Case("paper", 100), Case("paper", 10)
    found = [(one, 0, 0.8), (one, 1, 1.25), (other, 0, 0.9), (other, 1, 0.9)]
    assert worst_scenario(found) == (other.name, pytest.approx(0.9), 2)
    assert worst_scenario(found, max) == (one.name, pytest.approx(1.0), 2)
