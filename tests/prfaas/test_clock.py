"""Deadlines run down on the clock they were made with."""

from __future__ import annotations

from prfaas.clock import SYSTEM_CLOCK, Deadline


class FixedClock:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


def test_a_deadline_caps_phases_and_never_goes_negative() -> None:
    clock = FixedClock()
    deadline = Deadline.after(10, clock)
    assert deadline.capped(3) == 3
    clock.at = 108
    assert deadline.capped(3) == 2
    assert not deadline.expired()
    clock.at = 111
    assert deadline.remaining_s() == 0
    assert deadline.expired()


def test_the_system_clock_is_monotonic() -> None:
    assert SYSTEM_CLOCK.now() <= SYSTEM_CLOCK.now()
    assert SYSTEM_CLOCK.wall() > 1_600_000_000
