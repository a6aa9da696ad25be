"""The simulated capacity is where objectives stop to hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from policies.registry import make_policy
from policies.scenario import Objectives
from policies.simulator.capacity import capacity
from policies.simulator.objectives import failing, standings
from policies.workload.request import Request
from prfaas.errors import ConfigError
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings

STEP = 0.01


def poisson(rate: float) -> Iterator[Request]:
    rng, now = random.Random(1), 0.0
    for number in range(1000):
        now += rng.expovariate(rate)
        yield Request(number, now, 1001, 1)


def local() -> RoutingPolicy[Any]:
    return make_policy(PolicySettings(name="always_local"))


def test_the_rate_found_holds_and_the_next_does_not(site: Any) -> None:
    """One server of a second, deterministic: P90 of the wait is 3 s at a load of about 0.7."""
    objectives = Objectives(ttft_p90_s=4.0, ttft_p99_s=8.0)
    found = capacity(
        *site.scenario(), poisson, local, objectives, start_rate_per_s=0.2, precision=0.02
    )
    assert found.rate_per_s == pytest.approx(0.72, abs=0.1)
    assert found.failing_rate_per_s <= found.rate_per_s * 1.02 + 1e-9
    assert not failing(found.summary, objectives)
    from_above = capacity(
        *site.scenario(), poisson, local, objectives, start_rate_per_s=5.0, precision=0.02
    )
    assert from_above.rate_per_s == pytest.approx(found.rate_per_s, rel=0.05)


@pytest.mark.parametrize("start", [0.7, 0.3, 2.0])
def test_small_steps_from_a_near_start_find_the_same_rate_in_fewer_runs(
    site: Any, start: float
) -> None:
    objectives = Objectives(ttft_p90_s=4.0, ttft_p99_s=8.0)
    runs: list[float] = []

    def counted(rate: float) -> Iterator[Request]:
        runs.append(rate)
        return poisson(rate)

    found = capacity(
        *site.scenario(), counted, local, objectives, start_rate_per_s=start, growth=1.1
    )
    assert found.rate_per_s == pytest.approx(0.72, abs=0.1)
    assert found.failing_rate_per_s <= found.rate_per_s * 1.02 + 1e-9
    if start == 0.7:
        assert len(runs) < 7


def test_slowdown_is_an_objective_too(site: Any) -> None:
    objectives = Objectives(ttft_p90_s=100.0)
    loose = capacity(*site.scenario(), poisson, local, objectives, start_rate_per_s=0.5)
    objectives = Objectives(ttft_p90_s=100.0, slowdown_p90=2.0, slowdown_p99=4.0)
    strict = capacity(*site.scenario(), poisson, local, objectives, start_rate_per_s=0.5)
    assert strict.rate_per_s < loose.rate_per_s
    assert strict.summary.slowdown_p90 <= 2.0


def test_time_between_tokens_is_an_objective_too(site: Any, profile: Any) -> None:
    """A step takes 10 ms, and as much for each sequence in it."""
    site.profile = profile(decode={"step_s": STEP, "sequence_s": STEP, "max_batch": 8})

    def answers(rate: float) -> Iterator[Request]:
        return (Request(number, number / rate, 101, 21) for number in range(40))

    objectives = Objectives(ttft_p90_s=1.0, itl_s=2.5 * STEP)
    found = capacity(*site.scenario(), answers, local, objectives, start_rate_per_s=1.0)
    assert found.summary.itl_p90_s <= 2.5 * STEP
    itl = standings(found.summary, objectives)[-1]
    assert (itl.figure.name, itl.limit, itl.excess) == ("ITL P90", 2500 * STEP, 0.0)
    loose = capacity(
        *site.scenario(), answers, local, Objectives(ttft_p90_s=1.0), start_rate_per_s=1.0
    )
    assert loose.rate_per_s > 1.2 * found.rate_per_s


def test_what_no_rate_holds_is_infeasible(site: Any) -> None:
    with pytest.raises(ConfigError, match=r"infeasible: at .* still TTFT P90 1\.01 s"):
        capacity(*site.scenario(), poisson, local, Objectives(ttft_p90_s=0.5), start_rate_per_s=0.5)
