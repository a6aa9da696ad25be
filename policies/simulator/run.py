"""The simulation: requests in, decisions by a live policy object, rows out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from policies.prefix_cache import CacheSpec, PrefixCache
from policies.scenario import Fault, Profiles, Scenario
from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.late_binding import LateBinding
from policies.simulator.local import make_local
from policies.simulator.peer import PeerSite
from policies.simulator.result import Result, Row
from policies.simulator.view import FREE_BYTES, View, matched_at_d
from policies.workload.request import Request
from prfaas.errors import ConfigError
from prfaas.interfaces import LearningPolicy, RoutingPolicy
from prfaas.late_binding import BindsLate
from prfaas.profile import Profile, Vector
from prfaas.snapshot import Outcome, RequestFacts, Target

NEVER_S = 30 * 86400.0
"""Virtual time without any request finishing, after which none will."""


def simulate(
    scenario: Scenario,
    profiles: Profiles,
    requests: Iterable[Request],
    policy: RoutingPolicy[Any],
) -> Result:
    """Run a workload to its last token. The same inputs give the same result, to the byte.

    Raises ConfigError where there is no request, or a profile does not cover one.
    """
    return Simulation(scenario, profiles, policy).run(requests)


class Simulation:
    """Owns the sites of one run; nothing to close.

    A request is decided when it arrives. At D it is prefilled and decoded; at a peer it is
    prefilled while its KV crosses the link, imported, and decoded at D. What fails at a peer goes
    to the next place of its plan, then to D.
    """

    def __init__(self, scenario: Scenario, profiles: Profiles, policy: RoutingPolicy[Any]) -> None:
        self._scenario, self._profiles = scenario, profiles
        self._loop = EventLoop()
        self._policy = policy
        self._state = policy.initial_state()
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        self._cache = PrefixCache(CacheSpec.of(profiles.prefill.model, scenario.local.cache_tokens))
        self._local = make_local(
            self._loop,
            scenario.local,
            profiles,
            scenario.queue_order,
            self._start_local,
            self._prefilled_local,
            self._imported,
            self._first_token,
            self._finished,
        )
        self._peers = {
            peer.name: PeerSite(self._loop, peer, profiles.peers[peer.name], scenario, self._sent)
            for peer in scenario.peers
        }
        self._view = View(self._loop, scenario.telemetry, self._local, self._peers)
        self._token_bytes = profiles.prefill.model.token_bytes
        self._state_bytes = profiles.prefill.model.state_bytes
        staging = scenario.local.staging_gb
        self._staging = float(FREE_BYTES) if staging is None else staging * 1e9
        self._staging_free = self._staging
        self._staging_low = self._staging
        rate = scenario.local.import_gb_per_s
        self._import_s_per_byte = 0.0 if rate is None else 1 / (rate * 1e9)
        if isinstance(policy, BindsLate) and policy.move_gain_s is not None and self._peers:
            LateBinding(
                self._loop,
                self._local,
                self._peers,
                policy.move_gain_s,
                self._move_to_peer,
                self._move_to_local,
            )
        self._jobs: list[Job] = []
        self._finished_count = 0
        self._last_at = self._done_at = 0.0

    def run(self, requests: Iterable[Request]) -> Result:
        self._schedule_link_changes()
        for fault in self._scenario.faults:
            self._loop.at(fault.at_s, self._begin_fault, fault)
        covers = min(
            p.covers_tokens for p in (self._profiles.prefill, *self._profiles.peers.values())
        )
        for request in requests:
            if request.prompt_tokens > covers:
                self._refuse(request)
            self._view.run_until(request.arrival_s)
            self._arrive(request)
        if not self._jobs:
            raise ConfigError("the workload has no requests")
        while self._finished_count < len(self._jobs):
            self._loop.run_until(self._loop.now + 60.0)
            if self._loop.now > max(self._last_at, self._done_at) + NEVER_S:
                raise ConfigError("requests are left that nothing will ever finish")
        return self._result()

    # --- deciding -------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        job = Job(request, len(self._jobs))
        self._jobs.append(job)
        self._last_at = self._loop.now
        matched = matched_at_d(self._cache, request)
        snapshot = self._view.snapshot(request, matched, int(self._staging_free))
        facts = RequestFacts(str(request.number), request.prompt_tokens, request.output_tokens)
        decision = self._policy.decide(facts, snapshot, self._state)
        if self._learner is not None:
            self._state = self._learner.saw(self._state, facts, snapshot)
        job.reason = decision.reason
        job.uncached_d = max(0, job.want - matched)
        job.plan = decision.plan
        if decision.target is Target.REMOTE and not decision.plan:
            self._go_local(job, decision.reason.value)
        elif decision.plan:
            self._next_place(job, just_decided=True)
        else:
            self._go_local(job, "")

    def _next_place(self, job: Job, just_decided: bool = False) -> None:
        """Send it to the next instance of its plan that is up, or keep it at D.

        `just_decided`: the prefix matches of the latest snapshot are its own.
        """
        while job.tries < len(job.plan):
            peer, instance = job.plan[job.tries]
            job.tries += 1
            site = self._peers[peer]
            if not site.up:
                continue
            lacking = max(1, job.uncached_d)
            job.raw_bytes = self._token_bytes * lacking + self._state_bytes
            if job.raw_bytes > self._staging_free:
                self._go_local(job, "no_space")
                return
            self._staging_free -= job.raw_bytes
            self._staging_low = min(self._staging_low, self._staging_free)
            job.wire_bytes = site.wire_bytes(lacking)
            if just_decided:
                matched = self._view.matched[peer]
            else:
                matched = site.cache.match(job.request.blocks, job.request.prompt_tokens)
            job.cached = max(0, min(matched, job.want - 1))
            job.uncached = max(1, job.want - job.cached)
            job.computed = 0
            job.remote, job.peer, job.instance = True, peer, instance
            job.sent_at = self._loop.now
            self._view.sent_remote(job)
            self._local.ask(job, self._ask_peer)
            return
        self._go_local(job, "peer_down")

    def _go_local(self, job: Job, fallback: str, kept: int = 0) -> None:
        """D prefills it; `kept`: leading tokens it has KV of, from a transfer that ended early."""
        job.remote, job.fallback, job.kept = False, fallback, kept
        # What the cache has by now is looked up when its prefill starts.
        matched = max(kept, job.want - job.uncached_d)
        job.cached, job.computed = matched, 0
        job.uncached = max(1, job.want - matched)
        self._view.sent_local(job)
        self._local.put(job)

    # --- moving while it waits ------------------------------------------------------------------

    def _move_to_peer(self, job: Job, peer: str, instance: str) -> bool:
        """Take it out of D's queue and send it, unless its KV finds no room."""
        raw_bytes = self._token_bytes * max(1, job.uncached_d) + self._state_bytes
        if raw_bytes > self._staging_free:
            return False
        self._local.take(job)
        self._view.left_local(job)
        job.moves += 1
        job.plan, job.tries = ((peer, instance),), 0
        self._next_place(job)
        return True

    def _move_to_local(self, job: Job) -> None:
        """It has come back from a peer's queue."""
        self._view.left_remote(job)
        self._staging_free += job.raw_bytes
        job.moves += 1
        self._go_local(job, "")

    # --- at D -----------------------------------------------------------------------------------

    def _start_local(self, job: Job) -> None:
        if not job.computed:
            matched = max(matched_at_d(self._cache, job.request), job.kept)
            job.cached = min(matched, job.want - 1) if job.want > 1 else 0
            job.uncached = max(1, job.want - job.cached)

    def _prefilled_local(self, job: Job) -> None:
        self._cache.insert(job.request.blocks, job.request.prompt_tokens)

    def _first_token(self, job: Job, at_s: float) -> None:
        job.first_token_at = at_s
        if at_s <= self._loop.now:
            self._view.left_local(job)
        else:
            self._loop.at(at_s, self._view.left_local, job)

    def _finished(self, job: Job) -> None:
        self._finished_count += 1
        self._done_at = job.finished_at = self._loop.now

    # --- at a peer ------------------------------------------------------------------------------

    def _ask_peer(self, job: Job) -> None:
        link = self._peers[job.peer].spec.link
        reached_at = self._loop.now + link.rtt_ms / 2e3 + link.opening_ms / 1e3
        self._loop.at(reached_at, self._reach_peer, job)

    def _reach_peer(self, job: Job) -> None:
        self._view.reached(job)
        site = self._peers[job.peer]
        if not site.up:
            self._abandon(job, "peer_down", arrived=0.0)
            return
        site.send(job, job.instance)

    def _sent(self, job: Job) -> None:
        """The last byte left the peer."""
        site = self._peers[job.peer]
        for place in site.places.values():
            place.forget(job)
        half_s = site.spec.link.rtt_ms / 2e3
        import_s = job.raw_bytes * self._import_s_per_byte
        job.copied_s = import_s
        self._loop.at(self._loop.now + half_s + import_s, self._local.put_arrived, job)

    def _imported(self, job: Job) -> None:
        """D has its KV, which arrived and was copied by `decode_at`."""
        import_s = job.copied_s + (self._loop.now - job.decode_at)
        self._staging_free += job.raw_bytes
        self._cache.insert(job.request.blocks, job.request.prompt_tokens)
        self._state = self._policy.observe(
            self._state,
            Outcome(
                transfer_id=str(job.request.number),
                status="staged",
                peer=job.peer,
                have_tokens=job.want,
                want_tokens=job.want,
                received_tokens=job.uncached_d,
                remote_cached_tokens=job.cached,
                raw_bytes=int(job.raw_bytes),
                wire_bytes=int(job.wire_bytes),
                phases={
                    "queue": job.queue_s,
                    "remote_compute": job.done_at - job.started_at,
                    "transfer": job.decode_at - job.copied_s - job.started_at,
                    "import": import_s,
                    "total": self._loop.now - job.sent_at,
                },
            ),
        )

    def _abandon(self, job: Job, why: str, arrived: float) -> None:
        """A session ends early: on to the next place, or to D with the whole chunks that came."""
        self._staging_free += job.raw_bytes
        self._state = self._policy.observe(
            self._state,
            Outcome(str(job.request.number), "failed", reason=why, peer=job.peer),
        )
        chunk = self._peers[job.peer].profile.prefill.chunk_tokens
        kept = int(arrived * job.uncached_d) // chunk * chunk
        if job.tries < len(job.plan):
            self._next_place(job)
            return
        had = job.want - job.uncached_d
        self._go_local(job, why, had + kept if kept > 0 else 0)

    # --- what goes wrong ------------------------------------------------------------------------

    def _schedule_link_changes(self) -> None:
        for site in self._peers.values():
            link = site.spec.link
            usable = 1e9 / 8 * (1 - link.cross_traffic_share)
            for change in link.changes:
                self._loop.at(change.at_s, self._set_rate, (site, change.gbit_per_s * usable))
            if link.dips is not None:
                start = link.dips.every_s - link.dips.for_s
                self._loop.at(start, self._dip, (site, link.bytes_per_s * link.dips.to_share))

    def _set_rate(self, what: tuple[PeerSite, float]) -> None:
        site, rate = what
        site.usual_rate = rate
        self._apply_rate(site)

    def _apply_rate(self, site: PeerSite) -> None:
        site.link.set_rate(site.usual_rate if site.link_up else 0.0)
        if site.link.bytes_per_s <= 0 and len(site.link):
            self._watch(site)

    def _dip(self, what: tuple[PeerSite, float]) -> None:
        site, low = what
        dips = site.spec.link.dips
        assert dips is not None
        self._set_rate((site, low))
        now = self._loop.now
        self._loop.at(now + dips.for_s, self._set_rate, (site, site.spec.link.bytes_per_s))
        self._loop.at(now + dips.every_s, self._dip, (site, low))

    def _watch(self, site: PeerSite) -> None:
        self._loop.at(
            self._loop.now + self._scenario.progress_timeout_s, self._look_for_stalled, site
        )

    def _look_for_stalled(self, site: PeerSite) -> None:
        """Transfers on a link that moves nothing are given up after the progress timeout."""
        if site.link.bytes_per_s > 0:
            return
        limit = self._loop.now - self._scenario.progress_timeout_s + 1e-9
        for flow in site.link.flows():
            if flow.sealed and site.link.progress_at <= limit:
                self._abandon(flow.job, "stalled", site.give_up(flow.job))
        if len(site.link):
            self._watch(site)

    def _begin_fault(self, fault: Fault) -> None:
        site = self._peers[fault.peer]
        if fault.kind == "peer_down":
            for job in site.fail():
                self._abandon(job, "peer_down", site.give_up(job))
        elif fault.kind == "link_down":
            site.link_up = False
            self._apply_rate(site)
        elif fault.kind == "telemetry_lost":
            site.heard = False
        else:
            for place in site.places.values():
                place.pool.factor = fault.factor
        self._loop.at(fault.at_s + fault.for_s, self._end_fault, fault)

    def _end_fault(self, fault: Fault) -> None:
        site = self._peers[fault.peer]
        if fault.kind == "peer_down":
            site.up = True
        elif fault.kind == "link_down":
            site.link_up = True
            self._apply_rate(site)
        elif fault.kind == "telemetry_lost":
            site.heard = True
        else:
            for place in site.places.values():
                place.pool.factor = 1.0

    # --- results --------------------------------------------------------------------------------

    def _refuse(self, request: Request) -> None:
        for profile in (self._profiles.prefill, *self._profiles.peers.values()):
            try:
                profile.require_covers(request.prompt_tokens)
            except ConfigError as error:
                raise ConfigError(f"request {request.number}: {error.message}") from error

    def _result(self) -> Result:
        span = max(self._done_at, 1e-9)
        prefill_s, decode_s = self._local.busy_s()
        prefilling, decoding = self._local.nodes()
        slots = max(1, decoding * self._profiles.decode.decode.max_batch)
        used = {
            "local_prefill": prefill_s / (span * prefilling) if prefilling else 0.0,
            "decode": decode_s / (span * slots),
        }
        egress = 0.0
        for name, site in self._peers.items():
            sent = site.link.sent_now()
            egress += sent
            used[f"{name}.prefill"] = site.busy_s() / (span * site.spec.instances)
            used[f"{name}.link"] = sent / (span * site.spec.link.bytes_per_s)
        return Result(
            self._policy.name,
            [self._row(job) for job in self._jobs],
            self._fastest_s(),
            used,
            egress,
            self._loop.fired,
            self._staging - self._staging_low,
        )

    def _row(self, job: Job) -> Row:
        request, answer = job.request, job.request.output_tokens
        ttft_s = job.first_token_at - request.arrival_s
        decode_s = job.first_token_at - (job.decode_at if job.decode_at == job.decode_at else 0.0)
        queue_s = job.queue_s
        transfer_s = ttft_s - queue_s - job.prefill_s - decode_s
        if not job.remote and not job.fallback:
            # Steps of others between its chunks: D's queue, not a transfer.
            queue_s, transfer_s = queue_s + transfer_s, 0.0
        return Row(
            request.number,
            request.arrival_s,
            request.prompt_tokens,
            job.uncached_d,
            ttft_s,
            queue_s,
            job.prefill_s,
            transfer_s,
            decode_s,
            job.remote,
            job.reason.value,
            job.fallback,
            job.moves,
            (job.finished_at - job.first_token_at) / (answer - 1) if answer > 1 else 0.0,
        )

    def _fastest_s(self) -> list[float]:
        """TTFT of each request alone, on the site that would be fastest, with what D had cached."""
        uncached = np.array([max(1, job.uncached_d) for job in self._jobs], dtype=float)
        cached = np.array([max(0, job.want - max(1, job.uncached_d)) for job in self._jobs])
        prompts = np.array([job.request.prompt_tokens for job in self._jobs])
        best = _alone_s(self._profiles.prefill, uncached, cached)
        for site in self._peers.values():
            link, model = site.spec.link, site.profile.model
            carried = model.token_bytes * uncached / site.wire_ratio + model.state_bytes
            compute = _alone_s(site.profile, uncached, cached)
            away = link.rtt_ms / 1e3 + np.maximum(compute, carried / link.bytes_per_s)
            best = np.minimum(best, away)
        decode = self._profiles.decode
        steps = [decode.step_s(1, tokens) for tokens in prompts.tolist()]
        found: list[float] = (best + np.array(steps)).tolist()
        return found


def _alone_s(profile: Profile, uncached: Vector, cached: Vector) -> Vector:
    return profile.time_scale * profile.prefill.seconds_of(uncached, cached)


def with_rate(scenario: Scenario, rate_per_s: float) -> Scenario:
    """The same scenario with its generated workload at another rate."""
    arrivals = scenario.workload.arrivals.model_copy(update={"rate_per_s": rate_per_s})
    workload = scenario.workload.model_copy(update={"arrivals": arrivals})
    return scenario.model_copy(update={"workload": workload})
