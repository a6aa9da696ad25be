"""The highest rate at which a policy holds objectives in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from policies.scenario import Objectives, Profiles, Scenario
from policies.simulator.objectives import failing
from policies.simulator.result import Summary
from policies.simulator.run import simulate
from policies.workload.request import Request
from prfaas.errors import ConfigError
from prfaas.interfaces import RoutingPolicy

Workload = Callable[[float], Iterable[Request]]
"""Requests at a rate: generated so, or a trace so much faster."""


@dataclass(frozen=True, slots=True)
class SimulatedCapacity:
    """A rate that holds, what it is like, and the next rate tried, which does not."""

    rate_per_s: float
    summary: Summary
    failing_rate_per_s: float


def capacity(
    scenario: Scenario,
    profiles: Profiles,
    workload: Workload,
    make: Callable[[], RoutingPolicy[Any]],
    objectives: Objectives,
    *,
    start_rate_per_s: float,
    precision: float = 0.02,
    warm_up_s: float = 0.0,
    growth: float = 2.0,
) -> SimulatedCapacity:
    """Go up or down from `start_rate_per_s` to bracket the rate, then bisect to `precision`.

    `warm_up_s`: of the workload's own time at rate `start_rate_per_s`; it shrinks as rates grow.
    `growth`: of the first step up or down, for a start that is known to be near; each further one
    is its square, up to doubling.
    Raises ConfigError where not even a thousandth of the start rate holds: infeasible.
    """

    def tried(rate: float) -> Summary:
        result = simulate(scenario, profiles, workload(rate), make())
        return result.summary(warm_up_s * start_rate_per_s / rate)

    low, best = 0.0, None
    high, step = start_rate_per_s, growth
    while not failing(summary := tried(high), objectives):
        low, best, high, step = high, summary, high * step, min(step * step, 2.0)
    missing = failing(summary, objectives)
    while best is None:
        if high < start_rate_per_s / 1000:
            missed = ", ".join(f"{m.figure.name} {m.figure.told(m.reached)}" for m in missing)
            raise ConfigError(f"infeasible: at {high:.3g} requests/s still {missed}")
        summary = tried(high / step)
        missing = failing(summary, objectives)
        if not missing:
            low, best = high / step, summary
        else:
            high, step = high / step, min(step * step, 2.0)
    while high - low > precision * low:
        middle = (low + high) / 2
        summary = tried(middle)
        if not failing(summary, objectives):
            low, best = middle, summary
        else:
            high = middle
    return SimulatedCapacity(low, best, high)
