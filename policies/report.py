"""Pages on finished studies: what was found, beside other policies, on the part that tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from policies.front import Front
from policies.registry import make_policy
from policies.report_page import Plot, colour, plot, write_page
from policies.report_plots import RATE, Curve, at_limits, inside, key_of, over_rates
from policies.scenario import Scenario
from policies.simulator.objectives import standings
from policies.simulator.result import Result, Summary
from policies.simulator.run import simulate
from policies.study import Problem, Score, Tuned, cost_per_million
from prfaas.settings import PolicySettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES_OF_RATE = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Of the tuned policy's rate: where the curves have points."""
BESIDE = ("always_local", "paper", "least_ttft")
MOST_REQUESTS = 4000
DEAR = 2.5
"""Trials that cost so many times as much as the dearest of the best are off the top."""


def write_report(tuned: Tuned, path: Path) -> None:
    """Simulate the curves and write the page. Raises ConfigError."""
    as_given = Problem.read(tuned.spec)
    problem = as_given.shaped(tuned.shape)
    rates = [share * tuned.tested.rate_per_s for share in SHARES_OF_RATE]
    usual = problem.scenario.queue_order.name
    name = tuned.spec.policy
    arms: dict[str, tuple[str, Mapping[str, float], str]] = {
        f"{name}, tuned": (name, tuned.parameters, tuned.queue_order.name),
        f"{name}, defaults": (name, {}, usual),
        **{other: (other, {}, usual) for other in BESIDE if other != name},
    }
    curves, at_rate = [], None
    for label, (policy, parameters, order) in arms.items():
        results = [_run(problem, policy, parameters, order, rate) for rate in rates]
        if at_rate is None:
            at_rate = results[SHARES_OF_RATE.index(0.9)]
        curves.append(Curve(label, [result.summary() for result in results]))
    assert at_rate is not None
    scores = [
        ("tuned, training part", tuned.trained, problem.scenario),
        ("tuned", tuned.tested, problem.scenario),
        ("defaults", tuned.default_tested, as_given.scenario),
    ]
    objectives = problem.scenario.objectives
    columns = [standings(score.summary, objectives) for _, score, _ in scores]
    write_page(
        path,
        "study",
        tuned=tuned,
        goal=tuned.spec.goal,
        better=_better(tuned),
        scenario=problem.scenario,
        prices=problem.scenario.prices,
        results=[(what, score, _cost(site, score)) for what, score, site in scores],
        objectives=list(zip(*columns, strict=True)),
        lines=key_of(curves),
        over_rates=over_rates(curves, problem.scenario),
        inside=inside(curves[0], at_rate, tuned.history, tuned.spec.goal),
        binds=_binds(curves[0].summaries),
    )


def write_front(front: Front, path: Path) -> None:
    """Write the page of a Pareto front. Raises ConfigError."""
    scenario = Problem.read(front.spec).scenario
    points = front.points
    tested = [point.tested.summary for point in points if point.tested is not None]
    write_page(
        path,
        "front",
        front=front,
        scenario=scenario,
        main=[_front_plot(front)],
        parameters=list(points[0].parameters),
        shaped=front.spec.tune_shape,
        shown=lambda number: "-" if number is None else number,
        tested=at_limits(tested, scenario.objectives) if tested else [],
    )


def _front_plot(front: Front) -> Plot:
    best, again, rest, first = (colour(at) for at in range(4))

    def draw(axes: Axes) -> None:
        if front.others:
            axes.plot(*zip(*front.others, strict=True), ".", color=rest, alpha=0.5)
        x = [point.rate_per_s for point in front.points]
        axes.plot(x, [point.cost for point in front.points], "o-", color=best)
        for point in front.points:
            if point.tested is not None and point.tested.cost is not None:
                at = point.tested.rate_per_s, point.tested.cost
                axes.plot([point.rate_per_s, at[0]], [point.cost, at[1]], ":", color=again)
                axes.plot(*at, "s", color=again, fillstyle="none")
        if front.defaults is not None:
            axes.plot(*front.defaults, "D", color=first)
        shown = [point.cost for point in front.points]
        shown += [] if front.defaults is None else [front.defaults[1]]
        axes.set(ylim=(0, DEAR * max(shown)))

    key = [("the best, trained", best), ("the same, tested", again)]
    if front.others:
        key.append(("other trials that hold the objectives", rest))
    if front.defaults is not None:
        key.append(("the defaults, trained", first))
    return plot("Cost of a million requests", "at the highest rate", RATE, draw, key=key)


def _run(
    problem: Problem, policy: str, parameters: Mapping[str, float], order: str, rate: float
) -> Result:
    queue_order = problem.scenario.queue_order.model_copy(update={"name": order})
    scenario = problem.scenario.model_copy(update={"queue_order": queue_order})
    settings = PolicySettings.model_validate({"name": policy, **parameters})
    requests = problem.testing.at(rate)[:MOST_REQUESTS]
    return simulate(scenario, problem.profiles, requests, make_policy(settings))


def _cost(scenario: Scenario, score: Score) -> float | None:
    if scenario.prices is None:
        return None
    return cost_per_million(scenario, score.rate_per_s, score.summary)


def _binds(summaries: Sequence[Summary]) -> list[tuple[float, str, float]]:
    """At each rate the busiest stage and its share of time."""
    found = []
    for summary in summaries:
        stage = max(summary.utilisation, key=summary.utilisation.__getitem__)
        found.append((summary.rate_per_s, stage.replace("_", " "), summary.utilisation[stage]))
    return found


def _better(tuned: Tuned) -> str:
    ours, default = tuned.tested.value, tuned.default_tested.value
    ratio = ours / default if tuned.spec.goal == "rate" else default / ours
    if abs(ratio - 1) < 0.005:
        return "no better than the defaults on requests it had not seen"
    word = "better" if ratio > 1 else "worse"
    return f"{abs(ratio - 1):.1%} {word} than the defaults on requests it had not seen"
