"""The paper's scheduler (arXiv 2604.15039): a length threshold, solved anew as requests come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.candidates import MAX_PLAN, forbidden, not_worth, uncached_tokens, usable
from policies.estimate import queue_seconds, wire_bytes
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

BINS_PER_OCTAVE = 4
BINS = 18 * BINS_PER_OCTAVE
"""Incremental lengths are counted in steps of a quarter octave, up to 256K tokens."""
MEMORY = 512
"""Requests after which one counts 1/e."""
SOLVE_EVERY = 64
"""Requests between two solutions: the paper names no period."""
SCARCE_S = 0.5
"""Seconds of KV under way above which bandwidth counts as scarce: the paper names no limit."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """Recent incremental lengths, and the threshold solved on them; zero: not solved yet."""

    counts: tuple[float, ...] = (0.0,) * BINS
    seen: int = 0
    threshold_tokens: float = 0.0


class PaperScheduler:
    """Remote where the incremental length exceeds the threshold.

    The threshold balances remote and local prefill, in the paper's equations, over the lengths of
    recent requests and the bandwidth of now. With scarce bandwidth the length is what D lacks; with
    abundant bandwidth, what both lack. Until the first solution `threshold_tokens` holds.

    The paper lets the threshold react to a surge of the remote queue, and does not say how. Here it
    doubles for each `surge_s` by which the remote queue is longer than D's; 0 leaves that out.
    """

    name = "paper"

    def __init__(self, settings: PolicySettings) -> None:
        self._min_uncached_tokens = settings.min_uncached_tokens
        self._first_threshold = float(settings.threshold_tokens)
        self._surge_s = settings.surge_s

    def initial_state(self) -> Learnt:
        return Learnt(threshold_tokens=self._first_threshold)

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: Learnt) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        if reason is not None:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        remotes, reason = usable(request, snapshot)
        if not remotes:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        if len(remotes) > 1:
            remotes.sort(key=lambda remote: queue_seconds(remote.load, remote.curve))
        best = remotes[0]
        incremental = uncached
        if best.link.in_flight_bytes < SCARCE_S * best.link.goodput_bytes_per_s:
            longest = max(snapshot.local.matched_tokens, best.matched_tokens)
            incremental = max(0, request.prompt_tokens - 1 - longest)
        threshold = state.threshold_tokens
        if self._surge_s > 0:
            ahead = queue_seconds(best.load, best.curve)
            behind = queue_seconds(snapshot.local.load, snapshot.local.curve)
            if ahead > behind:
                threshold *= 2 ** min(20.0, (ahead - behind) / self._surge_s)
        if incremental <= threshold:
            return Decision(Target.LOCAL, Reason.BELOW_THRESHOLD, uncached_tokens=uncached)
        plan = tuple((r.peer, r.instance) for r in remotes[:MAX_PLAN])
        return Decision(Target.REMOTE, Reason.ABOVE_THRESHOLD, plan, uncached_tokens=uncached)

    def saw(self, state: Learnt, request: RequestFacts, snapshot: Snapshot) -> Learnt:
        """Count a request; every so often, solve the threshold anew."""
        return counted(state, uncached_tokens(request, snapshot), snapshot)

    def observe(self, state: Learnt, outcome: Outcome) -> Learnt:
        return state


def counted(state: Learnt, uncached: int, snapshot: Snapshot) -> Learnt:
    """`state` with one more request; every `SOLVE_EVERY` the threshold is solved anew."""
    at = min(BINS - 1, int(math.log2(max(1, uncached)) * BINS_PER_OCTAVE))
    # New ones weigh more instead of old ones less: one entry changes, not all.
    weight = math.exp((state.seen % MEMORY) / MEMORY)
    counts = [*state.counts]
    if state.seen and state.seen % MEMORY == 0:
        counts = [count / math.e for count in counts]
    counts[at] += weight
    seen = state.seen + 1
    threshold = None if seen % SOLVE_EVERY else solve(tuple(counts), snapshot)
    return Learnt(tuple(counts), seen, state.threshold_tokens if threshold is None else threshold)


def solve(counts: tuple[float, ...], snapshot: Snapshot) -> float | None:
    """The threshold at which the busiest of remote prefill, link and local prefill is least busy;
    None while curves or link are unknown."""
    local = snapshot.local
    remotes = [
        r
        for r in snapshot.remotes
        if r.ready and r.curve.known and r.link.goodput_bytes_per_s > 0
        and max(r.load.age_s, r.link.age_s) <= snapshot.max_age_s
    ]  # fmt: skip
    if not remotes or not local.curve.known:
        return None
    bins = [(2 ** ((at + 0.5) / BINS_PER_OCTAVE), n) for at, n in enumerate(counts) if n > 0]
    away = 0.0
    here = sum(n * local.curve.seconds(round(x)) for x, n in bins) / local.instances
    remote = remotes[0]
    instances = sum(r.instances for r in remotes)
    best = max(here, away)
    threshold = bins[-1][0] if bins else 0.0
    for at in range(len(bins) - 1, -1, -1):
        tokens, count = bins[at]
        here -= count * local.curve.seconds(round(tokens)) / local.instances
        away += count * _remote_s(snapshot, remote, instances, tokens)
        if max(here, away) < best:
            best = max(here, away)
            threshold = tokens * 2 ** (-0.5 / BINS_PER_OCTAVE)
    return threshold


def _remote_s(snapshot: Snapshot, remote: RemoteInstance, instances: int, tokens: float) -> float:
    compute = remote.curve.seconds(round(tokens)) / instances
    carried = wire_bytes(snapshot, remote, round(tokens)) + snapshot.state_bytes
    return max(compute, carried / remote.link.goodput_bytes_per_s)
