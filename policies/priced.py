"""Our policy: estimated TTFT of every place, corrected by what a request takes from others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from policies.candidates import MAX_PLAN, forbidden, not_worth, usable
from policies.estimate import Parts, arrival_seconds, as_estimate, local_estimate, remote_parts
from policies.least_ttft import ImportCost, learn_import
from policies.paper import SOLVE_EVERY, Learnt, counted
from prfaas.settings import PolicySettings
from prfaas.snapshot import (
    Decision,
    EngineLoad,
    Estimate,
    Outcome,
    Reason,
    RemoteInstance,
    RequestFacts,
    Snapshot,
    Target,
)

BUSY_MEMORY = 1 / 128
"""Weight of one request in the share that found a site busy."""
DEAD_BAND = 0.1
"""A new solution of the threshold that differs by less changes nothing."""
LINK_SHARE = 0.8
"""Of a link, what the threshold may fill. Transfers share it, so they wait long before it is full,
when a pool of nodes at the same load hardly lets anyone wait."""
AVERAGE_MEMORY = 1 / 32
"""Weight of one request in what requests take on average."""
REOPEN_SHARE = 0.5
"""Of the link budget: what must be left under way before a closed link opens again."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What the policy has learnt; small and frozen."""

    learnt: Learnt = field(default_factory=Learnt)
    """Recent incremental lengths and the latest solution."""
    threshold_tokens: float = 0.0
    """The solution in force; zero until there is one, which gives lengths no price."""
    local_busy: float = 0.0
    """Share of recent requests that would have waited at D."""
    remote_busy: float = 0.0
    """Share of recent requests that would have waited at every peer."""
    raw_bytes: float = 0.0
    """KV of recent prompts longer than the threshold, on average; zero: none yet."""
    local_s: float = 0.0
    """Prefill at D of recent prompts shorter than the threshold, on average; zero: none yet."""
    closed: tuple[str, ...] = ()
    """Peers whose link is over budget."""
    imports: ImportCost = field(default_factory=ImportCost)


class Priced:
    """Goes to the place of the lowest price, in seconds of TTFT.

    The price of a place is its estimated TTFT, and remote also

    - the length price: `length_price_s` x ln(threshold / uncached tokens). The threshold is solved
      as the paper's policy does, over links that carry `LINK_SHARE` of what they can; at it, both
      sites are equally loaded. A prompt that is shorter leaves only for a gain, a longer one also
      at a loss. Where nobody waits at the site that this protects, up to `busy_share` of it falls
      away, and nothing is sent at a loss while D has no queue: so small loads are served where
      they are served sooner.
    - the link price: its seconds alone on the link, for each transfer that will still be under way
      there when its own begins (their bytes over those of the average prompt that leaves), times
      `link_weight`. So much longer do the others take. It follows the load, and the rate of a link
      that drops.

    D's price has the same of its own queue: the prompt's prefill seconds for each prompt of the
    average that is ahead, times `queue_weight`.

    What all these come to costs a prompt at most `loss_share` of its TTFT where that is shortest:
    it may give way to others, but is not sacrificed for them. `egress_s_per_gb` for each gigabyte
    on the wire comes on top.

    A peer is left out while the bytes on its link exceed `link_budget_s`, and returns when half of
    that is left; one whose KV does not fit D's staging with headroom is left out too. Unknown or
    stale inputs keep a request at D, and change nothing that was learnt.
    """

    name = "priced"

    def __init__(self, settings: PolicySettings) -> None:
        self._min_uncached_tokens = settings.min_uncached_tokens
        self._remote_margin = settings.remote_margin
        self._length_price_s = settings.length_price_s
        self._busy_share = settings.busy_share
        self._link_weight = settings.link_weight
        self._queue_weight = settings.queue_weight
        self._loss_share = settings.loss_share
        self._egress_s_per_byte = settings.egress_s_per_gb / 1e9
        self._link_budget_s = settings.link_budget_s
        self._staging_headroom = settings.staging_headroom
        self.move_gain_s = settings.move_gain_s
        """Late binding: what a waiting request must gain to move; None: it stays."""

    def initial_state(self) -> Prices:
        return Prices()

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: Prices) -> Decision:
        here = snapshot.local
        uncached = request.prompt_tokens - 1 - here.matched_tokens
        if uncached < 0:
            uncached = 0
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        if reason is not None:
            return Decision(Target.LOCAL, reason, (), (), uncached)
        local = local_estimate(request, snapshot)
        if local is None:
            return Decision(Target.LOCAL, Reason.UNMEASURED, (), (), uncached)
        local = _first_free_local(local, here.load, here.instances)
        remotes, reason = usable(request, snapshot)
        need_bytes = snapshot.token_bytes * uncached + snapshot.state_bytes
        if remotes and need_bytes * self._staging_headroom > here.free_staging_bytes:
            remotes, reason = [], Reason.NO_SPACE
        if remotes and self._over_budget(remotes, state):
            remotes = [r for r in remotes if not self._closed(r, state)]
            reason = Reason.NO_BUDGET
        if not remotes:
            return Decision(Target.LOCAL, reason, (), (local,), uncached)
        ranked: list[tuple[float, int, Parts]] = []
        decode_s, import_s = arrival_seconds(request, snapshot), state.imports.s_per_byte
        leaving_s = self._length_s(uncached, local.queue_s, state)
        if state.local_s > 0:
            leaving_s -= self._queue_weight * local.prefill_s * local.queue_s / state.local_s
        for at, remote in enumerate(remotes):
            parts = remote_parts(request, snapshot, remote, decode_s, import_s)
            wire_bytes = _on_wire(need_bytes, snapshot.state_bytes, remote)
            if parts[1] > 0 and remote.instances > 1:
                parts = _first_free(parts, remote, wire_bytes, import_s * need_bytes)
            away_s = parts[0]
            price_s = leaving_s + self._link_s(wire_bytes, parts[1], remote, snapshot, state)
            most_s = self._loss_share * (away_s if away_s < local.ttft_s else local.ttft_s)
            price_s = most_s if price_s > most_s else -most_s if price_s < -most_s else price_s
            ranked.append((away_s + price_s + self._egress_s_per_byte * wire_bytes, at, parts))
        ranked.sort()
        limit_s = local.ttft_s * (1 - self._remote_margin)
        ranked = ranked[:MAX_PLAN]
        estimates = (local, *[as_estimate(remotes[at], parts) for _, at, parts in ranked])
        away_s = ranked[0][2][0]
        if ranked[0][0] >= limit_s:
            reason = Reason.LOCAL_FASTER if away_s >= limit_s else Reason.LOCAL_CHEAPER
            return Decision(Target.LOCAL, reason, (), estimates, uncached)
        plan = tuple(
            [
                (remotes[at].peer, remotes[at].instance)
                for cost_s, at, _ in ranked
                if cost_s < limit_s
            ]
        )
        reason = Reason.REMOTE_FASTER if away_s < local.ttft_s else Reason.REMOTE_CHEAPER
        return Decision(Target.REMOTE, reason, plan, estimates, uncached)

    def saw(self, state: Prices, request: RequestFacts, snapshot: Snapshot) -> Prices:
        """Count a request: lengths, who would have waited, and links over budget."""
        local = snapshot.local
        if local.load.age_s > snapshot.max_age_s:
            return state
        uncached = max(0, request.prompt_tokens - 1 - local.matched_tokens)
        solves = (state.learnt.seen + 1) % SOLVE_EVERY == 0
        learnt = counted(state.learnt, uncached, _narrower(snapshot) if solves else snapshot)
        threshold, before = learnt.threshold_tokens, state.threshold_tokens
        if before > 0 and abs(threshold - before) < DEAD_BAND * before:
            threshold = before
        heard = [
            r
            for r in snapshot.remotes
            if r.ready and max(r.load.age_s, r.link.age_s) <= snapshot.max_age_s
        ]
        remote_busy = state.remote_busy
        if heard:
            waits = all(r.load.queue_tokens + r.load.sent_tokens > 0 for r in heard)
            remote_busy += BUSY_MEMORY * (waits - remote_busy)
        waits = local.load.queue_tokens + local.load.sent_tokens > 0
        raw_bytes, local_s = self._averages(state, uncached, snapshot)
        return replace(
            state,
            learnt=learnt,
            threshold_tokens=threshold,
            local_busy=state.local_busy + BUSY_MEMORY * (waits - state.local_busy),
            remote_busy=remote_busy,
            raw_bytes=raw_bytes,
            local_s=local_s,
            closed=tuple(sorted({r.peer for r in snapshot.remotes if self._closed(r, state)})),
        )

    def observe(self, state: Prices, outcome: Outcome) -> Prices:
        """Learn what an import costs."""
        imports = learn_import(state.imports, outcome)
        return state if imports is state.imports else replace(state, imports=imports)

    @staticmethod
    def _averages(state: Prices, uncached: int, snapshot: Snapshot) -> tuple[float, float]:
        """`raw_bytes` and `local_s` after one more request; the same before the first solution."""
        raw_bytes, local_s, local = state.raw_bytes, state.local_s, snapshot.local
        if state.threshold_tokens <= 0:
            return raw_bytes, local_s
        if uncached > state.threshold_tokens:
            one = float(snapshot.token_bytes * uncached + snapshot.state_bytes)
            return _averaged(raw_bytes, one), local_s
        if not local.curve.known:
            return raw_bytes, local_s
        return raw_bytes, _averaged(local_s, local.curve.seconds(uncached, local.matched_tokens))

    def _link_s(
        self,
        wire_bytes: float,
        queue_s: float,
        remote: RemoteInstance,
        snapshot: Snapshot,
        state: Prices,
    ) -> float:
        """How much longer the prompt's KV makes others wait on the link, in all."""
        link, goodput = remote.link, remote.link.goodput_bytes_per_s
        left_bytes = link.in_flight_bytes - queue_s * goodput
        if left_bytes <= 0 or state.raw_bytes <= snapshot.state_bytes:
            return 0.0
        transfers = left_bytes / _on_wire(state.raw_bytes, snapshot.state_bytes, remote)
        return self._link_weight * wire_bytes / goodput * transfers

    def _length_s(self, uncached: int, local_queue_s: float, state: Prices) -> float:
        """The length price of leaving: negative where a prompt should leave even at a loss."""
        if state.threshold_tokens <= 0 or not self._length_price_s:
            return 0.0
        price_s = self._length_price_s * math.log(state.threshold_tokens / uncached)
        if price_s < 0:
            if local_queue_s <= 0:
                return 0.0
            busy = state.local_busy
        else:
            busy = state.remote_busy
        return price_s * (1 - self._busy_share * (1 - busy))

    def _over_budget(self, remotes: list[RemoteInstance], state: Prices) -> bool:
        if state.closed:
            return True
        budget_s = self._link_budget_s
        for remote in remotes:
            link = remote.link
            if link.in_flight_bytes > budget_s * link.goodput_bytes_per_s:
                return True
        return False

    def _closed(self, remote: RemoteInstance, state: Prices) -> bool:
        share = REOPEN_SHARE if remote.peer in state.closed else 1.0
        link = remote.link
        return link.in_flight_bytes > share * self._link_budget_s * link.goodput_bytes_per_s


def _on_wire(raw_bytes: float, state_bytes: int, remote: RemoteInstance) -> float:
    ratio = remote.link.wire_ratio
    return (raw_bytes - state_bytes) / (ratio if ratio > 1e-9 else 1e-9) + state_bytes


def _first_free_share(load: EngineLoad, instances: int) -> float:
    """Of the wait for an average engine of those behind one queue: until the first comes free.

    What each has begun ends at another time, the first a share of `instances` into it."""
    prompts = load.waiting + load.sent_requests
    return 1 - (1 - 1 / instances) / prompts if prompts > 0 else 1.0


def _first_free_local(local: Estimate, load: EngineLoad, instances: int) -> Estimate:
    if local.queue_s <= 0 or instances <= 1:
        return local
    queue_s = local.queue_s * _first_free_share(load, instances)
    return replace(local, queue_s=queue_s, ttft_s=local.ttft_s - local.queue_s + queue_s)


def _first_free(parts: Parts, remote: RemoteInstance, wire_bytes: float, import_s: float) -> Parts:
    """The estimate with the queue until the first engine comes free; the link may bind then."""
    ttft_s, queue_s, prefill_s, _, decode_s, uncached = parts
    link, goodput = remote.link, remote.link.goodput_bytes_per_s
    first_s = queue_s * _first_free_share(remote.load, remote.instances)
    carried_s = max(link.in_flight_bytes / goodput, first_s) + wire_bytes / goodput + import_s
    arrived_s = max(carried_s, ttft_s - link.rtt_s - decode_s - (queue_s - first_s))
    transfer_s = arrived_s - first_s - prefill_s
    return link.rtt_s + arrived_s + decode_s, first_s, prefill_s, transfer_s, decode_s, uncached


def _averaged(average: float, one: float) -> float:
    return average + AVERAGE_MEMORY * (one - average) if average > 0 else one


def _narrower(snapshot: Snapshot) -> Snapshot:
    """As if links carried no more than they do without much waiting."""
    return replace(
        snapshot,
        remotes=tuple(
            replace(
                remote,
                link=replace(
                    remote.link,
                    goodput_bytes_per_s=LINK_SHARE * remote.link.goodput_bytes_per_s,
                ),
            )
            for remote in snapshot.remotes
        ),
    )
