"""Where a request that waits would come sooner: pure functions over one snapshot.

The rules are those of the simulator (`policies/simulator/late_binding.py`), by the estimates of the
policy that decided first: it leaves out what it holds to be unusable, too old, or over budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from prfaas.late_binding import FLOW_PRICE, LINK_PRICE, LOCAL
from prfaas.snapshot import (
    Decision,
    EngineLoad,
    PrefillCurve,
    Reason,
    RemoteInstance,
    RequestFacts,
    Snapshot,
    Target,
)

Decide = Callable[[RequestFacts, Snapshot], Decision]
"""The policy, with the state that it has now."""


@dataclass(frozen=True, slots=True)
class Better:
    """A place where a request would come sooner than where it waits."""

    decision: Decision
    snapshot: Snapshot
    stay_s: float
    go_s: float

    @property
    def gain_s(self) -> float:
        return self.stay_s - self.go_s


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a request still waits for at its place."""

    tokens: int
    prompts: int


def is_idle(load: EngineLoad, max_age_s: float) -> bool:
    """Known to have no prompt to prefill, nothing on its way there either."""
    return (
        load.age_s <= max_age_s
        and not load.draining
        and load.queue_tokens + load.sent_tokens <= 0
        and load.waiting <= 0
    )


def idle_peers(snapshot: Snapshot) -> list[RemoteInstance]:
    """Those that could take something at once."""
    return [r for r in snapshot.remotes if r.ready and is_idle(r.load, snapshot.max_age_s)]


def better_at_a_peer(
    facts: RequestFacts,
    snapshot: Snapshot,
    ahead: Ahead,
    decide: Decide,
    flows: Mapping[str, int],
    taken: Collection[str] = (),
) -> Better | None:
    """The idle instance that gains most for a request which waits at D behind `ahead`.

    `flows`: transfers under way, by peer. `taken`: instances that are promised to others.
    """
    local = snapshot.local
    behind = replace(snapshot, local=replace(local, load=_behind(local.load, ahead)))
    decided = decide(facts, behind)
    here = decided.estimate(LOCAL)
    best: Better | None = None
    if here is None:
        return None
    for remote in idle_peers(snapshot):
        where = f"{remote.peer}/{remote.instance}"
        there = decided.estimate(where)
        if there is None or where in taken:
            continue
        price = LINK_PRICE + FLOW_PRICE * flows.get(remote.peer, 0)
        go_s = there.ttft_s + price * link_seconds(facts, snapshot, remote)
        if best is None or here.ttft_s - go_s > best.gain_s:
            plan = ((remote.peer, remote.instance),)
            reason, tokens = Reason.REMOTE_FASTER, decided.uncached_tokens
            decision = Decision(Target.REMOTE, reason, plan, decided.estimates, tokens)
            best = Better(decision, snapshot, here.ttft_s, go_s)
    return best


def better_at_d(
    facts: RequestFacts,
    snapshot: Snapshot,
    remote: RemoteInstance,
    ahead: Ahead,
    decide: Decide,
    flows: int,
) -> Better | None:
    """What a request that waits at `remote` behind `ahead` gains at D, which stands idle; None
    where one of the two cannot be estimated. `flows`: other transfers under way from that peer.
    """
    decided = decide(facts, snapshot)
    there = decided.estimate(LOCAL)
    link, max_age_s = remote.link, snapshot.max_age_s
    if there is None or link.goodput_bytes_per_s <= 0 or not remote.curve.known:
        return None
    if max(link.age_s, remote.load.age_s) > max_age_s:
        return None
    want = facts.prompt_tokens - 1
    queue_s = _queue_seconds(remote.curve, ahead)
    cached = min(remote.matched_tokens, want)
    compute_s = remote.curve.seconds(want - cached, cached)
    own_s = link_seconds(facts, snapshot, remote)
    state_s = snapshot.state_bytes / link.goodput_bytes_per_s
    ahead_s = max(0.0, link.in_flight_bytes / link.goodput_bytes_per_s - own_s)
    half_s = link.rtt_s / 2
    stay_s = (
        half_s
        + max(queue_s + compute_s + state_s, max(queue_s, ahead_s) + own_s)
        + there.decode_s
        + FLOW_PRICE * flows * own_s
    )
    decision = Decision(
        Target.LOCAL, Reason.LOCAL_FASTER, (), decided.estimates, decided.uncached_tokens
    )
    return Better(decision, snapshot, stay_s, half_s + there.ttft_s)


def link_seconds(facts: RequestFacts, snapshot: Snapshot, remote: RemoteInstance) -> float:
    """That its KV takes alone on the link."""
    lacking = max(1, facts.prompt_tokens - 1 - snapshot.local.matched_tokens)
    wire_bytes = snapshot.token_bytes * lacking / max(remote.link.wire_ratio, 1e-9)
    return (wire_bytes + snapshot.state_bytes) / max(remote.link.goodput_bytes_per_s, 1e-9)


def _behind(load: EngineLoad, ahead: Ahead) -> EngineLoad:
    """A queue that consists of what is ahead of one request."""
    return replace(
        load, queue_tokens=ahead.tokens, waiting=ahead.prompts, sent_tokens=0, sent_requests=0
    )


def _queue_seconds(curve: PrefillCurve, ahead: Ahead) -> float:
    """Attention costs grow with each prompt's own length, not with that of the queue."""
    prompts = max(1, ahead.prompts)
    return prompts * curve.seconds(round(ahead.tokens / prompts))
