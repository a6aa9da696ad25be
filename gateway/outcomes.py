"""What D's agents report of transfers, matched to the requests that are still told of it."""

from __future__ import annotations

import asyncio

from gateway.cluster_view import ClusterView
from gateway.deadlines import Expiry
from gateway.dispatch import Dispatcher
from gateway.live_policy import LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.records import RequestRecord
from gateway.request_log import RequestLog
from gateway.request_spans import RequestSpans
from prfaas.limits import Limits
from prfaas.snapshot import Outcome


class Outcomes:
    """Owns the log and the timer of outcomes that come late; close it with `close`, after the last
    request.
    """

    def __init__(
        self,
        limits: Limits,
        policy: LivePolicy,
        view: ClusterView,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        spans: RequestSpans | None = None,
    ) -> None:
        self._late_s = limits.watch_stale_s
        self._policy = policy
        self._view = view
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._log = RequestLog(spans)
        self._awaiting: dict[str, RequestRecord] = {}
        self._late = Expiry(limits.watch_stale_s, self._give_up)
        """Of requests that have ended, and whose lines wait for it."""
        self._waiters: dict[str, asyncio.Event] = {}

    def awaits(self, transfer_id: str) -> bool:
        """Nobody has said yet what became of this transfer."""
        return transfer_id in self._awaiting

    def expect(self, record: RequestRecord) -> None:
        """Its transfer is about to begin."""
        self._awaiting[record.transfer_id] = record

    def came(self, outcome: Outcome) -> None:
        """What D's agent reports of a transfer; those of other gateways are not ours to count."""
        record = self._awaiting.pop(outcome.transfer_id, None)
        if record is None:
            return
        record.outcome = outcome
        waiter = self._waiters.get(outcome.transfer_id)
        if waiter is not None:
            waiter.set()
        self._view.breakers.outcome(record.engine, _sent_to(record), outcome)
        self._policy.observe(record.policy_role, outcome)
        token_bytes = record.snapshot.token_bytes if record.snapshot is not None else 0
        self._metrics.outcome(outcome, token_bytes)
        self._dispatcher.prefill_over(record)
        if self._late.end(outcome.transfer_id):
            self._log.add(record)

    async def wait(self, record: RequestRecord) -> Outcome | None:
        """Of its transfer; None where nobody tells in time."""
        if record.outcome is None:
            waiter = self._waiters.setdefault(record.transfer_id, asyncio.Event())
            try:
                async with asyncio.timeout(self._late_s):
                    await waiter.wait()
            except TimeoutError:
                return None
            finally:
                self._waiters.pop(record.transfer_id, None)
        return record.outcome

    def forget(self, record: RequestRecord, status: str = "unknown") -> None:
        """Another attempt follows: what became of this one's transfer tells nothing."""
        if self._awaiting.pop(record.transfer_id, None) is not None:
            self._unknown(record, status)

    def ended(self, record: RequestRecord) -> None:
        """Log a request, with its outcome where that comes soon."""
        if record.transfer_id in self._awaiting:
            # The feed is up to an interval behind; the log line waits for it a little.
            self._late.begin(record.transfer_id)
        else:
            self._log.add(record)

    def close(self) -> None:
        """Log what still waits for its outcome."""
        for transfer_id in self._late.close():
            self._give_up(transfer_id)
        self._log.close()

    def _give_up(self, transfer_id: str) -> None:
        """Nobody told in time what became of a transfer: its agent is gone, or never saw it."""
        record = self._awaiting.pop(transfer_id)
        self._unknown(record)
        self._log.add(record)

    def _unknown(self, record: RequestRecord, status: str = "unknown") -> None:
        """What became of its transfer is not known, and held against nobody."""
        self._metrics.outcomes.inc(status)
        self._view.breakers.unjudged(record.engine, _sent_to(record))


def _sent_to(record: RequestRecord) -> str:
    """The first of its plan, `peer/instance`."""
    plan = record.decision.plan if record.decision is not None else ()
    return "/".join(plan[0]) if plan else ""
