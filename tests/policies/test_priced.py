"""`priced`: TTFT corrected by lengths, egress, link budget and staging; conservative when blind."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from policies.paper import Learnt
from policies.priced import Priced, Prices
from prfaas.interfaces import LearningPolicy, RoutingPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import EngineLoad, Outcome, Reason, RequestFacts, Snapshot, Target
from prfaas.testing.contracts import (
    UNKNOWN_INPUTS,
    PolicyContract,
    busy_snapshot,
    long_request,
    with_local,
    with_remote,
)


def priced(**settings: Any) -> Priced:
    return Priced(PolicySettings(name="priced", **settings))


def equal_places() -> Snapshot:
    """Queues at both sites, remote a little faster: 4,000 tokens take 8.8 s to compute."""
    load = EngineLoad(queue_tokens=1000, waiting=1, age_s=0.1)
    snapshot = with_local(busy_snapshot(), load=replace(load, queue_tokens=1200))
    return with_remote(snapshot, load=load)


def learnt(threshold: float, **more: Any) -> Prices:
    return Prices(
        Learnt(threshold_tokens=threshold), threshold, local_busy=1.0, remote_busy=1.0, **more
    )


class TestPriced(PolicyContract):
    def make(self, settings: PolicySettings) -> RoutingPolicy[Any]:
        return Priced(settings)


def test_it_learns_from_every_request() -> None:
    assert isinstance(priced(), LearningPolicy)
    policy, state = priced(), Prices()
    for _ in range(64):
        state = policy.saw(state, long_request(), equal_places())
    assert state.threshold_tokens > 0
    assert state.local_busy == pytest.approx(1 - (1 - 1 / 128) ** 64)
    assert state.remote_busy == pytest.approx(state.local_busy)


def test_before_a_threshold_is_solved_ttft_alone_decides() -> None:
    for snapshot in (busy_snapshot(), with_local(busy_snapshot(), load=EngineLoad(age_s=0.1))):
        decision = priced().decide(long_request(), snapshot, Prices())
        local, remote = decision.estimates
        assert (remote.ttft_s < 0.95 * local.ttft_s) == (decision.target is Target.REMOTE)


def test_long_prompts_leave_at_a_loss_and_short_ones_only_for_a_gain() -> None:
    policy = priced(remote_margin=0.0)
    slower = with_remote(equal_places(), load=EngineLoad(queue_tokens=1900, waiting=2, age_s=0.1))
    assert policy.decide(long_request(), slower, learnt(4000)).target is Target.LOCAL
    decision = policy.decide(long_request(), slower, learnt(1000))
    assert (decision.target, decision.reason) == (Target.REMOTE, Reason.REMOTE_CHEAPER)
    faster = equal_places()
    assert policy.decide(long_request(), faster, learnt(4000)).target is Target.REMOTE
    assert policy.decide(long_request(), faster, learnt(20000)).target is Target.LOCAL
    unpriced = priced(remote_margin=0.0, length_price_s=0.0)
    assert unpriced.decide(long_request(), faster, learnt(20000)).target is Target.REMOTE


def test_nothing_leaves_at_a_loss_while_d_has_no_queue() -> None:
    idle = with_local(equal_places(), load=EngineLoad(age_s=0.1))
    decision = priced().decide(long_request(), idle, learnt(100))
    assert (decision.target, decision.reason) == (Target.LOCAL, Reason.LOCAL_FASTER)


def test_where_nobody_waits_part_of_the_length_price_falls_away() -> None:
    """Price 2 x ln(4) = 2.77 s of a gain of 2 s: too much at a busy site, not at half of it."""
    snapshot = with_local(equal_places(), load=EngineLoad(queue_tokens=2000, waiting=1, age_s=0.1))
    policy = priced(remote_margin=0.0, length_price_s=2.0, busy_share=1.0)
    busy = replace(learnt(4 * 4000), remote_busy=1.0)
    decision = policy.decide(long_request(), snapshot, busy)
    gain_s = decision.estimates[0].ttft_s - decision.estimates[1].ttft_s
    assert 0 < gain_s < 2 * math.log(4)
    assert decision.target is Target.LOCAL
    calm = replace(busy, remote_busy=0.0)
    assert policy.decide(long_request(), snapshot, calm).target is Target.REMOTE


def test_egress_has_a_price() -> None:
    """63 MB cross the link."""
    free, dear = priced(), priced(egress_s_per_gb=1000.0)
    assert free.decide(long_request(), busy_snapshot(), Prices()).target is Target.REMOTE
    decision = dear.decide(long_request(), busy_snapshot(), Prices())
    assert (decision.target, decision.reason) == (Target.LOCAL, Reason.LOCAL_CHEAPER)


def with_transfers(seconds: float) -> Snapshot:
    """So many seconds of KV under way, behind D's queue of 9 s and P's of none."""
    link = replace(busy_snapshot().remotes[0].link, in_flight_bytes=int(seconds * 50e6))
    return with_remote(busy_snapshot(), link=link)


def test_a_transfer_pays_for_the_time_that_those_under_way_lose() -> None:
    """The prompt is 92 MB: 1.8 s on the wire, for each of the transfers under way."""
    state = learnt(4000, raw_bytes=92e6)
    free, usual, dear = (priced(link_weight=weight, loss_share=10.0) for weight in (0.0, 1.0, 20.0))
    for seconds, goes in ((0.0, (True, True, True)), (2.0, (True, True, False))):
        snapshot = with_transfers(seconds)
        found = [p.decide(long_request(), snapshot, state) for p in (free, usual, dear)]
        assert tuple(d.target is Target.REMOTE for d in found) == goes
    assert found[-1].reason is Reason.LOCAL_CHEAPER
    # a prompt of which many would be under way weighs as much as they do
    small = replace(state, raw_bytes=92e6 / 20)
    assert usual.decide(long_request(), with_transfers(2.0), small).target is Target.LOCAL
    # nothing is known of what leaves: no price
    assert dear.decide(long_request(), with_transfers(2.0), learnt(4000)).target is Target.REMOTE


def test_transfers_that_end_before_its_own_begins_cost_a_prompt_nothing() -> None:
    """P's queue of 8 s is longer than the link's, and D's longer still."""
    policy, state = priced(link_weight=20.0, loss_share=10.0), learnt(4000, raw_bytes=92e6)
    for seconds, target in ((7.0, Target.REMOTE), (11.0, Target.LOCAL)):
        snapshot = with_local(
            with_transfers(seconds), load=EngineLoad(queue_tokens=12_000, waiting=1, age_s=0.1)
        )
        load = EngineLoad(queue_tokens=4000, waiting=1, age_s=0.1)
        decision = policy.decide(long_request(), with_remote(snapshot, load=load), state)
        assert decision.estimates[1].queue_s == pytest.approx(8.8, abs=0.5)
        assert decision.target is target


def test_prices_cost_a_prompt_no_more_than_a_share_of_its_best_ttft() -> None:
    """D takes twice as long, then P: what the others would gain does not count for more."""
    state = learnt(4000, raw_bytes=92e6 / 100)
    crowded = with_transfers(4.0)
    sacrificed, held = priced(loss_share=50.0), priced(loss_share=0.3)
    decision = sacrificed.decide(long_request(), crowded, state)
    assert (decision.target, decision.reason) == (Target.LOCAL, Reason.LOCAL_CHEAPER)
    local, remote = decision.estimates
    assert local.ttft_s > 1.5 * remote.ttft_s
    assert held.decide(long_request(), crowded, state).target is Target.REMOTE
    # and the other way round: nothing is sent for the sake of D's queue where that takes long
    slower = with_remote(equal_places(), load=EngineLoad(queue_tokens=4000, waiting=2, age_s=0.1))
    sacrificed, held = (
        priced(loss_share=share, queue_weight=1.0, length_price_s=0.0) for share in (50.0, 0.3)
    )
    state = learnt(4000, local_s=0.1)
    assert sacrificed.decide(long_request(), slower, state).target is Target.REMOTE
    decision = held.decide(long_request(), slower, state)
    local, remote = decision.estimates
    assert 1.3 * local.ttft_s < remote.ttft_s
    assert (decision.target, decision.reason) == (Target.LOCAL, Reason.LOCAL_FASTER)


def test_no_share_bounds_what_egress_costs() -> None:
    policy = priced(egress_s_per_gb=1000.0, loss_share=0.1)
    decision = policy.decide(long_request(), busy_snapshot(), Prices())
    assert (decision.target, decision.reason) == (Target.LOCAL, Reason.LOCAL_CHEAPER)


def test_of_engines_behind_one_queue_the_first_comes_free_early() -> None:
    """One that runs on each of four is half done on average: the first of them ends long before."""
    load = EngineLoad(queue_tokens=2000, waiting=1, age_s=0.1)
    one = with_local(with_remote(equal_places(), load=load), load=load)
    four = with_local(with_remote(one, instances=4), instances=4)
    alone, shared = (priced().decide(long_request(), s, Prices()).estimates for s in (one, four))
    for before, after in zip(alone, shared, strict=True):
        assert before.queue_s > 4
        assert after.queue_s == pytest.approx(before.queue_s / 4)
        assert after.ttft_s == pytest.approx(before.ttft_s - before.queue_s * 3 / 4)
        parts = (after.queue_s, after.prefill_s, after.transfer_s, after.rtt_s, after.decode_s)
        assert sum(parts) == pytest.approx(after.ttft_s)
    # one more prompt for each waits for all of the work of one
    more = replace(load, queue_tokens=4000, waiting=2)
    decision = priced().decide(long_request(), with_remote(four, load=more), Prices())
    assert decision.estimates[1].queue_s == pytest.approx(2 * alone[1].queue_s * 5 / 8, rel=0.01)


def test_a_link_that_is_full_stays_so_whenever_an_engine_comes_free() -> None:
    load = EngineLoad(queue_tokens=2000, waiting=1, age_s=0.1)
    link = replace(busy_snapshot().remotes[0].link, in_flight_bytes=int(15 * 50e6))
    snapshot = with_remote(busy_snapshot(), load=load, link=link, instances=4)
    _, remote = priced().decide(long_request(), snapshot, Prices()).estimates
    own_s = 4000 * snapshot.token_bytes / link.wire_ratio / 50e6
    assert remote.ttft_s == pytest.approx(link.rtt_s + 15 + own_s + remote.decode_s)
    assert remote.queue_s + remote.prefill_s < remote.ttft_s - own_s


def test_a_prompt_pays_at_d_for_those_it_would_delay() -> None:
    """Both places take as long; D's queue is ten of what waits there on average."""
    snapshot = with_local(equal_places(), load=EngineLoad(queue_tokens=900, waiting=1, age_s=0.1))
    stays = priced(remote_margin=0.0, length_price_s=0.0, queue_weight=0.0)
    leaves = priced(remote_margin=0.0, length_price_s=0.0, queue_weight=1.0)
    decision = stays.decide(long_request(), snapshot, learnt(4000, local_s=0.2))
    local, remote = decision.estimates
    assert local.ttft_s < remote.ttft_s
    assert decision.target is Target.LOCAL
    decision = leaves.decide(long_request(), snapshot, learnt(4000, local_s=0.2))
    assert (decision.target, decision.reason) == (Target.REMOTE, Reason.REMOTE_CHEAPER)


def test_averages_are_of_what_each_place_gets() -> None:
    policy, snapshot, state = priced(), equal_places(), learnt(2000)
    state = policy.saw(state, RequestFacts("r", 4001), snapshot)
    assert state.raw_bytes == snapshot.token_bytes * 4000 + snapshot.state_bytes
    assert state.local_s == 0.0
    state = policy.saw(state, RequestFacts("r", 1001), snapshot)
    assert state.local_s == pytest.approx(snapshot.local.curve.seconds(1000, 0))
    again = policy.saw(state, RequestFacts("r", 8001), snapshot)
    grown = state.raw_bytes + snapshot.token_bytes * 4000 / 32
    assert again.raw_bytes == pytest.approx(grown)
    assert policy.saw(Prices(), long_request(), snapshot).raw_bytes == 0.0


def test_a_link_over_budget_closes_and_opens_again_at_half_of_it() -> None:
    policy, state, seen = priced(link_budget_s=2.0), Prices(), []
    for seconds in (1.5, 2.5, 1.5, 0.9, 1.5):
        link = replace(busy_snapshot().remotes[0].link, in_flight_bytes=int(seconds * 50e6))
        snapshot = with_remote(busy_snapshot(), link=link)
        decision = policy.decide(long_request(), snapshot, state)
        seen.append(decision.target is Target.REMOTE)
        assert decision.target is Target.REMOTE or decision.reason is Reason.NO_BUDGET
        state = policy.saw(state, long_request(), snapshot)
    assert seen == [True, False, False, True, True]


def test_a_closed_link_leaves_the_others_open() -> None:
    full = busy_snapshot().remotes[0]
    full = replace(full, link=replace(full.link, in_flight_bytes=10**10))
    other = replace(busy_snapshot().remotes[0], peer="other")
    snapshot = replace(busy_snapshot(), remotes=(full, other))
    decision = priced().decide(long_request(), snapshot, Prices())
    assert decision.plan == (("other", "prefill-0"),)


def test_staging_keeps_headroom() -> None:
    """The request's KV is 92 MB."""
    snapshot = with_local(busy_snapshot(), free_staging_bytes=150_000_000)
    assert priced().decide(long_request(), snapshot, Prices()).target is Target.REMOTE
    decision = priced(staging_headroom=2.0).decide(long_request(), snapshot, Prices())
    assert (decision.target, decision.reason) == (Target.LOCAL, Reason.NO_SPACE)


def test_of_several_instances_the_best_come_first_and_only_what_pays() -> None:
    one = busy_snapshot().remotes[0]
    loads = {"long": 90_000, "second": 1000, "idle": 0}
    remotes = tuple(
        replace(one, instance=name, load=EngineLoad(queue_tokens=n, waiting=bool(n), age_s=0.1))
        for name, n in loads.items()
    )
    decision = priced().decide(long_request(), replace(busy_snapshot(), remotes=remotes), Prices())
    assert decision.plan == (("peer", "idle"), ("peer", "second"))


def test_the_threshold_moves_only_by_more_than_the_dead_band() -> None:
    policy, snapshot, state = priced(), equal_places(), Prices()
    for tokens in (500, 1000, 2000, 8001) * 16:
        state = policy.saw(state, RequestFacts("r", tokens), snapshot)
    first = state.threshold_tokens
    assert first > 0
    near = replace(state, threshold_tokens=first * 1.05)
    assert policy.saw(near, long_request(), snapshot).threshold_tokens == first * 1.05
    far = replace(state, threshold_tokens=first * 2)
    assert policy.saw(far, long_request(), snapshot).threshold_tokens == first


@pytest.mark.parametrize("what", sorted(UNKNOWN_INPUTS))
def test_what_is_stale_or_unknown_keeps_requests_and_opens_nothing(what: str) -> None:
    policy, state = priced(), learnt(100, closed=("peer",))
    after = policy.saw(state, long_request(), UNKNOWN_INPUTS[what])
    assert policy.decide(long_request(), UNKNOWN_INPUTS[what], after).target is Target.LOCAL


def test_imports_are_learnt() -> None:
    policy = priced()
    slow = Outcome("t", "staged", raw_bytes=48 << 20, phases={"import": 32.0})
    state = policy.observe(Prices(), slow)
    assert state.imports.s_per_byte > 0
    assert policy.decide(long_request(), busy_snapshot(), state).target is Target.LOCAL
    assert policy.observe(state, Outcome("t", "failed")) is state


@pytest.mark.parametrize("instances", [1, 16])
def test_deciding_takes_microseconds(instances: int) -> None:
    """The goals are 10 and 50 us on a free core (bench/decide.py); ten times that on a shared."""
    one = busy_snapshot()
    remotes = tuple(
        replace(one.remotes[0], peer=f"{i % 8}", instance=f"{i}") for i in range(instances)
    )
    snapshot, request, state = replace(one, remotes=remotes), long_request(), learnt(4000)
    policy, best = priced(), 1.0
    for _ in range(10):
        start = time.process_time()
        for _ in range(100):
            policy.decide(request, snapshot, state)
        best = min(best, (time.process_time() - start) / 100)
    assert best < (100e-6 if instances == 1 else 500e-6)
