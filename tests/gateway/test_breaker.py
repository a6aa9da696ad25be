"""A breaker opens after failures in a row, lets one trial through, and closes when that is good."""

from __future__ import annotations

from gateway.breaker import FAILURES, OPEN_FIRST_S, OPEN_MOST_S, TRIAL_S, Breaker, BreakerState
from prfaas.testing.clock import ManualClock


def open_breaker(clock: ManualClock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        assert breaker.state is BreakerState.CLOSED
        breaker.failed()
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(ManualClock())
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed()
        breaker.succeeded()
    assert (breaker.state, breaker.allows, breaker.opened) == (BreakerState.CLOSED, True, 0)


def test_an_open_one_lets_one_trial_through_when_its_time_is_over() -> None:
    clock = ManualClock()
    breaker = open_breaker(clock)
    assert (breaker.state, breaker.allows) == (BreakerState.OPEN, False)
    clock.advance(OPEN_FIRST_S)
    assert (breaker.state, breaker.allows) == (BreakerState.TRIAL, True)
    breaker.sent()
    assert not breaker.allows, "one at a time"
    breaker.succeeded()
    assert (breaker.state, breaker.allows) == (BreakerState.CLOSED, True)


def test_failed_trials_make_it_wait_twice_as_long_up_to_a_limit() -> None:
    clock = ManualClock()
    breaker = open_breaker(clock)
    waits = []
    for _ in range(8):
        start = clock.now()
        while not breaker.allows:
            clock.advance(0.05)
        waits.append(clock.now() - start)
        breaker.sent()
        breaker.failed()
    for at, wait in enumerate(waits):
        full = min(OPEN_FIRST_S * 2**at, OPEN_MOST_S)
        assert 0.75 * full - 0.01 <= wait <= full + 0.06
    clock.advance(OPEN_MOST_S)
    breaker.sent()
    breaker.succeeded()
    for _ in range(FAILURES):
        breaker.failed()
    clock.advance(OPEN_FIRST_S)
    assert breaker.allows, "after a good one it begins anew"


def test_what_was_sent_before_it_opened_does_not_open_it_longer() -> None:
    clock = ManualClock()
    breaker = open_breaker(clock)
    for _ in range(20):
        breaker.failed()
    assert breaker.opened == 1
    clock.advance(OPEN_FIRST_S)
    assert breaker.allows


def test_what_was_sent_before_it_opened_is_no_trial_either() -> None:
    """Requests at an engine that hangs fail one after the other, for longer than it stays open."""
    clock = ManualClock()
    breaker = open_breaker(clock)
    clock.advance(OPEN_FIRST_S)
    breaker.failed()
    assert (breaker.state, breaker.allows, breaker.opened) == (BreakerState.TRIAL, True, 1)
    breaker.sent()
    breaker.failed()
    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, 2)


def test_a_trial_that_is_never_heard_of_is_tried_again() -> None:
    clock = ManualClock()
    breaker = open_breaker(clock)
    clock.advance(OPEN_FIRST_S)
    breaker.sent()
    clock.advance(TRIAL_S - 1)
    assert not breaker.allows
    clock.advance(2)
    assert breaker.allows
    breaker.sent()
    breaker.unjudged()
    assert breaker.allows, "its client left"
