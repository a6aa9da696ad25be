"""What the gateway sees of the simulated sites: snapshots as old as telemetry makes them."""

from __future__ import annotations

import math
from collections import deque

from policies.prefix_cache import PrefixCache
from policies.scenario import Telemetry
from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.local import Local
from policies.simulator.peer import PeerSite
from policies.simulator.pool import Load
from policies.workload.request import Request
from prfaas.snapshot import (
    EngineLoad,
    LinkClass,
    LinkState,
    LocalEngine,
    RemoteInstance,
    Snapshot,
)

NEVER_S = 1e9
FREE_BYTES = 1 << 60
"""Staging or retention without bound."""
FALLBACK_TOKENS = 1 << 40


class _Sent:
    """What was sent to a place and no report shows that the gateway has."""

    __slots__ = ("_entries", "_under_way", "requests", "tokens", "wire_bytes")

    def __init__(self) -> None:
        self._under_way: dict[Job, tuple[int, float]] = {}
        """Tokens and wire bytes of what has not reached the place."""
        self._entries: dict[Job, tuple[float, int, float]] = {}
        """When each of the others reached it, and those; the oldest first."""
        self.requests = 0
        self.tokens = 0
        self.wire_bytes = 0.0

    def add(self, job: Job, tokens: int, wire_bytes: float) -> None:
        self.over(job)
        self._under_way[job] = tokens, wire_bytes
        self.requests += 1
        self.tokens += tokens
        self.wire_bytes += wire_bytes

    def reached(self, job: Job, at_s: float) -> None:
        """Reports from then on show it."""
        self._entries[job] = (at_s, *self._under_way.pop(job))

    def settle(self, until_s: float) -> bool:
        """Forget what a report of that time shows; whether that changed anything."""
        old = []
        for job, entry in self._entries.items():
            if entry[0] > until_s:
                break
            old.append(job)
        for job in old:
            self.over(job)
        return bool(old)

    def over(self, job: Job) -> bool:
        """Forget one that is known to be done; whether it was still counted."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return False
        _, tokens, wire_bytes = entry
        self.requests -= 1
        self.tokens -= tokens
        self.wire_bytes -= wire_bytes
        if not self.requests:
            self.wire_bytes = 0.0
        return True


Report = tuple[Load, tuple[tuple[Load, ...], ...], tuple[tuple[float, float], ...]]
"""D's load; for each peer its places' loads; for each peer link rate and bytes still to come."""


class View:
    """Takes reports at every interval and makes snapshots; nothing to close.

    Queues, links and batches are as old as the last report that has come through, to which what the
    gateway itself has sent since is added. Prefix matches are those of the moment.
    """

    def __init__(
        self, loop: EventLoop, telemetry: Telemetry, local: Local, peers: dict[str, PeerSite]
    ) -> None:
        self._loop = loop
        self._interval_s, self._delay_s = telemetry.interval_s, telemetry.delay_s
        self._settle_s = telemetry.settle_s
        self._max_age_s = telemetry.max_age_s
        self._local, self._peers = local, peers
        self._places = [
            (site, name, place) for site in peers.values() for name, place in site.places.items()
        ]
        self._at = {
            (site.spec.name, name): (index, at)
            for index, site in enumerate(peers.values())
            for at, name in enumerate(site.places)
        }
        self.matched: dict[str, int] = {}
        """Prefix match at each peer, of the request that the latest snapshot was for."""
        self._sent_local = _Sent()
        self._sent = {(site.spec.name, name): _Sent() for site, name, _ in self._places}
        self._coming: deque[tuple[float, Report]] = deque()
        self._next_tick = 0
        self._visible = self._report()
        self._fresh = dict.fromkeys(peers, 0.0)
        """When each peer was last heard of."""
        self._local_load: EngineLoad | None = None
        self._loads: dict[tuple[str, str], EngineLoad] = {}
        self._links: dict[str, LinkState] = {}
        self._local_instances = max(1, local.nodes()[0])
        self._token_bytes = local.profile.model.token_bytes
        self._state_bytes = local.profile.model.state_bytes

    def sent_local(self, job: Job) -> None:
        """The gateway sent a prompt to D's queue, which it reaches at once."""
        self._sent_local.add(job, job.uncached, 0.0)
        self._sent_local.reached(job, self._loop.now)
        self._local_load = None

    def sent_remote(self, job: Job) -> None:
        """The gateway sent a prompt to a peer."""
        self._sent[job.peer, job.instance].add(job, job.uncached, job.wire_bytes)
        self._loads.pop((job.peer, job.instance), None)
        self._links.pop(job.peer, None)

    def reached(self, job: Job) -> None:
        """It has come to the peer: what the peer reports from now on includes it."""
        self._sent[job.peer, job.instance].reached(job, self._loop.now)

    def left_local(self, job: Job) -> None:
        """It moved elsewhere, or its first token came: it is ahead of nobody there."""
        if self._sent_local.over(job):
            self._local_load = None

    def left_remote(self, job: Job) -> None:
        """It waits at its peer no more."""
        if self._sent[job.peer, job.instance].over(job):
            self._loads.pop((job.peer, job.instance), None)
            self._links.pop(job.peer, None)

    def run_until(self, now: float) -> None:
        """Let the simulation come to `now`, with reports taken on the way."""
        if self._interval_s > 0:
            self._tick(now)
        self._loop.run_until(now)

    def snapshot(self, request: Request, local_cached: int, staging_free: int) -> Snapshot:
        """Everything the policy may look at for this request, as of now."""
        if self._interval_s <= 0:
            self._show(self._report(), self._loop.now)
        load = self._local_load
        if load is None:
            load = self._local_load = self._engine_load(
                self._visible[0], self._sent_local, self._local_instances, 0.0
            )
        local = LocalEngine(
            "d",
            load,
            self._local.profile.curve,
            local_cached,
            staging_free,
            instances=self._local_instances,
        )
        remotes = []
        matched = self.matched = {}
        for site, name, place in self._places:
            peer = site.spec.name
            if peer not in matched:
                matched[peer] = site.cache.match(request.blocks, request.prompt_tokens)
            remotes.append(
                RemoteInstance(
                    peer,
                    name,
                    LinkClass.WAN,
                    self._remote_load(peer, name, place.pool.instances),
                    site.profile.curve,
                    matched[peer],
                    self._link_state(site),
                    min(place.free_bytes, FREE_BYTES),
                    site.up,
                    place.pool.instances,
                )
            )
        return Snapshot(
            local,
            tuple(remotes),
            self._token_bytes,
            self._max_age_s,
            FALLBACK_TOKENS,
            self._state_bytes,
        )

    def _tick(self, now: float) -> None:
        """Take the reports due by now; those that nobody could still see are passed over."""
        interval = self._interval_s
        last = math.floor(now / interval)
        if last >= self._next_tick:
            unseen = math.ceil(self._delay_s / interval)
            for tick in range(max(self._next_tick, last - unseen), last + 1):
                at = tick * interval
                self._loop.run_until(at)
                self._coming.append((at, self._report()))
            self._next_tick = last + 1
        shown: tuple[float, Report] | None = None
        while self._coming and self._coming[0][0] + self._delay_s <= now:
            shown = self._coming.popleft()
        if shown is not None:
            self._show(shown[1], shown[0])

    def _report(self) -> Report:
        return (
            self._local.report(),
            tuple(
                tuple(place.pool.report() for place in site.places.values())
                for site in self._peers.values()
            ),
            tuple(
                (
                    site.link.bytes_per_s,
                    max(0.0, site.dispatched_bytes - site.link.sent_now()),
                )
                for site in self._peers.values()
            ),
        )

    def _show(self, report: Report, taken_at: float) -> None:
        """A report has come through; a peer that is not heard keeps what it had."""
        before = self._visible
        if self._sent_local.settle(taken_at - self._settle_s) or report[0] != before[0]:
            self._local_load = None
        loads, links = list(before[1]), list(before[2])
        for index, site in enumerate(self._peers.values()):
            name = site.spec.name
            if not site.heard:
                self._loads = {k: v for k, v in self._loads.items() if k[0] != name}
                self._links.pop(name, None)
                continue
            self._fresh[name] = taken_at
            changed = report[2][index] != before[2][index]
            for at, instance in enumerate(site.places):
                settled = self._sent[name, instance].settle(taken_at)
                changed = changed or settled
                if settled or report[1][index][at] != before[1][index][at]:
                    self._loads.pop((name, instance), None)
            if changed:
                self._links.pop(name, None)
            loads[index], links[index] = report[1][index], report[2][index]
        self._visible = (report[0], tuple(loads), tuple(links))

    def _remote_load(self, peer: str, instance: str, instances: int) -> EngineLoad:
        load = self._loads.get((peer, instance))
        if load is None or load.age_s > 0:
            index, at = self._at[peer, instance]
            load = self._engine_load(
                self._visible[1][index][at],
                self._sent[peer, instance],
                instances,
                self._age_s(peer),
            )
            self._loads[peer, instance] = load
        return load

    def _link_state(self, site: PeerSite) -> LinkState:
        peer = site.spec.name
        state = self._links.get(peer)
        if state is None or state.age_s > 0:
            rate, to_come = self._visible[2][self._at[peer, next(iter(site.places))][0]]
            unshown = sum(self._sent[peer, name].wire_bytes for name in site.places)
            state = LinkState(
                rate,
                site.spec.link.rtt_ms / 1e3,
                0.0,
                int(to_come + unshown),
                site.wire_ratio,
                self._age_s(peer),
            )
            self._links[peer] = state
        return state

    def _age_s(self, peer: str) -> float:
        """How long a peer has not been heard; what is merely on its way counts as fresh."""
        if self._peers[peer].heard:
            return 0.0
        return self._loop.now - self._fresh[peer]

    @staticmethod
    def _engine_load(load: Load, sent: _Sent, instances: int, age_s: float) -> EngineLoad:
        """As of one of the instances behind a queue: its share of what was sent to all of them, and
        nothing while one of them is free."""
        tokens, waiting, running, context, step_s, free = load
        sent_tokens, sent_requests = sent.tokens, sent.requests
        if sent_requests < free:
            sent_tokens = sent_requests = 0
        elif instances > 1 and sent_requests:
            sent_tokens //= instances
            sent_requests = max(1, round(sent_requests / instances))
        return EngineLoad(
            queue_tokens=tokens,
            waiting=waiting,
            running=running,
            context_tokens=context,
            decode_step_s=step_s,
            sent_tokens=sent_tokens,
            sent_requests=sent_requests,
            age_s=age_s,
        )


def matched_at_d(cache: PrefixCache, request: Request) -> int:
    """Prompt tokens that D need not compute, the last one aside."""
    if not request.blocks:
        return min(request.cached_tokens, request.prompt_tokens - 1)
    return min(cache.match(request.blocks, request.prompt_tokens), request.prompt_tokens - 1)
