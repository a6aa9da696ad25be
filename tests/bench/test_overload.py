"""The load of the benchmark of overload is what it says, and only answers in time are good."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.overload import (
    ARMS,
    CAPACITY_PER_S,
    ENGINES,
    GOOD_S,
    PREFILL_S,
    PROMPT_TOKENS,
    SLOTS,
    STEP_S,
    WARM_S,
    Asked,
    fleet,
    goodput,
)
from local_engine.paced_profile import load_profile


@pytest.mark.parametrize("arm", ARMS)
def test_the_fleet_has_the_capacity_that_loads_are_shares_of(arm: str) -> None:
    made = fleet(ARMS[arm])
    profile = load_profile(Path(made.engines.engine["paced"]))
    assert profile.step_s(1, 0) == STEP_S
    assert profile.prefill_s(PROMPT_TOKENS) == pytest.approx(PREFILL_S)
    assert (made.engines.count, made.engines.engine["max_batch"]) == (ENGINES, SLOTS)
    assert 5 < CAPACITY_PER_S < 20, "a laptop can make so many requests"
    assert ("engine_active_requests" in made.limits) == (arm == "unbounded")


def test_what_is_late_refused_or_outside_of_the_window_is_not_good() -> None:
    good = Asked(GOOD_S, WARM_S)
    others = [
        Asked(GOOD_S + 0.1, WARM_S + 1),
        Asked(float("inf"), WARM_S + 1, "overloaded"),
        Asked(0.1, WARM_S - 0.1),
        Asked(0.1, WARM_S + 2.1),
    ]
    assert goodput([good, *others], WARM_S + 2.0) == 0.5
