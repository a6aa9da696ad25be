"""The planner reproduces Table 6 of the paper, and shows what the paper leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.mix import RequestMix, mix_of_lengths
from policies.planner import Infeasible, Queues, best_plan, largest_batch, with_link
from policies.scenario import Objectives, load_scenario
from policies.table6 import PUBLISHED, reproduce, worst_error
from policies.throughput import (
    Fleet,
    Split,
    Stage,
    balanced_capacity,
    best_capacity,
    idle_ttft_s,
    quantile,
)
from policies.workload.generate import Lengths
from prfaas.errors import ConfigError

EASY = Objectives(ttft_p90_s=10.0, ttft_p99_s=20.0)


@pytest.fixture(scope="module")
def mix() -> RequestMix:
    return mix_of_lengths(Lengths(), 1024)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet.of(*load_scenario("paper"))


def test_every_figure_of_the_three_columns_is_within_three_percent() -> None:
    found = reproduce()
    for column, figures in PUBLISHED.items():
        for name, published in figures.items():
            ours = found[column][name]
            if name.startswith("n_"):
                assert ours == published, (column, name)
            else:
                assert ours == pytest.approx(published, rel=0.03), (column, name)
    assert 0 < worst_error(found) < 0.03


def test_the_papers_other_figures_follow(fleet: Fleet, mix: RequestMix) -> None:
    best = best_capacity(fleet, mix)
    assert best.remote_share == pytest.approx(0.496, abs=0.01)
    assert best.long_tokens == pytest.approx(44_000, rel=0.04)
    assert best.egress_bytes_per_s * 8e-9 == pytest.approx(13, rel=0.08)


@pytest.mark.parametrize(("prefill", "rate"), [(2, 2.97), (4, 3.13), (5, 2.35)])
def test_neighbouring_splits_are_worse_by_as_much_as_derived(
    fleet: Fleet, mix: RequestMix, prefill: int, rate: float
) -> None:
    assert best_capacity(fleet, mix, splits=[prefill]).rate == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize(("gbit_per_s", "rate"), [(10, 3.06), (5, 2.27), (2.5, 1.73)])
def test_the_link_moves_the_optimum_only_below_about_12_gbit(
    fleet: Fleet, mix: RequestMix, gbit_per_s: float, rate: float
) -> None:
    best = best_capacity(with_link(fleet, gbit_per_s), mix)
    assert best.rate == pytest.approx(rate, rel=0.03)
    wide = best_capacity(with_link(fleet, 14), mix)
    assert wide.rate == pytest.approx(best_capacity(fleet, mix).rate, rel=0.01)
    assert best.rate < wide.rate


def test_at_100_gbit_the_link_would_carry_thirteen_requests_a_second(
    fleet: Fleet, mix: RequestMix
) -> None:
    best = best_capacity(fleet, mix)
    assert fleet.remote is not None
    ceiling = fleet.link_bytes_per_s / fleet.remote.model.wire_bytes(best.long_tokens)
    assert ceiling == pytest.approx(13.2, rel=0.03)
    assert best.binds is not Stage.LINK


def test_the_threshold_itself_buys_a_few_percent_of_rate_and_the_tail(
    fleet: Fleet, mix: RequestMix
) -> None:
    best, blind = best_capacity(fleet, mix), balanced_capacity(fleet, mix)
    assert blind.rate == pytest.approx(3.15, rel=0.02)
    assert fleet.remote is not None
    # By times, not by times of mean lengths, since the curve bends.
    local, away = mix.prefill_s(fleet.local), mix.prefill_s(fleet.remote)
    blind_rate = 4 / mix.mean(away) + 3 / mix.mean(local)
    used = Queues(fleet, mix, best.split, 20).utilisation(1.0)
    assert 1.03 < 1 / max(used.values()) / blind_rate < 1.045
    share = blind.remote_share
    weights = np.concatenate((mix.weight * (1 - share), mix.weight * share))
    blind_p90 = quantile(np.concatenate((local, away)), weights, 0.9)
    ours_p90 = quantile(idle_ttft_s(fleet, mix, best.split.threshold_tokens), mix.weight, 0.9)
    assert blind_p90 == pytest.approx(4.9, rel=0.05)
    assert ours_p90 < 0.75 * blind_p90


@pytest.mark.parametrize(("rate", "mean"), [(2.5, 3.3), (3.0, 8.3)])
def test_the_papers_rate_and_the_papers_ttft_cannot_be_had_together(
    fleet: Fleet, mix: RequestMix, rate: float, mean: float
) -> None:
    best = best_capacity(fleet, mix)
    load = Queues(fleet, mix, best.split, 20).load(rate)
    assert load.mean_ttft_s == pytest.approx(mean, rel=0.15)
    assert load.mean_ttft_s > 2.22 * 1.3
    full = Queues(fleet, mix, best.split, 20).load(3.24)
    assert full.mean_ttft_s == float("inf")


def test_the_highest_rate_holds_its_objectives_and_no_higher_one_does(
    fleet: Fleet, mix: RequestMix
) -> None:
    plan = best_plan(fleet, mix, EASY)
    assert 0 < plan.load.rate < best_capacity(fleet, mix).rate
    queues = Queues(fleet, mix, plan.load.split, plan.load.batch)
    assert queues.holds(plan.load.rate, EASY)
    assert not queues.holds(plan.load.rate * 1.01, EASY)
    tails = plan.load.ttft_s
    assert tails[0.9] <= 10.0 + 1e-6
    assert tails[0.99] <= 20.0 + 1e-6
    assert min(10.0 - tails[0.9], 20.0 - tails[0.99]) < 0.1
    assert plan.gain[plan.binds] > 0


def test_stricter_objectives_and_thinner_links_never_raise_the_rate(
    fleet: Fleet, mix: RequestMix
) -> None:
    easy = best_plan(fleet, mix, EASY).load.rate
    hard = best_plan(fleet, mix, Objectives(ttft_p90_s=6.0, ttft_p99_s=12.0)).load.rate
    thin = best_plan(with_link(fleet, 5), mix, EASY).load.rate
    assert hard < easy
    assert thin < easy


def test_a_thin_link_is_named_as_what_binds(fleet: Fleet, mix: RequestMix) -> None:
    loose = Objectives(ttft_p90_s=200.0, ttft_p99_s=400.0)
    plan = best_plan(with_link(fleet, 0.5), mix, loose)
    assert plan.load.remote_share < 0.25
    capacity = best_capacity(with_link(fleet, 2.5), mix)
    assert capacity.binds in (Stage.LINK, Stage.LOCAL_PREFILL)


def test_an_objective_nothing_can_meet_is_infeasible_and_names_the_stage(
    fleet: Fleet, mix: RequestMix
) -> None:
    with pytest.raises(Infeasible) as caught:
        best_plan(fleet, mix, Objectives(ttft_p90_s=1.0))
    assert caught.value.stage is Stage.REMOTE_PREFILL
    for part in ("infeasible", "P90 of 1 s", "remote_prefill binds", "takes 3."):
        assert part in caught.value.message
    with pytest.raises(Infeasible, match=r"ITL of 0.01 s cannot be held.*decode binds"):
        best_plan(fleet, mix, Objectives(itl_s=0.01))
    homogeneous = Fleet.of(*load_scenario("homogeneous"))
    with pytest.raises(Infeasible) as caught:
        best_plan(homogeneous, mix, Objectives(ttft_p90_s=5.0))
    assert caught.value.stage is Stage.LOCAL_PREFILL


def test_an_itl_objective_makes_the_batch_smaller(fleet: Fleet, mix: RequestMix) -> None:
    decode = fleet.decode.model_copy(
        update={"decode": fleet.decode.decode.model_copy(update={"sequence_s": 0.001})}
    )
    slower = replace(fleet, decode=decode)
    assert largest_batch(slower, mix, Objectives(itl_s=0.035)) == 10
    assert largest_batch(slower, mix, Objectives()) == 20


def test_prompts_longer_than_a_profile_covers_are_refused(fleet: Fleet) -> None:
    long = mix_of_lengths(Lengths(mu=12.0, low_tokens=1000, high_tokens=400_000), 10)
    with pytest.raises(ConfigError, match="covers contexts of up to 131072"):
        best_capacity(fleet, long)


def test_a_fixed_split_is_kept(fleet: Fleet, mix: RequestMix) -> None:
    assert best_plan(fleet, mix, EASY, prefill_instances=2).load.split.prefill_instances == 2
    assert Queues(fleet, mix, Split(19_600, 3, 5), 20).load(1.0).mean_ttft_s < 3.0
