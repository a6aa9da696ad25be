"""Breakers of all engines, instances and links of one gateway, and whose fault a failure was."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass

from gateway.breaker import Breaker, BreakerState
from prfaas.clock import Clock
from prfaas.errors import (
    CorruptKv,
    EngineUnavailable,
    IncompatibleLayout,
    PeerUnavailable,
    PrefillTimeout,
    PrfaasError,
    ProtocolError,
    SessionLost,
)
from prfaas.snapshot import Outcome


class Blame(enum.StrEnum):
    """Whose fault a failed remote prefill was."""

    INSTANCE = "instance"
    """P's engine or agent: whoever asks it fails."""
    LINK = "link"
    """The way between one D and that instance."""
    NOBODY = "nobody"
    """D's own, the request's, or a refusal that says when to come back."""


_INSTANCE = frozenset(
    {
        PrfaasError.kind,
        EngineUnavailable.kind,
        IncompatibleLayout.kind,
        ProtocolError.kind,
        SessionLost.kind,
        f"{PrefillTimeout.kind}_first_frame",
    }
)
_LINK = frozenset(
    {
        PeerUnavailable.kind,
        CorruptKv.kind,
        *(f"{PrefillTimeout.kind}_{phase}" for phase in ("connect", "queue", "progress")),
    }
)


def blame_of(reason: str) -> Blame:
    """Of an outcome's reason (docs/errors.md)."""
    if reason in _INSTANCE:
        return Blame.INSTANCE
    return Blame.LINK if reason in _LINK else Blame.NOBODY


@dataclass(frozen=True, slots=True)
class BreakerInfo:
    """One breaker as `/prfaas/cluster` and metrics show it."""

    what: str
    """`engine`, `instance` or `link`."""
    name: str
    """The engine's, `peer/instance`, or `engine>peer/instance`."""
    state: BreakerState
    opened: int
    """How often it has opened."""


class Breakers:
    """Owns one breaker for each engine, instance and link that was used; nothing to close.

    An engine is judged by its own answers. A remote prefill that failed is held against the
    instance or the link, never against the engine it was for.
    """

    def __init__(self, clock: Clock) -> None:
        self.engines: dict[str, Breaker] = defaultdict(lambda: Breaker(clock))
        self._instances: dict[str, Breaker] = defaultdict(lambda: Breaker(clock))
        self._links: dict[tuple[str, str], Breaker] = defaultdict(lambda: Breaker(clock))

    def allows_remote(self, engine: str, place: str) -> bool:
        """Whether a request for `engine` may be prefilled at `place` (`peer/instance`)."""
        instance, link = self._instances.get(place), self._links.get((engine, place))
        return (instance is None or instance.allows) and (link is None or link.allows)

    def sent_remote(self, engine: str, place: str) -> None:
        """The first of a plan: what waits for a trial has one."""
        for breaker in (self._instances.get(place), self._links.get((engine, place))):
            if breaker is not None:
                breaker.sent()

    def outcome(self, engine: str, sent_to: str, outcome: Outcome) -> None:
        """Hold what D's agent reports against those whose fault it was. `sent_to`: the first of the
        plan.
        """
        if outcome.status == "aborted" or not outcome.tried:
            self.unjudged(engine, sent_to)
            return
        *others, last = outcome.tried
        for at, place in enumerate(others):
            if outcome.tried_reasons:
                self._judge(engine, place, outcome.tried_reasons[at])
            else:  # that it failed is all that is known
                self._links[engine, place].failed()
        if not outcome.reason or outcome.status == "staged":
            self.works(engine, last)
        else:
            self._judge(engine, last, outcome.reason)

    def _judge(self, engine: str, place: str, reason: str) -> None:
        blame = blame_of(reason)
        if blame is Blame.INSTANCE:
            self._instances[place].failed()
        elif blame is Blame.LINK:
            self._links[engine, place].failed()
        else:
            self.unjudged(engine, place)

    def works(self, engine: str, place: str) -> None:
        """KV came whole, of a request or of the probe that pairs them."""
        self._instances[place].succeeded()
        self._links[engine, place].succeeded()

    def unjudged(self, engine: str, place: str) -> None:
        """What was sent there ended and says nothing of it: another request may be the trial."""
        for breaker in (self._instances.get(place), self._links.get((engine, place))):
            if breaker is not None:
                breaker.unjudged()

    def keep(self, names: Set[str]) -> None:
        """Forget all others: engines, and instances as `peer/instance`."""
        for table in (self.engines, self._instances):
            for name in [name for name in table if name not in names]:
                del table[name]
        for link in [each for each in self._links if not names >= {*each}]:
            del self._links[link]

    def infos(self) -> Iterator[BreakerInfo]:
        """Those that were ever used for something."""
        for name, breaker in self.engines.items():
            yield BreakerInfo("engine", name, breaker.state, breaker.opened)
        for name, breaker in self._instances.items():
            yield BreakerInfo("instance", name, breaker.state, breaker.opened)
        for (engine, place), breaker in self._links.items():
            yield BreakerInfo("link", f"{engine}>{place}", breaker.state, breaker.opened)
