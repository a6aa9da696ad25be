"""Balanced random: each place gets requests in proportion to how fast it would serve them."""

from __future__ import annotations

import hashlib

from policies.candidates import MAX_PLAN, forbidden, not_worth, uncached_tokens, usable
from policies.estimate import wire_bytes
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


class BalancedRandom:
    """Blind to queues; the dice are a hash of the request id. Stateless."""

    name = "balanced_random"

    def __init__(self, settings: PolicySettings) -> None:
        self._min_uncached_tokens = settings.min_uncached_tokens

    def initial_state(self) -> None:
        return None

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        local = snapshot.local
        if reason is None and not local.curve.known:
            reason = Reason.UNMEASURED
        if reason is not None:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        remotes, reason = usable(request, snapshot)
        if not remotes:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        speed = local.instances / local.curve.seconds(uncached, local.matched_tokens)
        speeds = [_speed(request, snapshot, remote, uncached) for remote in remotes]
        dice = _uniform(request.request_id) * (speed + sum(speeds)) - speed
        if dice < 0:
            return Decision(Target.LOCAL, Reason.BALANCED, uncached_tokens=uncached)
        first = 0
        for first, share in enumerate(speeds):  # noqa: B007
            dice -= share
            if dice < 0:
                break
        order = [*remotes[first:], *remotes[:first]][:MAX_PLAN]
        plan = tuple((r.peer, r.instance) for r in order)
        return Decision(Target.REMOTE, Reason.BALANCED, plan, uncached_tokens=uncached)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None


def _speed(
    request: RequestFacts, snapshot: Snapshot, remote: RemoteInstance, uncached: int
) -> float:
    """Such requests a second, by computing or by carrying, whichever is slower."""
    missing = max(1, request.prompt_tokens - 1 - remote.matched_tokens)
    compute = remote.instances / remote.curve.seconds(missing, remote.matched_tokens)
    carried = wire_bytes(snapshot, remote, uncached) + snapshot.state_bytes
    return min(compute, remote.link.goodput_bytes_per_s / max(1.0, carried))


def _uniform(request_id: str) -> float:
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
