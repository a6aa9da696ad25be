"""How many of a peer's instances a rate needs, and when their number should change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from policies.mix import RequestMix
from policies.planner import Infeasible, Plan, best_plan
from policies.scenario import Objectives
from policies.throughput import Fleet
from prfaas.errors import ConfigError

SLACK = 0.25
"""Instances leave only if those that stay hold so much more than the rate, and come only if those
that run do not hold it: a rate that varies by less never takes back what it just asked for."""
MOST = 1024
"""Instances tried."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a peer's instances at one rate; rates in requests a second."""

    rate: float
    running: int
    held: float
    """What the running instances hold; 0: the objectives at no rate."""
    wanted: int | None
    """None: no number holds the rate."""
    held_then: float
    """What `wanted` instances hold; where there is none, the most that any number does."""
    why: str


def advise(
    fleet: Fleet,
    mix: RequestMix,
    objectives: Objectives,
    rate: float,
    prefill_instances: int | None = None,
) -> Advice:
    """Compare the peer's instances with what a rate needs.

    `prefill_instances`: of D's nodes, if fixed. Raises ConfigError where there is no peer.
    """
    if fleet.remote is None:
        raise ConfigError("the scenario has no peer whose instances could change")

    @lru_cache
    def planned(count: int) -> Plan | Infeasible:
        changed = replace(fleet, remote_instances=count)
        if not count:
            changed = replace(changed, remote=None)
        try:
            return best_plan(changed, mix, objectives, prefill_instances)
        except Infeasible as error:
            return error

    def holds(count: int) -> float:
        found = planned(count)
        return found.load.rate if isinstance(found, Plan) else 0.0

    running, held = fleet.remote_instances, holds(fleet.remote_instances)
    if held < rate:
        more = _first(running, rate, holds)
        if more is None:
            most = planned(MOST)
            if isinstance(most, Infeasible):
                why = f"no number of instances holds any rate: {most.stage.value} binds"
                return Advice(rate, running, held, None, 0.0, why)
            why = f"no number of instances holds it, {most.load.rate:.2f} is the most: "
            why += f"{most.binds.value} binds"
            return Advice(rate, running, held, None, most.load.rate, why)
        why = f"those that run hold {held:.2f}"
        return Advice(rate, running, held, more, holds(more), why)
    wanted = running
    while wanted and holds(wanted - 1) >= rate * (1 + SLACK):
        wanted -= 1
    if wanted < running:
        why = f"fewer hold {SLACK:.0%} more than the rate"
        return Advice(rate, running, held, wanted, holds(wanted), why)
    why = "none runs"
    if running:
        why = (
            f"one less would hold {holds(running - 1):.2f}, less than {1 + SLACK:g} times the rate"
        )
    return Advice(rate, running, held, running, held, why)


def _first(low: int, rate: float, holds: Callable[[int], float]) -> int | None:
    """The smallest number above `low`, which does not hold the rate, that does. More instances
    never hold less."""
    high = low + 1
    while holds(high) < rate:
        if high >= MOST:
            return None
        low, high = high, min(2 * high, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle) < rate:
            low = middle
        else:
            high = middle
    return high


def to_lines(advice: Advice) -> list[str]:
    """The advice for a terminal."""
    rate, running, wanted = advice.rate, advice.running, advice.wanted
    if wanted is None:
        return [f"at {rate:.2f} requests/s: {advice.why}"]
    if wanted == running:
        what = f"keep the peer's {running} instances, which hold {advice.held:.2f}"
    else:
        what = f"{running} to {wanted} instances at the peer, which hold {advice.held_then:.2f}"
    return [f"at {rate:.2f} requests/s: {what}", f"  {advice.why}"]
