"""The view of the process that keeps the state: what changes in it, all workers are told."""

from __future__ import annotations

from collections.abc import Callable

from gateway.cluster_view import ClusterView
from gateway.workers.messages import Fed, ToWorker, Unfed
from prfaas.clock import Clock
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Outcome
from prfaas.telemetry import WatchUpdate


class ToldView(ClusterView):
    """As its base; `tell` hears of each event, after it was taken in."""

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        clock: Clock,
        tell: Callable[[ToWorker], None],
    ) -> None:
        super().__init__(settings, limits, clock)
        self._tell = tell

    def update(self, place: str, update: WatchUpdate, age_s: float = 0.0) -> tuple[Outcome, ...]:
        outcomes = super().update(place, update, age_s)
        if place in self.feeds:
            self._tell(Fed(place, update, age_s))
        return outcomes

    def disconnected(self, place: str) -> None:
        super().disconnected(place)
        if place in self.feeds:
            self._tell(Unfed(place))
