"""Who goes next of those that wait in the gateway: keys of requests, of which the smallest goes."""

from __future__ import annotations

from typing import Protocol

from gateway.cluster_view import ClusterView
from gateway.job import Job
from prfaas.queue_settings import QueueSettings, order_key


class ActivePolicy(Protocol):
    """The policy that decides now."""

    @property
    def queue(self) -> QueueSettings | None: ...


class QueueOrder:
    """The gateway's queue order, or the one that came with the active policy; borrows that and the
    view, nothing to close.
    """

    def __init__(self, settings: QueueSettings, policy: ActivePolicy, view: ClusterView) -> None:
        self._settings = settings
        self._policy = policy
        self._view = view
        self._chosen, self._key = settings, order_key(settings)

    def key(self, job: Job) -> float:
        """Of a request that is about to wait; by its arrival where no engine tells its curve."""
        chosen = self._policy.queue or self._settings
        if chosen is not self._chosen:
            self._chosen, self._key = chosen, order_key(chosen)
        arrival_s = job.record.started_at
        return arrival_s if chosen.name == "fcfs" else self._key(arrival_s, self._prefill_s(job))

    def _prefill_s(self, job: Job) -> float:
        """At the engine that would have least to do."""
        want = job.prompt.tokens - 1
        seconds = []
        for engine in self._view.engines:
            local = self._view.local(engine.name, job.prompt.chains)
            if local.curve.known:
                cached = min(local.matched_tokens, want)
                seconds.append(local.curve.seconds(want - cached, cached))
        return min(seconds, default=0.0)
