"""The Pareto front of a study of rate and cost: what is best at each rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from policies.site_shape import Shape
from policies.study import LOST, Problem, Score, StudySpec, parts_of
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from optuna.study import Study


@dataclass(frozen=True, slots=True)
class Point:
    """One of the best: no other trial has both a higher rate and a lower cost."""

    parameters: Mapping[str, float]
    queue_order: str
    shape: Shape
    rate_per_s: float
    """That holds the objectives on the part that trained."""
    cost: float
    """For a million requests at that rate."""
    tested: Score | None
    """On the other part; None: the objectives hold at no rate there."""


@dataclass(frozen=True, slots=True)
class Front:
    """The best of a study with two goals, from the lowest rate to the highest."""

    spec: StudySpec
    trials: int
    points: Sequence[Point]
    others: Sequence[tuple[float, float]] = ()
    """Rate and cost of all other trials that hold the objectives, on the part that trained."""
    defaults: tuple[float, float] | None = None
    """The same of the policy's defaults on the scenario's site; None: they do not hold them."""


def front_of(problem: Problem, study: Study) -> Front:
    """Raises ConfigError where no trial holds the objectives."""
    done = sum(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False))
    found: dict[tuple[float, float], Point] = {}
    for trial in study.best_trials:
        value, cost = trial.values
        if value >= LOST or (value, cost) in found:
            continue
        parameters, order, shape = parts_of(problem, trial.params)
        found[value, cost] = Point(
            parameters, order, shape, -value, cost, _tested(problem, parameters, order, shape)
        )
    if not found:
        raise ConfigError(
            f"infeasible: none of {done} trials holds the objectives; "
            "`prfaas plan` names the stage that binds"
        )
    points = sorted(found.values(), key=lambda point: point.rate_per_s)
    held = {
        trial.number: (-trial.values[0], trial.values[1])
        for trial in study.get_trials(deepcopy=False)
        if trial.values is not None and trial.values[0] < LOST
    }
    best = {(point.rate_per_s, point.cost) for point in points}
    others = sorted(set(held.values()) - best)
    enqueued = "fixed_params" in study.get_trials(deepcopy=False)[0].system_attrs
    return Front(problem.spec, done, points, others, held.get(0) if enqueued else None)


def as_data(front: Front) -> dict[str, Any]:
    """For JSON."""
    return {
        "policy": front.spec.policy,
        "goal": front.spec.goal,
        "scenario": front.spec.scenario,
        "trials": front.trials,
        "front": [asdict(point) for point in front.points],
    }


def to_text(front: Front) -> str:
    """For a terminal."""
    lines = [
        f"{front.spec.policy}, {front.trials} trials; nothing tried has a higher rate at a lower "
        "cost than one of these",
        "  requests/s  for a million  tested: requests/s  for a million  order   D prefills  peer",
    ]
    for point in front.points:
        tested = point.tested
        rate, cost = (
            ("none", "") if tested is None else (f"{tested.rate_per_s:.3g}", f"{tested.cost:.4g}")
        )
        shape = [point.shape.prefill_instances, point.shape.peer_instances]
        here, there = ("-" if number is None else f"{number}" for number in shape)
        lines.append(
            f"  {point.rate_per_s:10.3g}  {point.cost:13.4g}  {rate:>18}  {cost:>13}  "
            f"{point.queue_order:<6}  {here:>10}  {there:>4}"
        )
    return "\n".join(lines) + "\n"


def _tested(
    problem: Problem, parameters: Mapping[str, float], order: str, shape: Shape
) -> Score | None:
    try:
        return problem.score(parameters, order, problem.testing, shape)
    except ConfigError as error:
        if not error.message.startswith("infeasible"):
            raise
        return None
