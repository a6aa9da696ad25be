"""Offload by uncached length alone: what deciders in use today do."""

from __future__ import annotations

from policies.candidates import MAX_PLAN, forbidden, not_worth, uncached_tokens, usable
from policies.estimate import queue_seconds
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, Outcome, Reason, RequestFacts, Snapshot, Target


class LengthThreshold:
    """More than `threshold_tokens` uncached tokens go to the shortest queue. Stateless."""

    name = "length_threshold"

    def __init__(self, settings: PolicySettings) -> None:
        self._threshold_tokens = settings.threshold_tokens
        self._min_uncached_tokens = settings.min_uncached_tokens

    def initial_state(self) -> None:
        return None

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        if reason is None and uncached <= self._threshold_tokens:
            reason = Reason.BELOW_THRESHOLD
        if reason is not None:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        remotes, reason = usable(request, snapshot)
        if not remotes:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        remotes.sort(key=lambda remote: queue_seconds(remote.load, remote.curve))
        return Decision(
            Target.REMOTE,
            Reason.ABOVE_THRESHOLD,
            plan=tuple((r.peer, r.instance) for r in remotes[:MAX_PLAN]),
            uncached_tokens=uncached,
        )

    def observe(self, state: None, outcome: Outcome) -> None:
        return None
