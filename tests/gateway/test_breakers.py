"""A failed remote prefill is held against who it was: instance, link, or nobody."""

from __future__ import annotations

import pytest

from gateway.breaker import FAILURES, OPEN_FIRST_S, BreakerState
from gateway.breakers import Blame, Breakers, blame_of
from prfaas.clock import SYSTEM_CLOCK
from prfaas.errors import BY_KIND
from prfaas.snapshot import PREFIX_AT_D, Outcome
from prfaas.testing.clock import ManualClock

D, OTHER, P, Q = "d-0", "d-1", "p/p-0", "p/p-1"


def outcome(status: str, reason: str = "", tried: tuple[str, ...] = (P,)) -> Outcome:
    return Outcome("t", status, reason, tried=tried)


def after(*outcomes: Outcome, engine: str = D) -> Breakers:
    breakers = Breakers(SYSTEM_CLOCK)
    for each in outcomes:
        breakers.outcome(engine, P, each)
    return breakers


def test_an_instance_whose_engine_is_gone_is_left_alone_by_all() -> None:
    breakers = after(*[outcome("local", "engine_unavailable")] * FAILURES)
    assert not breakers.allows_remote(D, P)
    assert not breakers.allows_remote(OTHER, P)
    assert breakers.allows_remote(D, Q)


def test_a_link_that_is_cut_is_left_alone_by_its_own_engine_only() -> None:
    breakers = after(*[outcome("partial", "prefill_timeout_progress")] * FAILURES)
    assert not breakers.allows_remote(D, P)
    assert breakers.allows_remote(OTHER, P)


@pytest.mark.parametrize(
    "reason", ["staging_full", "import_failed", "overloaded", "invalid_request_error", PREFIX_AT_D]
)
def test_what_is_nobodys_fault_opens_nothing(reason: str) -> None:
    breakers = after(*[outcome("local", reason)] * 10)
    assert breakers.allows_remote(D, P)


def test_a_client_that_leaves_opens_nothing() -> None:
    assert after(*[outcome("aborted", "peer_unavailable")] * 10).allows_remote(D, P)


def test_a_plan_whose_second_instance_saves_it_blames_the_first() -> None:
    breakers = after(*[outcome("staged", tried=(P, Q))] * FAILURES)
    assert not breakers.allows_remote(D, P)
    assert breakers.allows_remote(D, Q)


@pytest.mark.parametrize(
    ("reason", "open_to_d", "open_to_others"),
    [
        ("overloaded", True, True),
        ("peer_unavailable", False, True),
        ("engine_unavailable", False, False),
    ],
)
def test_the_first_of_a_plan_is_judged_by_what_it_said(
    reason: str, open_to_d: bool, open_to_others: bool
) -> None:
    """Case 17: one that is full and says so has not failed, whoever else saves the transfer."""
    saved = Outcome("t", "staged", tried=(P, Q), tried_reasons=(reason, ""))
    breakers = after(*[saved] * FAILURES)
    assert breakers.allows_remote(D, P) is open_to_d
    assert breakers.allows_remote(OTHER, P) is open_to_others
    assert breakers.allows_remote(D, Q)


def test_a_good_transfer_between_keeps_it_closed() -> None:
    bad, good = outcome("local", "peer_unavailable"), outcome("staged")
    assert after(*[bad, bad, good] * 5).allows_remote(D, P)
    states = {(i.what, i.name): i.state for i in after(bad, good).infos()}
    assert states == {
        ("instance", P): BreakerState.CLOSED,
        ("link", f"{D}>{P}"): BreakerState.CLOSED,
    }


def opened_long_ago() -> Breakers:
    clock = ManualClock()
    breakers = Breakers(clock)
    for _ in range(FAILURES):
        breakers.outcome(D, P, outcome("local", "peer_unavailable"))
    assert not breakers.allows_remote(D, P)
    clock.advance(OPEN_FIRST_S)
    assert breakers.allows_remote(D, P)
    breakers.sent_remote(D, P)
    assert not breakers.allows_remote(D, P)
    return breakers


@pytest.mark.parametrize(
    "end",
    [
        outcome("aborted"),
        outcome("aborted", tried=()),
        outcome("local", "staging_full"),
        outcome("local", "overloaded"),
    ],
)
def test_a_trial_that_says_nothing_makes_way_for_another(end: Outcome) -> None:
    breakers = opened_long_ago()
    breakers.outcome(D, P, end)
    assert breakers.allows_remote(D, P)


def test_a_trial_whose_end_nobody_tells_makes_way_too() -> None:
    breakers = opened_long_ago()
    breakers.unjudged(D, P)
    assert breakers.allows_remote(D, P)
    breakers.unjudged(D, "")
    breakers.unjudged(OTHER, Q)


def test_a_pair_that_was_made_anew_is_whole() -> None:
    breakers = opened_long_ago()
    breakers.works(D, P)
    assert all(info.state is BreakerState.CLOSED for info in breakers.infos())


def test_every_error_of_ours_is_somebodys_or_nobodys_on_purpose() -> None:
    found = {kind: blame_of(kind) for kind in BY_KIND if blame_of(kind) is not Blame.NOBODY}
    assert found == {
        "internal_error": Blame.INSTANCE,
        "engine_unavailable": Blame.INSTANCE,
        "incompatible_layout": Blame.INSTANCE,
        "protocol_error": Blame.INSTANCE,
        "session_lost": Blame.INSTANCE,
        "peer_unavailable": Blame.LINK,
        "corrupt_kv": Blame.LINK,
    }
