"""How many of a peer's instances a rate needs: enough, never to and fro, and the reason why."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from policies.mix import RequestMix, mix_of_lengths
from policies.planner import best_plan
from policies.scaling import SLACK, Advice, advise, to_lines
from policies.scenario import Objectives, load_scenario
from policies.throughput import Fleet
from policies.workload.generate import Lengths
from prfaas.errors import ConfigError

GOALS = Objectives(ttft_p90_s=10.0, ttft_p99_s=20.0)
SPLIT = 3
"""Of D's nodes prefill: fixed, as an autoscaler of the peer finds them."""


@pytest.fixture(scope="module")
def mix() -> RequestMix:
    return mix_of_lengths(Lengths(), 1024, 200)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet.of(*load_scenario("paper"))


def advised(fleet: Fleet, mix: RequestMix, running: int, rate: float) -> Advice:
    return advise(replace(fleet, remote_instances=running), mix, GOALS, rate, SPLIT)


def held(fleet: Fleet, mix: RequestMix, running: int) -> float:
    return best_plan(replace(fleet, remote_instances=running), mix, GOALS, SPLIT).load.rate


def test_two_at_seventy_percent_stay_two_whatever_the_rate_does_around_it(
    fleet: Fleet, mix: RequestMix
) -> None:
    """Case 46: each advice is followed at once, and never taken back."""
    rng, running, rate = random.Random(1), 2, 0.7 * held(fleet, mix, 2)
    for _ in range(5):
        wanted = advised(fleet, mix, running, rate * rng.uniform(0.9, 1.1)).wanted
        assert wanted == 2
        running = wanted


@pytest.mark.parametrize("running", [0, 2, 5])
@pytest.mark.parametrize("share", [0.3, 1.0, 1.4])
def test_what_is_advised_is_enough_and_then_kept(
    fleet: Fleet, mix: RequestMix, running: int, share: float
) -> None:
    rate = share * held(fleet, mix, 2)
    advice = advised(fleet, mix, running, rate)
    assert advice.wanted is not None
    assert advice.held_then == held(fleet, mix, advice.wanted)
    assert advice.held_then >= rate
    again = advised(fleet, mix, advice.wanted, rate)
    assert (again.wanted, again.held) == (advice.wanted, advice.held_then)
    if advice.wanted > running:
        assert held(fleet, mix, advice.wanted - 1) < rate, "not one more than needed"
        assert advised(fleet, mix, advice.wanted, rate / (1 + SLACK / 2)).wanted == advice.wanted
    if advice.wanted < running:
        assert advised(fleet, mix, advice.wanted, rate * (1 + SLACK / 2)).wanted == advice.wanted


def test_a_rate_that_no_number_holds_says_what_the_most_is(fleet: Fleet, mix: RequestMix) -> None:
    thin = replace(fleet, link_bytes_per_s=1e8)
    advice = advised(thin, mix, 4, 1000.0)
    assert advice.wanted is None
    assert 0 < advice.held_then < 1000
    assert to_lines(advice) == [
        f"at 1000.00 requests/s: no number of instances holds it, {advice.held_then:.2f} is the "
        "most: local_prefill binds"
    ]


def test_objectives_that_no_number_meets_are_said_with_the_stage(
    fleet: Fleet, mix: RequestMix
) -> None:
    advice = advise(fleet, mix, Objectives(ttft_p90_s=0.5), 1.0)
    assert (advice.wanted, advice.held, advice.held_then) == (None, 0.0, 0.0)
    assert advice.why == "no number of instances holds any rate: remote_prefill binds"


def test_the_lines_say_what_to_do_and_why(fleet: Fleet, mix: RequestMix) -> None:
    kept = to_lines(advised(fleet, mix, 2, 0.9 * held(fleet, mix, 2)))
    assert kept[0].split(": ")[1].startswith("keep the peer's 2 instances, which hold ")
    assert "one less would hold" in kept[1]
    more = to_lines(advised(fleet, mix, 1, 0.99 * held(fleet, mix, 2)))
    assert ": 1 to 2 instances at the peer" in more[0]
    assert "those that run hold" in more[1]
    less = to_lines(advised(fleet, mix, 2, 0.1 * held(fleet, mix, 2)))
    assert ": 2 to " in less[0]
    assert "fewer hold 25% more" in less[1]


def test_without_a_peer_there_is_nothing_to_scale(mix: RequestMix) -> None:
    with pytest.raises(ConfigError, match="has no peer"):
        advise(Fleet.of(*load_scenario("homogeneous")), mix, GOALS, 1.0)
