"""What every offloading policy asks first: may this request leave D, and who could take it."""

from __future__ import annotations

from prfaas.snapshot import Reason, RemoteInstance, RequestFacts, Snapshot

MAX_PLAN = 4
"""Instances in one plan: each failed try costs the client its phase time-outs."""

_PROGRESS = (Reason.NO_PEER, Reason.STALE, Reason.UNMEASURED, Reason.NO_SPACE)


def forbidden(request: RequestFacts, snapshot: Snapshot) -> Reason | None:
    """Why no policy may offload this request, whatever it prefers; None where it may."""
    if request.features or request.prompt_tokens <= 1:
        return Reason.FEATURE
    if snapshot.local.load.age_s > snapshot.max_age_s:
        return Reason.STALE
    if not snapshot.local.offload_ready:
        return Reason.FEATURE
    return None


def not_worth(request: RequestFacts, snapshot: Snapshot, min_uncached_tokens: int) -> Reason | None:
    """Why this request should stay local before any candidate is looked at; None to go on."""
    if request.short or request.prompt_tokens - 1 < min_uncached_tokens:
        return Reason.TOO_SHORT
    if not request.cache_known:
        return Reason.NO_CACHE_INFO
    if uncached_tokens(request, snapshot) < max(1, min_uncached_tokens):
        return Reason.MOSTLY_CACHED
    return None


def uncached_tokens(request: RequestFacts, snapshot: Snapshot) -> int:
    """Tokens of [0, N-1) whose KV D lacks."""
    return max(0, request.prompt_tokens - 1 - snapshot.local.matched_tokens)


def reachable(snapshot: Snapshot) -> tuple[list[RemoteInstance], Reason]:
    """Instances that are up and recently heard of; where there are none, the reason."""
    found: list[RemoteInstance] = []
    reason = Reason.NO_PEER
    for remote in snapshot.remotes:
        if not remote.ready or remote.load.draining:
            continue
        if max(remote.load.age_s, remote.link.age_s) > snapshot.max_age_s:
            reason = Reason.STALE
            continue
        found.append(remote)
    return found, reason


def usable(request: RequestFacts, snapshot: Snapshot) -> tuple[list[RemoteInstance], Reason]:
    """Reachable instances that are measured and have room; where there are none, the reason that
    came closest to one."""
    remotes, reason = reachable(snapshot)
    need_bytes = snapshot.token_bytes * uncached_tokens(request, snapshot) + snapshot.state_bytes
    found: list[RemoteInstance] = []
    for remote in remotes:
        if remote.link.goodput_bytes_per_s <= 0 or not remote.curve.known:
            reason = _closer(reason, Reason.UNMEASURED)
        elif min(snapshot.local.free_staging_bytes, remote.free_retention_bytes) < need_bytes:
            reason = _closer(reason, Reason.NO_SPACE)
        else:
            found.append(remote)
    return found, reason


def _closer(one: Reason, other: Reason) -> Reason:
    return max(one, other, key=_PROGRESS.index)
