"""Monotonic time and deadlines; tests pass a clock of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds and of wall-clock seconds since the epoch."""

    def now(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    now = staticmethod(time.monotonic)  # itself: a request looks at it a dozen times
    wall = staticmethod(time.time)


SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time that one request hands down to everything it waits for."""

    at: float
    clock: Clock = SYSTEM_CLOCK

    @staticmethod
    def after(seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        return Deadline(clock.now() + seconds, clock)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock.now())

    def expired(self) -> bool:
        return self.clock.now() >= self.at

    def capped(self, seconds: float) -> float:
        """`seconds`, or what is left where that is less: the time-out of one phase."""
        return min(seconds, self.remaining_s())
