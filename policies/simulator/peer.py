"""A peer in the simulator: prefill instances, prefix cache, retention, and the link to D."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policies.prefix_cache import CacheSpec, PrefixCache
from policies.scenario import Peer, QueueOrder, Scenario
from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.link import Flow, SharedLink
from policies.simulator.order import order_key, preempts
from policies.simulator.pool import PrefillPool
from prfaas.profile import Profile

POOL = "pool"
"""Name of the one instance that policies see of a peer with a central queue."""


class PeerSite:
    """Owns everything at one peer and its link; nothing to close."""

    def __init__(
        self,
        loop: EventLoop,
        spec: Peer,
        profile: Profile,
        scenario: Scenario,
        on_sent: Callable[[Job], None],
    ) -> None:
        self.spec, self.profile = spec, profile
        self.wire_ratio = profile.wire_ratio(scenario.quality)
        self._state_bytes = float(profile.model.state_bytes)
        self._token_bytes = profile.model.token_bytes / self.wire_ratio
        self._layers = profile.model.layers
        self._chunk_tokens = profile.prefill.chunk_tokens
        self._loop = loop
        self.cache = PrefixCache(CacheSpec.of(profile.model, spec.cache_tokens))
        self.link = SharedLink(loop, spec.link.bytes_per_s, on_sent)
        self.usual_rate = spec.link.bytes_per_s
        """Of the link, while it is up."""
        self.link_up = True
        self.up = True
        self.heard = True
        """Its telemetry reaches the gateway."""
        self.dispatched_bytes = 0.0
        """Wire bytes of all sessions ever begun, less what was given up."""
        each = 1 if not spec.central_queue else spec.instances
        count = spec.instances if not spec.central_queue else 1
        names = [POOL] if spec.central_queue else [f"{i}" for i in range(count)]
        limit = None if spec.retention_gb is None else spec.retention_gb * 1e9 * each
        self.places = {
            name: _Place(self, name, each, limit, scenario.queue_order) for name in names
        }

    def wire_bytes(self, tokens: float) -> float:
        """What the KV of so many tokens weighs on the link, the fixed state with it."""
        return self.profile.model.wire_bytes(tokens, self.wire_ratio)

    def send(self, job: Job, instance: str) -> None:
        """A session begins here, half a round trip after it was decided."""
        self.dispatched_bytes += job.wire_bytes
        flow = Flow(job, job.wire_bytes)
        job.flow = flow
        self.places[instance].put(job)

    def give_up(self, job: Job) -> float:
        """A session ends early; share of its tokens whose KV has arrived."""
        flow = job.flow
        assert isinstance(flow, Flow)
        left = self.link.drop(flow)
        self.dispatched_bytes -= left
        for place in self.places.values():
            place.forget(job)
        tokens = job.wire_bytes - self._state_bytes
        return max(0.0, 1 - left / tokens) if tokens > 0 else 0.0

    def fail(self) -> Iterator[Job]:
        """All instances stop at once: what was under way, KV not yet sent among it."""
        self.up = False
        lost: list[Job] = []
        for place in self.places.values():
            lost.extend(place.pool.fail())
        known = set(lost)
        lost.extend(flow.job for flow in self.link.flows() if flow.job not in known)
        self.cache.clear()
        lost.sort(key=_order)
        yield from lost

    def busy_s(self) -> float:
        return sum(place.pool.busy_s for place in self.places.values())

    def stream_bytes(self, job: Job, tokens: int) -> float:
        """Bytes that can leave while `tokens` are being computed: of what D lacks, all but the last
        layer of the last chunk."""
        lacking = min(job.uncached, job.uncached_d) / job.uncached
        tail = min(tokens, self._chunk_tokens) / self._layers
        return self._token_bytes * lacking * (tokens - tail)

    def ready_bytes(self, job: Job) -> float:
        """Bytes that can leave before anything is computed: what the peer has and D lacks."""
        return self._token_bytes * max(0, job.uncached_d - job.uncached)


class _Place:
    """One queue of a peer with its instances and their retention."""

    def __init__(
        self, site: PeerSite, name: str, instances: int, limit: float | None, order: QueueOrder
    ) -> None:
        self.name = name
        self._site = site
        self._limit = limit
        self._held: dict[Job, float] = {}
        self.held_bytes = 0.0
        self.pool = PrefillPool(
            site._loop,
            site.profile,
            instances,
            order_key(order),
            preempts(order),
            self._start,
            self._done,
            self._pause,
            self._may_start if limit is not None else None,
        )

    @property
    def free_bytes(self) -> int:
        return 1 << 62 if self._limit is None else int(max(0.0, self._limit - self.held_bytes))

    def put(self, job: Job) -> None:
        self.pool.put(job)

    def forget(self, job: Job) -> None:
        """Its KV need not be kept any more."""
        held = self._held.pop(job, 0.0)
        if held:
            self.held_bytes -= held
            self.pool.kick()

    def _may_start(self, job: Job) -> bool:
        """Room to keep all of its KV; one that exceeds everything goes alone."""
        assert self._limit is not None
        return self.held_bytes == 0 or self.held_bytes + job.wire_bytes <= self._limit

    def _start(self, job: Job) -> None:
        site, flow = self._site, job.flow
        assert isinstance(flow, Flow)
        if not job.computed:
            matched = site.cache.match(job.request.blocks, job.request.prompt_tokens)
            job.cached = min(matched, job.want - 1) if job.want > 1 else 0
            job.uncached = max(1, job.want - job.cached)
            if self._limit is not None:
                self._held[job] = job.wire_bytes
                self.held_bytes += job.wire_bytes
            site.link.open(flow)
            flow.backlog = site.ready_bytes(job)
        left = job.uncached - job.computed
        tokens = min(left, site._chunk_tokens) if self.pool._preemptive else left
        seconds = site.profile.prefill_s(tokens, job.cached + job.computed) * self.pool.factor
        site.link.making(flow, min(flow.left, site.stream_bytes(job, tokens)), seconds)

    def _pause(self, job: Job) -> None:
        flow = job.flow
        assert isinstance(flow, Flow)
        self._site.link.pause(flow)

    def _done(self, job: Job) -> None:
        site, flow = self._site, job.flow
        assert isinstance(flow, Flow)
        site.cache.insert(job.request.blocks, job.request.prompt_tokens)
        site.link.seal(flow)


def _order(job: Job) -> int:
    return job.order
