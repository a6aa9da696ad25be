"""The simulated capacity is where objectives stop to hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from policies.registry import make_policy
from policies.scenario import Objectives
from policies.simulator.capacity import Slowdown, capacity, holds
from policies.workload.request import Request
from prfaas.errors import ConfigError
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings


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
    assert holds(found.summary, objectives)
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
    strict = capacity(
        *site.scenario(), poisson, local, objectives, start_rate_per_s=0.5,
        slowdown=Slowdown(2.0, 4.0),
    )  # fmt: skip
    assert strict.rate_per_s < loose.rate_per_s
    assert strict.summary.slowdown_p90 <= 2.0


def test_what_no_rate_holds_is_infeasible(site: Any) -> None:
    with pytest.raises(ConfigError, match=r"infeasible: at .* TTFT is 1\.01 s at P90"):
        capacity(*site.scenario(), poisson, local, Objectives(ttft_p90_s=0.5), start_rate_per_s=0.5)
