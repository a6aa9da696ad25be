"""What a gateway has just sent, told to the others at once, and heard of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.cluster_view import ClusterView
from gateway.state.metrics import StateMetrics
from prfaas.cluster_state import ClusterStore, Load, Sent
from prfaas.errors import StateUnavailable

logger = logging.getLogger(__name__)

HEAR_AGAIN_S = 0.1
"""After nothing more could be heard; twice as long with each time, up to MAX_PAUSE_S."""
MAX_PAUSE_S = 2.0


class SentTelling:
    """Between two exchanges, which carry the same: what is lost here comes with the next of them.

    Without it two gateways that decide within one exchange take the same idle place; and what is
    shown by its feed a moment later would count twice until the exchange after that. Borrows all it
    is given; nothing to close. `run` until cancelled.
    """

    def __init__(
        self,
        interval_s: float,
        store: ClusterStore,
        view: ClusterView,
        metrics: StateMetrics,
        member: str,
        is_up: Callable[[], bool],
    ) -> None:
        """`interval_s`: between two tellings, 0: only exchanges tell. `is_up`: the store answers
        exchanges.
        """
        self._interval_s = interval_s
        self._store = store
        self._view = view
        self._metrics = metrics
        self._member = member
        self._is_up = is_up
        self._changed = asyncio.Event()
        if interval_s > 0:
            view.sent.on_change = self._changed.set
        self._seq = 0
        self._failures = 0
        self._why = ""
        self.pass_on: Callable[[Sent], None] | None = None
        """Who else is to know what was heard."""

    def now(self) -> Sent:
        """All that is under way, younger than what was said before."""
        self._seq += 1
        loads = {
            place: Load(
                sums.tokens,
                sums.requests,
                sums.raw_bytes,
                sums.wire_bytes,
                sums.transfers,
                sums.staged_bytes,
            )
            for place, sums in self._view.sent.sums().items()
        }
        return Sent(self._member, self._seq, loads)

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        if self._interval_s <= 0:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell())
            group.create_task(self._hear())

    async def _tell(self) -> None:
        told: dict[str, Load] = {}
        failures = 0
        while not _cancelled():
            await self._changed.wait()
            self._changed.clear()
            sent = self.now()
            if not self._is_up() or sent.loads == told:
                continue
            try:
                await self._store.tell_sent(sent)
            except StateUnavailable:
                self._metrics.sent("failed")
                failures = min(10, failures + 1)
            else:
                told, failures = sent.loads, 0
                self._metrics.sent("told")
            pause_s = max(self._interval_s, min(MAX_PAUSE_S, self._interval_s * 2**failures))
            await asyncio.sleep(pause_s)

    async def _hear(self) -> None:
        while not _cancelled():
            try:
                await self._store.hear_sent(self._heard)
            except StateUnavailable as exc:
                if self._is_up() and exc.message != self._why:
                    self._why = exc.message
                    logger.warning(
                        "what other gateways send is heard with each exchange only: %s", self._why
                    )
            if not _cancelled():
                await asyncio.sleep(min(MAX_PAUSE_S, HEAR_AGAIN_S * 2**self._failures))
                self._failures = min(10, self._failures + 1)

    def _heard(self, sent: Sent) -> None:
        self._failures, self._why = 0, ""
        if sent.member == self._member or not self._view.neighbours.take_sent(sent):
            return
        self._metrics.sent("heard")
        if self.pass_on is not None:
            self.pass_on(sent)


def _cancelled() -> bool:
    """This task was, which the client of Redis may have kept to itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
