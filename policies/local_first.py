"""Local first: what D cannot start soon enough may leave, as far as the link's budget goes."""

from __future__ import annotations

from policies.candidates import MAX_PLAN, forbidden, not_worth, uncached_tokens, usable
from policies.estimate import local_estimate, queue_seconds, wire_bytes
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, Outcome, Reason, RequestFacts, Snapshot, Target


class LocalFirst:
    """Remote only where D's estimated TTFT is above `local_ttft_s`, and the KV under way with this
    request's own is at most `transfer_budget_s` of the link. Stateless.
    """

    name = "local_first"

    def __init__(self, settings: PolicySettings) -> None:
        self._local_ttft_s = settings.local_ttft_s
        self._budget_s = settings.transfer_budget_s
        self._min_uncached_tokens = settings.min_uncached_tokens

    def initial_state(self) -> None:
        return None

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        local = local_estimate(request, snapshot)
        estimates = () if local is None else (local,)
        if reason is None and local is None:
            reason = Reason.UNMEASURED
        if reason is None and local is not None and local.ttft_s <= self._local_ttft_s:
            reason = Reason.LOCAL_FASTER
        if reason is None:
            remotes, reason = usable(request, snapshot)
            free = [
                remote
                for remote in remotes
                if remote.link.in_flight_bytes
                + wire_bytes(snapshot, remote, uncached)
                + snapshot.state_bytes
                <= self._budget_s * remote.link.goodput_bytes_per_s
            ]
            if free:
                free.sort(key=lambda remote: queue_seconds(remote.load, remote.curve))
                plan = tuple((r.peer, r.instance) for r in free[:MAX_PLAN])
                return Decision(
                    Target.REMOTE, Reason.LOCAL_BUSY, plan, estimates, uncached_tokens=uncached
                )
            if remotes:
                reason = Reason.NO_BUDGET
        return Decision(Target.LOCAL, reason, (), estimates, uncached)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None
