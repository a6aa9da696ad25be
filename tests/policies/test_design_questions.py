"""The three questions are answered by the workload's own numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.design_questions import (
    answers,
    at_once_or_lazily,
    break_even_tokens,
    direct_or_shared,
    reuse_local_or_remote,
)
from policies.mix import RequestMix, mix_of_lengths
from policies.planner import with_link
from policies.scenario import load_scenario
from policies.throughput import Fleet
from policies.workload.generate import Lengths


def one_point(uncached: float, cached: float) -> RequestMix:
    return RequestMix(np.array([uncached]), np.array([cached]), np.array([100.0]), np.array([1.0]))


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet.of(*load_scenario("paper"))


def test_without_reuse_there_is_nothing_to_share(fleet: Fleet) -> None:
    found = direct_or_shared(fleet, mix_of_lengths(Lengths(), 1024), 0.0)
    assert found.choice == "direct"
    assert found.numbers["saved_s"] == 0
    assert found.numbers["hop_s"] > 0


def test_long_prefixes_that_only_d_has_are_worth_a_shared_layer(fleet: Fleet) -> None:
    mix = one_point(30_000, 60_000)
    assert direct_or_shared(fleet, mix, 19_600).choice == "shared"
    assert direct_or_shared(with_link(fleet, 0.5), mix, 19_600).choice == "direct"
    # and not where such requests do not leave D at all
    assert direct_or_shared(fleet, mix, 40_000).choice == "direct"


def test_lazily_is_later_by_what_the_computation_would_have_hidden(fleet: Fleet) -> None:
    mix = one_point(32_768, 0)
    found = at_once_or_lazily(with_link(fleet, 10), mix, 0.0, rate=2.0)
    tokens_s = 17_280 * 32_768 / (10e9 / 8)
    assert found.numbers["later_s"] == pytest.approx(tokens_s * (1 - 1 / 15), rel=0.01)
    raw = 17_280 * 32_768 + 182_347_366
    assert found.numbers["staging_gb"] == pytest.approx(2.0 * raw * 1.84 / 2 / 1e9)
    assert found.choice == "at once"


def test_the_fastest_of_three_ways_depends_on_what_is_where(fleet: Fleet) -> None:
    mostly_cached = reuse_local_or_remote(fleet, one_point(500, 20_000))
    assert mostly_cached.numbers["reuse_share"] + mostly_cached.numbers["remote_share"] == 1.0
    fresh = reuse_local_or_remote(fleet, one_point(30_000, 0))
    assert fresh.choice == "remote"
    assert reuse_local_or_remote(with_link(fleet, 0.05), one_point(1000, 0)).choice == "local"
    assert fresh.numbers["best_s"] <= min(fresh.numbers["local_s"], fresh.numbers["remote_s"])


def test_the_break_even_length_grows_as_the_link_thins(fleet: Fleet) -> None:
    lengths = [break_even_tokens(with_link(fleet, gbit)) for gbit in (100, 1.0, 0.2)]
    assert lengths[0] == 16
    assert lengths[1] is not None
    assert lengths[1] > 16
    far = replace(with_link(fleet, 100), rtt_s=60.0)
    assert break_even_tokens(far) is None


def test_without_a_peer_there_are_no_questions() -> None:
    fleet = Fleet.of(*load_scenario("homogeneous"))
    assert answers(fleet, mix_of_lengths(Lengths(), 1024), 0.0, 1.0) == []
