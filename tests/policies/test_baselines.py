"""The baselines decide as they are described, and keep the contract of all policies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.balanced_random import BalancedRandom
from policies.local_first import LocalFirst
from policies.paper import BINS, BINS_PER_OCTAVE, SOLVE_EVERY, Learnt, PaperScheduler, solve
from policies.uncached_ratio import UncachedRatio
from prfaas.interfaces import LearningPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import (
    UNKNOWN_CURVE,
    EngineLoad,
    LinkState,
    PrefillCurve,
    Reason,
    RequestFacts,
    Target,
)
from prfaas.testing.contracts import (
    PolicyContract,
    busy_snapshot,
    long_request,
    with_local,
    with_remote,
)

FAST = PrefillCurve(base_s=0.01, token_s=0.001, token_context_s=0.0, chunk_tokens=256)


class TestBalancedRandomContract(PolicyContract):
    def make(self, settings: PolicySettings) -> BalancedRandom:
        return BalancedRandom(settings)


class TestUncachedRatioContract(PolicyContract):
    def make(self, settings: PolicySettings) -> UncachedRatio:
        return UncachedRatio(settings)


class TestLocalFirstContract(PolicyContract):
    def make(self, settings: PolicySettings) -> LocalFirst:
        return LocalFirst(settings)


class TestPaperContract(PolicyContract):
    def make(self, settings: PolicySettings) -> PaperScheduler:
        return PaperScheduler(settings)


def test_balanced_random_splits_in_proportion_to_speed() -> None:
    policy = BalancedRandom(PolicySettings())
    snapshot = busy_snapshot()
    snapshot = with_remote(snapshot, link=LinkState(1e9, 0.01, age_s=0.1), instances=3)
    away = sum(
        policy.decide(RequestFacts(f"r{i}", 4001), snapshot, None).target is Target.REMOTE
        for i in range(4000)
    )
    assert away / 4000 == pytest.approx(0.75, abs=0.03)


def test_balanced_random_counts_the_link_in() -> None:
    """A link that carries a request in 9.2 s where computing takes 9 s: hardly less than half."""
    policy = BalancedRandom(PolicySettings())
    thin = with_remote(busy_snapshot(), link=LinkState(1e6, 0.01, age_s=0.1))
    away = sum(
        policy.decide(RequestFacts(f"r{i}", 4001), thin, None).target is Target.REMOTE
        for i in range(2000)
    )
    assert away / 2000 == pytest.approx(1 / (1 + 92.16 / 8.96), abs=0.02)


@pytest.mark.parametrize(
    ("prompt", "cached", "target"),
    [
        (8001, 0, Target.REMOTE),  # many
        (8001, 7000, Target.LOCAL),  # few, and a small part
        (1501, 0, Target.REMOTE),  # few, but all of it
        (4001, 1500, Target.REMOTE),  # many, though a small part
    ],
)
def test_uncached_ratio_wants_both_few_and_a_small_part_to_stay(
    prompt: int, cached: int, target: Target
) -> None:
    policy = UncachedRatio(PolicySettings(threshold_tokens=2048, uncached_ratio=0.7))
    snapshot = with_local(busy_snapshot(), matched_tokens=cached)
    assert policy.decide(RequestFacts("r", prompt), snapshot, None).target is target


def test_local_first_sends_only_what_d_cannot_start_and_the_budget_allows() -> None:
    settings = PolicySettings(local_ttft_s=5.0, transfer_budget_s=2.0)
    policy, snapshot = LocalFirst(settings), busy_snapshot()
    idle = with_local(snapshot, load=EngineLoad(age_s=0.1))
    short = RequestFacts("r", 1001)
    assert policy.decide(short, idle, None).reason is Reason.LOCAL_FASTER
    busy = policy.decide(short, snapshot, None)
    assert (busy.target, busy.reason) == (Target.REMOTE, Reason.LOCAL_BUSY)
    full = with_remote(
        snapshot, link=replace(snapshot.remotes[0].link, in_flight_bytes=100_000_000)
    )
    assert policy.decide(short, full, None).reason is Reason.NO_BUDGET


def learnt(lengths: dict[int, float]) -> Learnt:
    counts = [0.0] * BINS
    for tokens, count in lengths.items():
        counts[int(math.log2(tokens) * BINS_PER_OCTAVE)] += count
    return Learnt(counts=tuple(counts), threshold_tokens=1.0)


def test_the_papers_threshold_balances_the_two_sites() -> None:
    """One long prompt is as much work as the short ones together: it goes, they stay."""
    snapshot = with_remote(busy_snapshot(), link=LinkState(1e9, 0.01, age_s=0.1))
    threshold = solve(learnt({1000: 8.0, 8192: 1.0}).counts, snapshot)
    assert threshold is not None
    assert 1000 < threshold <= 8192
    faster = with_remote(snapshot, curve=FAST)
    lower = solve(learnt({1000: 8.0, 4000: 2.0, 8192: 1.0}).counts, faster)
    assert lower is not None
    assert lower <= 4000


def test_a_thin_link_raises_the_papers_threshold() -> None:
    lengths = {500: 8.0, 1000: 8.0, 2000: 4.0, 4000: 2.0, 8192: 1.0}
    wide = with_remote(busy_snapshot(), link=LinkState(1e9, 0.01, age_s=0.1))
    thin = with_remote(busy_snapshot(), link=LinkState(5e6, 0.01, age_s=0.1))
    a, b = solve(learnt(lengths).counts, wide), solve(learnt(lengths).counts, thin)
    assert a is not None
    assert b is not None
    assert b > a


def test_the_papers_scheduler_learns_from_every_request() -> None:
    policy = PaperScheduler(PolicySettings(threshold_tokens=123))
    assert isinstance(policy, LearningPolicy)
    state = policy.initial_state()
    snapshot = with_remote(busy_snapshot(), link=LinkState(1e9, 0.01, age_s=0.1))
    for number in range(SOLVE_EVERY):
        assert state.threshold_tokens == 123
        state = policy.saw(
            state, RequestFacts(f"r{number}", 1001 if number % 8 else 9001), snapshot
        )
    assert 1000 < state.threshold_tokens < 9001
    before = state.threshold_tokens
    for number in range(40 * SOLVE_EVERY):  # the workload changes, and the old one is forgotten
        state = policy.saw(state, RequestFacts(f"s{number}", 301 if number % 8 else 601), snapshot)
    assert state.threshold_tokens < 700 < before


def test_a_surge_at_the_peer_keeps_more_at_d_unless_told_not_to() -> None:
    queue = EngineLoad(queue_tokens=20_000, waiting=5, age_s=0.1)
    snapshot = with_remote(busy_snapshot(), load=queue)
    state = Learnt(threshold_tokens=3000.0)
    with_surge = PaperScheduler(PolicySettings(surge_s=2.0))
    without = PaperScheduler(PolicySettings(surge_s=0.0))
    assert with_surge.decide(long_request(), snapshot, state).target is Target.LOCAL
    assert without.decide(long_request(), snapshot, state).target is Target.REMOTE


def test_with_abundant_bandwidth_what_the_peer_has_cached_counts_too() -> None:
    snapshot = with_remote(busy_snapshot(), matched_tokens=3500)
    policy, state = PaperScheduler(PolicySettings(surge_s=0.0)), Learnt(threshold_tokens=1000.0)
    assert policy.decide(long_request(), snapshot, state).target is Target.LOCAL
    scarce = with_remote(snapshot, link=replace(snapshot.remotes[0].link, in_flight_bytes=10**9))
    assert policy.decide(long_request(), scarce, state).target is Target.REMOTE


def test_unknown_curves_leave_the_threshold_as_it_is() -> None:
    counts = learnt({1000: 8.0}).counts
    assert solve(counts, replace(busy_snapshot(), remotes=())) is None
    assert solve(counts, with_local(busy_snapshot(), curve=UNKNOWN_CURVE)) is None
