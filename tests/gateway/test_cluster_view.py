"""The view turns feeds into snapshots: ages, matches, what was just sent, and warnings."""

import logging
from typing import Any

import pytest

from gateway.breaker import FAILURES
from gateway.cluster_view import NEVER, ClusterView, describe
from policies.estimate import queue_seconds
from prfaas.hashing import block_chain
from prfaas.snapshot import Outcome, PrefillCurve, Snapshot
from prfaas.telemetry import EngineInfo, KvDelta, LinkInfo, WatchUpdate
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import (
    BLOCK_TOKENS,
    CURVE,
    ENGINE,
    INSTANCE,
    PEER,
    PLACE,
    d_engine,
    gateway_settings,
    link,
    p_engine,
)

CHAIN = block_chain(list(range(64)), BLOCK_TOKENS)
CHAINS = {BLOCK_TOKENS: CHAIN}


def full(
    engine: EngineInfo, *links: LinkInfo, blocks: tuple[bytes, ...] | None = ()
) -> WatchUpdate:
    kv = ()
    if blocks is not None:
        kv = (KvDelta(engine.name, engine.epoch, cleared=True, stored=blocks),)
    return WatchUpdate(0, True, "agent", (engine,), kv, links)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make_view(clock: ManualClock, **settings: Any) -> ClusterView:
    chosen = gateway_settings(**settings)
    return ClusterView(chosen.gateway, chosen.limits, clock)


@pytest.fixture
def view(clock: ManualClock) -> ClusterView:
    made = make_view(clock)
    made.update(ENGINE, full(d_engine(), link()))
    made.update(PLACE, full(p_engine()))
    return made


def snap(view: ClusterView, chains: Any = CHAINS) -> Snapshot:
    return view.snapshot(ENGINE, chains, 100)


def test_everything_an_agent_says_reaches_the_snapshot(view: ClusterView) -> None:
    snapshot = snap(view)
    local, remote = snapshot.local, snapshot.remotes[0]
    assert local.name == ENGINE
    assert (local.load.queue_tokens, local.load.waiting, local.load.running) == (2000, 1, 2)
    assert (local.curve, local.load.decode_step_s) == (CURVE, 0.02)
    assert local.offload_ready
    assert local.free_staging_bytes == 1 << 30
    assert (remote.peer, remote.instance, remote.ready) == (PEER, INSTANCE, True)
    assert (remote.link.goodput_bytes_per_s, remote.link.rtt_s) == (50e6, 0.01)
    assert remote.link.wire_ratio == 1.25
    assert snapshot.token_bytes == 1000
    assert snapshot.fallback_free_tokens == 100
    assert snapshot.max_age_s == 2.0


def test_ages_grow_until_the_agent_is_heard_again(view: ClusterView, clock: ManualClock) -> None:
    clock.advance(3.0)
    view.update(ENGINE, WatchUpdate(1, False))
    snapshot = snap(view)
    assert snapshot.local.load.age_s == 0.0
    assert snapshot.remotes[0].link.age_s == 0.0
    assert snapshot.remotes[0].load.age_s == 3.0


def test_an_agent_never_heard_is_decades_old(clock: ManualClock) -> None:
    snapshot = snap(make_view(clock))
    assert snapshot.local.load.age_s == NEVER
    assert snapshot.remotes[0].load.age_s == NEVER
    assert snapshot.remotes[0].link.age_s == NEVER
    assert not snapshot.remotes[0].ready


def test_the_age_of_the_link_includes_what_the_agent_says(view: ClusterView) -> None:
    view.update(ENGINE, WatchUpdate(1, False, links=(link(age_s=1.5),)))
    assert snap(view).remotes[0].link.age_s == 1.5


def test_changes_are_applied_and_the_rest_stays(view: ClusterView) -> None:
    view.update(ENGINE, WatchUpdate(1, False, engines=(d_engine(queue_tokens=7),)))
    snapshot = snap(view)
    assert snapshot.local.load.queue_tokens == 7
    assert snapshot.remotes[0].link.goodput_bytes_per_s == 50e6


def test_a_full_event_forgets_links_it_does_not_mention(view: ClusterView) -> None:
    view.update(ENGINE, full(d_engine()))
    assert not snap(view).remotes[0].ready


def test_an_event_with_links_has_all_of_them(view: ClusterView) -> None:
    other = link(instance="p-9")
    view.update(ENGINE, WatchUpdate(1, False, links=(link(), other)))
    assert set(view.feeds[ENGINE].links) == {(PEER, INSTANCE), (PEER, "p-9")}
    view.update(ENGINE, WatchUpdate(2, False, links=(link(rtt_s=0.5),)))
    view.update(ENGINE, WatchUpdate(3, False))
    assert list(view.feeds[ENGINE].links) == [(PEER, INSTANCE)]
    assert snap(view).remotes[0].link.rtt_s == 0.5


def test_what_p_sees_of_its_link_to_our_agent_is_told_apart(view: ClusterView) -> None:
    (peer,) = view.peers
    ours, theirs = link(agent="agent", rtt_s=0.3), link(agent="another", rtt_s=0.9)
    assert view.served_link(ENGINE, peer) is None
    view.update(PLACE, WatchUpdate(1, False, links=(ours, theirs)))
    assert view.served_link(ENGINE, peer) == ours
    assert snap(view).remotes[0].link.rtt_s == 0.01  # decisions go by D's view
    feeds = {feed["place"]: feed for feed in describe(view, 100)["feeds"]}
    assert feeds[PLACE]["served_links"] == [ours, theirs]
    assert feeds[PLACE]["links"] == []
    assert (feeds[ENGINE]["links"], feeds[ENGINE]["served_links"]) == ([link()], [])
    view.update(PLACE, WatchUpdate(2, False, links=(theirs,)))
    assert view.served_link(ENGINE, peer) is None


@pytest.mark.parametrize(
    ("d", "p", "way"),
    [
        (d_engine(), p_engine(ready=False), link()),
        (d_engine(), p_engine(roles=("decode",)), link()),
        (d_engine(), p_engine(), link(ready=False)),
    ],
)
def test_an_instance_is_ready_only_with_engine_role_and_link(
    clock: ManualClock, d: EngineInfo, p: EngineInfo, way: LinkInfo
) -> None:
    view = make_view(clock)
    view.update(ENGINE, full(d, way))
    view.update(PLACE, full(p))
    assert not snap(view).remotes[0].ready


def test_d_without_its_engine_cannot_offload(view: ClusterView) -> None:
    view.update(ENGINE, WatchUpdate(1, False, engines=(d_engine(ready=False),)))
    assert not snap(view).local.offload_ready


def test_an_engine_without_an_agent_is_never_offloaded_from(clock: ManualClock) -> None:
    view = make_view(clock, d_watch=None)
    local = snap(view).local
    assert not local.offload_ready
    assert local.load.age_s == 0.0  # not stale: it is known to have no connector
    assert ENGINE not in view.feeds


def test_matches_are_counted_in_tokens_by_each_sides_own_blocks(clock: ManualClock) -> None:
    view = make_view(clock)
    coarse = block_chain(list(range(64)), 32)
    view.update(ENGINE, full(d_engine(), link(), blocks=tuple(CHAIN[:3])))
    view.update(PLACE, full(p_engine(block_tokens=32), blocks=tuple(coarse)))
    assert view.block_sizes() == {16, 32}
    snapshot = snap(view, {16: CHAIN, 32: coarse})
    assert snapshot.local.matched_tokens == 48
    assert snapshot.remotes[0].matched_tokens == 64


def test_nothing_is_credited_from_another_epoch(view: ClusterView) -> None:
    """Case 8: the engine restarted, its cache events have not caught up."""
    view.update(ENGINE, full(d_engine(), link(), blocks=tuple(CHAIN)))
    assert snap(view).local.matched_tokens == 64
    view.update(ENGINE, WatchUpdate(1, False, engines=(d_engine(epoch="d2"),)))
    assert snap(view).local.matched_tokens == 0
    assert not view.cache_known(ENGINE)


def test_a_lost_feed_loses_its_index_at_once(view: ClusterView) -> None:
    view.update(ENGINE, full(d_engine(), link(), blocks=tuple(CHAIN)))
    assert view.cache_known(ENGINE)
    view.disconnected(ENGINE)
    assert not view.cache_known(ENGINE)
    assert snap(view).local.matched_tokens == 0
    assert view.feeds[ENGINE].reconnects == 1


def test_nothing_is_offloaded_once_the_agent_beside_the_engine_is_gone(view: ClusterView) -> None:
    """Whatever the policy: the age of its load says so, before it has run out."""
    assert snap(view).local.load.age_s == 0
    view.disconnected(ENGINE)
    assert snap(view).local.load.age_s == NEVER
    view.update(ENGINE, full(d_engine(), link()))
    assert snap(view).local.load.age_s == 0


def test_who_waits_for_kv_makes_nobody_ahead_shorter(view: ClusterView) -> None:
    """A queue of one long prompt is not one of nine short ones."""
    curve = PrefillCurve(0.01, 0.001, 1e-6, 256)
    engine = d_engine(queue_tokens=9000, waiting=9, waiting_kv=8, running=0, curve=curve)
    view.update(ENGINE, full(engine, link()))
    view.sent.add_remote("t1", ENGINE, PLACE, 500, 500_000, 400_000)
    load = snap(view).local.load
    assert queue_seconds(load, curve) == pytest.approx(curve.seconds(9000))
    assert view.transfers(ENGINE) == 9


def test_what_was_sent_counts_until_the_feeds_show_it(
    view: ClusterView, clock: ManualClock
) -> None:
    """Case 42."""
    view.sent.add_remote("t1", ENGINE, PLACE, 500, 500_000, 400_000)
    view.sent.add_local("r1", ENGINE, 300, clock.now())
    snapshot = snap(view)
    remote = snapshot.remotes[0]
    assert (remote.load.sent_tokens, remote.load.sent_requests) == (500, 1)
    assert remote.link.in_flight_bytes == 400_000
    assert remote.free_retention_bytes == (1 << 30) - 500_000
    assert snapshot.local.free_staging_bytes == (1 << 30) - 500_000
    local = snapshot.local.load
    assert (local.sent_tokens, local.sent_requests) == (300, 1)
    assert view.transfers(ENGINE) == 1  # the other one comes there too

    view.update(PLACE, WatchUpdate(1, False, started=("t1",)))
    view.update(ENGINE, WatchUpdate(1, False, started=("t1",)))
    clock.advance(0.3)
    view.update(ENGINE, WatchUpdate(2, False))
    assert snap(view).local.load.sent_tokens == 300  # an empty event says nothing of the load
    view.update(ENGINE, WatchUpdate(3, False, engines=(d_engine(free_staging_bytes=1 << 30),)))
    assert snap(view).local.load.sent_tokens == 300  # neither does the agent's own part
    view.update(ENGINE, WatchUpdate(4, False, engines=(d_engine(queue_tokens=2300),)))
    snapshot = snap(view)
    assert snapshot.local.load.sent_tokens == 0
    assert snapshot.remotes[0].load.sent_tokens == 0
    assert snapshot.remotes[0].link.in_flight_bytes == 0
    assert snapshot.local.free_staging_bytes == 1 << 30


def test_outcomes_are_handed_on(view: ClusterView) -> None:
    outcome = Outcome("t1", "staged")
    assert view.update(ENGINE, WatchUpdate(1, False, outcomes=(outcome,))) == (outcome,)


def test_a_chunk_size_of_zero_is_no_curve(view: ClusterView) -> None:
    broken = CURVE.__class__(0.01, 0.002, 0.0, 0)
    view.update(ENGINE, WatchUpdate(1, False, engines=(d_engine(curve=broken),)))
    assert not snap(view).local.curve.known


def test_an_engine_that_publishes_no_cache_events_is_warned_of_once(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 3."""
    view = make_view(clock)
    with caplog.at_level(logging.WARNING):
        view.update(ENGINE, full(d_engine(), link(), blocks=None))
        assert not caplog.records  # the first cache event may be on its way
        for seq in range(1, 8):
            clock.advance(0.5)
            view.update(ENGINE, WatchUpdate(seq, False))
    assert [r.message for r in caplog.records] == [
        "engine d-0 publishes no cache events: what it has cached is unknown, so nothing is "
        "offloaded (reason no_cache_info)"
    ]


def test_an_engine_of_another_model_is_warned_of_once(
    view: ClusterView, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for seq in range(3):
            view.update(ENGINE, WatchUpdate(seq, False, engines=(d_engine(model="other"),)))
    assert [r.message for r in caplog.records] == [
        "engine d-0 serves model 'other', the gateway 'tiny'"
    ]


def test_the_description_has_the_snapshot_and_the_feeds(view: ClusterView) -> None:
    described = describe(view, 100)
    assert described["local"] == snap(view).local
    assert described["remotes"] == snap(view).remotes
    assert [feed["place"] for feed in described["feeds"]] == [ENGINE, PLACE]


def test_a_pair_that_is_ready_again_closes_its_breakers(view: ClusterView) -> None:
    lost = link(ready=False)
    view.update(ENGINE, WatchUpdate(1, False, links=(lost,)))
    for _ in range(FAILURES):
        view.breakers.outcome(
            ENGINE, PLACE, Outcome("t", "local", "peer_unavailable", tried=(PLACE,))
        )
    assert not view.breakers.allows_remote(ENGINE, PLACE)
    view.update(ENGINE, WatchUpdate(2, False, links=(link(),)))
    assert view.breakers.allows_remote(ENGINE, PLACE)
