"""Circuit breakers: what has failed several times in a row gets no requests for a while."""

from __future__ import annotations

import enum
import random

from prfaas.clock import Clock

FAILURES = 3
"""So many in a row open a breaker."""
OPEN_FIRST_S, OPEN_MOST_S = 1.0, 8.0
"""How long it stays open: twice as long each time a trial fails, shortened by up to a quarter so
that many gateways do not try at once."""
TRIAL_S = 15.0
"""A trial of which nothing was heard for so long is as good as none."""


class BreakerState(enum.StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    TRIAL = "trial"
    """One request, whose end decides."""


class Breaker:
    """Of one engine, instance or link; synchronous, nothing to close.

    `allows` says whether a request may go there, `sent` that one does, and `succeeded` or `failed`
    how one ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._random = random.Random()
        self._failures = 0
        self._open_s = OPEN_FIRST_S
        self._opened_at: float | None = None
        self._until = 0.0
        self._trial_at: float | None = None
        self.opened = 0
        """How often it has opened."""

    def __repr__(self) -> str:
        return f"<Breaker {self.state} failures={self._failures} opened={self.opened}>"

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock.now() < self._until else BreakerState.TRIAL

    @property
    def is_closed(self) -> bool:
        return self._opened_at is None

    @property
    def allows(self) -> bool:
        if self._opened_at is None:
            return True
        if self.state is BreakerState.OPEN:
            return False
        return self._trial_at is None or self._clock.now() - self._trial_at > TRIAL_S

    def sent(self) -> None:
        """A request goes there: where the breaker waits for a trial, this is it."""
        if self._opened_at is not None and self.state is BreakerState.TRIAL:
            self._trial_at = self._clock.now()

    def unjudged(self) -> None:
        """A request ended and says nothing of it: another one may be the trial."""
        self._trial_at = None

    def succeeded(self) -> None:
        self._failures = 0
        self._open_s = OPEN_FIRST_S
        self._opened_at = self._trial_at = None

    def failed(self) -> None:
        """Requests that were sent before it opened may still fail: they do not open it longer."""
        state = self.state
        if state is BreakerState.OPEN or (state is BreakerState.TRIAL and self._trial_at is None):
            return
        self._failures += 1
        if state is BreakerState.TRIAL:
            self._open_s = min(2 * self._open_s, OPEN_MOST_S)
        elif self._failures < FAILURES:
            return
        now = self._clock.now()
        self._opened_at, self._trial_at = now, None
        self._until = now + self._open_s * self._random.uniform(0.75, 1.0)
        self.opened += 1
