"""Everything that can leave D does: the other baseline, and a way to exercise the transfer path."""

from __future__ import annotations

from policies.candidates import MAX_PLAN, forbidden, reachable, uncached_tokens
from prfaas.settings import PolicySettings
from prfaas.snapshot import (
    Decision,
    Outcome,
    Reason,
    RemoteInstance,
    RequestFacts,
    Snapshot,
    Target,
)


class AlwaysRemote:
    """Offloads to the instance with the shortest queue. Stateless; nothing to close.

    Where no instance can take the request the plan is empty and the target still remote: it is
    not this policy that falls back to D, but `on_failure`.
    """

    name = "always_remote"

    def __init__(self, settings: PolicySettings) -> None:
        """No parameter of `settings` matters here."""

    def initial_state(self) -> None:
        return None

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot)
        if reason is Reason.FEATURE:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        if uncached == 0:
            return Decision(Target.LOCAL, Reason.MOSTLY_CACHED)
        if reason is not None:
            return Decision(Target.REMOTE, reason, uncached_tokens=uncached)
        remotes, reason = reachable(snapshot)
        if not remotes:
            return Decision(Target.REMOTE, reason, uncached_tokens=uncached)
        remotes.sort(key=_queue)
        return Decision(
            Target.REMOTE,
            Reason.FORCED_REMOTE,
            plan=tuple((r.peer, r.instance) for r in remotes[:MAX_PLAN]),
            uncached_tokens=uncached,
        )

    def observe(self, state: None, outcome: Outcome) -> None:
        return None


def _queue(remote: RemoteInstance) -> tuple[int, int]:
    load = remote.load
    return load.queue_tokens + load.sent_tokens, load.waiting + load.sent_requests
