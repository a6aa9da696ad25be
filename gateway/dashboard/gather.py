"""The state of a gateway as the dashboard shows it, gathered from its parts in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from gateway.admission import Admission
from gateway.breakers import BreakerInfo
from gateway.cluster_view import NEVER, ClusterView, Feed, place_of
from gateway.dashboard.messages import (
    Latency,
    Link,
    Place,
    Policy,
    Samples,
    Saved,
    Shadowing,
    Share,
    State,
    Together,
)
from gateway.engines import Engine, Engines
from gateway.live_policy import ACTIVE, CANARY, LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.records import RecordBook, RequestRecord
from gateway.state.metrics import StateSource
from prfaas.clock import Clock
from prfaas.settings import GatewaySettings, PeerEndpoint
from prfaas.snapshot import PrefillCurve

WINDOW_S = 300.0
WINDOW_REQUESTS = 400
"""Percentiles and shares are of so many requests at most, and not of older ones."""
GAPS_OF_ONE = 32
"""Samples of ITL that are taken of one request, evenly."""
TARGETS = ("local", "remote")
CURVE_TOKENS = 4096
MAX_STATE_FIELDS = 12
MAX_TEXT = 200

Breakers = dict[tuple[str, str], BreakerInfo]


@dataclass(frozen=True, slots=True)
class Sources:
    """The parts that are looked at; borrowed."""

    settings: GatewaySettings
    view: ClusterView
    engines: Engines
    records: RecordBook
    metrics: GatewayMetrics
    policy: LivePolicy
    admission: Admission
    clock: Clock
    stale_s: float
    state: StateSource | None = None


class Gatherer:
    """Makes a State; owns nothing but the time it was made."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._began = sources.clock.now()

    def state(self) -> State:
        """As of now."""
        sources = self._sources
        now = sources.clock.now()
        breakers: Breakers = {(b.what, b.name): b for b in sources.view.breakers.infos()}
        recent = list(_recent(sources.records, now))
        decisions = _counts(sources.metrics.decisions)
        reasons = [(target, why, int(n)) for (target, why), n in decisions.items()]
        return State(
            at=sources.clock.wall(),
            up_s=now - self._began,
            status=self._status(),
            in_flight=sources.admission.in_flight,
            decided=sum(count for _, _, count in reasons),
            window_s=WINDOW_S,
            engines=[self._engine(engine, breakers, now) for engine in sources.engines],
            instances=[self._instance(peer, breakers, now) for peer in sources.view.peers],
            links=list(self._links(breakers)),
            latency=latencies(_samples(recent)),
            share=_share(recent),
            saved=self._saved(),
            reasons=sorted(reasons, key=lambda each: -each[2]),
            policies=list(self._policies()),
            shadow=self._shadow(),
            together=together(sources.state),
        )

    def samples(self) -> Samples:
        """Those that percentiles are made of, as of now."""
        return _samples(list(_recent(self._sources.records, self._sources.clock.now())))

    def _status(self) -> str:
        if self._sources.admission.draining:
            return "draining"
        return "ready" if self._sources.engines.reachable else "no engine"

    def _engine(self, engine: Engine, breakers: Breakers, now: float) -> Place:
        feed = self._sources.view.feeds.get(engine.name)
        place = self._place(engine.name, feed, breakers.get(("engine", engine.name)), now)
        place.in_flight = engine.in_flight
        if not engine.probe.reachable:
            place.status, place.detail = "down", "its /health does not answer"
        elif feed is None:
            place.status, place.detail = "up", "no agent is named for it"
        elif place.status == "down":
            place.status, place.detail = "silent", "it answers, but its agent does not"
        return place

    def _instance(self, peer: PeerEndpoint, breakers: Breakers, now: float) -> Place:
        name = place_of(peer)
        feed = self._sources.view.feeds[name]
        place = self._place(name, feed, breakers.get(("instance", name)), now)
        place.peer, place.link_class = peer.peer, peer.link_class
        return place

    def _place(
        self, name: str, feed: Feed | None, breaker: BreakerInfo | None, now: float
    ) -> Place:
        """What its agent tells, and whether that is heard."""
        place = Place(name, "up")
        if breaker is not None:
            place.breaker, place.openings = breaker.state.value, breaker.opened
        if feed is None:
            return place
        info, age_s = feed.engine, feed.age_s(now)
        place.age_s = age_s if age_s < NEVER else None
        place.model, place.paced = info.model, info.paced
        place.waiting, place.running = info.waiting, info.running
        place.queue_tokens, place.decode_step_s = info.queue_tokens, info.decode_step_s
        if info.total_blocks:
            place.kv_used = 1 - info.free_blocks / info.total_blocks
        place.prefill_tokens_per_s = _speed(feed.curve)
        if age_s > self._sources.stale_s:
            place.status, place.detail = "down", "its agent is not heard"
        elif not info.ready:
            place.status, place.detail = "down", "its agent has no engine"
        elif info.draining:
            place.status, place.detail = "draining", "it takes nothing new"
        return place

    def _links(self, breakers: Breakers) -> Iterator[Link]:
        view = self._sources.view
        for engine, peer in product(view.engines, view.peers):
            link = Link(engine.name, peer.peer, peer.instance)
            breaker = breakers.get(("link", f"{engine.name}>{place_of(peer)}"))
            if breaker is not None:
                link.breaker, link.openings = breaker.state.value, breaker.opened
            feed = view.feeds.get(engine.name)
            told = feed.links.get((peer.peer, peer.instance)) if feed is not None else None
            if feed is None:
                link.detail = "the engine has no agent"
            elif told is None:
                link.detail = "its agent tells nothing of it"
            elif not feed.connected:
                link.detail = "the engine's agent is not heard"
            else:
                link.ready, link.detail = told.ready, told.detail[:MAX_TEXT]
                link.goodput_bytes_per_s = told.goodput_bytes_per_s
                link.rate_bytes_per_s = told.rate_bytes_per_s
                link.rtt_s, link.queueing_s = told.rtt_s, told.queueing_s
                link.in_flight_bytes, link.sessions = told.in_flight_bytes, told.sessions
                link.wire_ratio, link.stalled_s = told.wire_ratio, told.stalled_s
                seen = view.served_link(engine.name, peer) or told  # P sees what waits
                link.limit = seen.limit.value if seen.limit is not None else ""
            yield link

    def _saved(self) -> Saved:
        metrics = self._sources.metrics
        return Saved(
            raw_bytes=int(_total(metrics.kv_raw_bytes)),
            wire_bytes=int(_total(metrics.kv_wire_bytes)),
            prefix_bytes=int(_total(metrics.kv_prefix_bytes)),
        )

    def _policies(self) -> Iterator[Policy]:
        for role in (ACTIVE, CANARY, "shadow"):
            running = self._sources.policy.running(role)
            if running is not None:
                share = self._sources.settings.canary_share if role == CANARY else None
                state = _plain_state(running.state)
                yield Policy(role, running.policy.name, running.version, state, share)

    def _shadow(self) -> Shadowing | None:
        if self._sources.policy.running("shadow") is None:
            return None
        metrics = self._sources.metrics
        agrees = _counts(metrics.shadow_decisions)
        return Shadowing(
            agreed=int(agrees.get(("yes",), 0)),
            differed=int(agrees.get(("no",), 0)),
            saved_s=_total(metrics.shadow_saved),
            lost_s=_total(metrics.shadow_lost),
        )


def together(state: StateSource | None) -> Together | None:
    """None where a gateway is alone."""
    if state is None:
        return None
    return Together(state.up, state.shares, min(state.age_s, NEVER))


def _recent(records: RecordBook, now: float) -> Iterator[RequestRecord]:
    for record in records.latest(WINDOW_REQUESTS):
        if now - record.started_at > WINDOW_S:
            return
        if record.decision is not None:
            yield record


def _samples(records: Sequence[RequestRecord]) -> Samples:
    found = Samples({}, {}, {})
    for target in TARGETS:
        mine = [record for record in records if record.target_name == target]
        gaps: list[float] = []
        for record in mine:
            samples = record.itl_s
            gaps.extend(samples[:: max(1, len(samples) // GAPS_OF_ONE)][:GAPS_OF_ONE])
        found.requests[target] = len(mine)
        found.ttft_s[target] = [r.ttft_s for r in mine if r.ttft_s is not None]
        found.itl_s[target] = gaps
    return found


def latencies(samples: Samples) -> dict[str, Latency]:
    """By target."""
    return {
        target: Latency(
            samples.requests[target],
            percentiles(samples.ttft_s[target]),
            percentiles(samples.itl_s[target]),
        )
        for target in TARGETS
    }


def percentiles(values: list[float]) -> tuple[float, float, float] | None:
    """p50, p90 and p99 by nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (
        ordered[min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1)]
        for percent in (50, 90, 99)
    )
    return p50, p90, p99


def _share(records: Iterable[RequestRecord]) -> Share:
    share = Share()
    for record in records:
        assert record.decision is not None
        remote = record.target_name == "remote"
        share.requests += 1
        share.remote_requests += remote
        share.tokens += record.decision.uncached_tokens
        share.remote_tokens += record.decision.uncached_tokens if remote else 0
    return share


def _speed(curve: PrefillCurve) -> float:
    return CURVE_TOKENS / curve.seconds(CURVE_TOKENS) if curve.known else 0.0


def _plain_state(state: object) -> dict[str, Any]:
    """The first fields of a policy's state that are a number, a text or a truth."""
    found = msgspec.to_builtins(state, enc_hook=repr)
    fields = found.items() if isinstance(found, dict) else ()
    simple = [
        (name, value[:MAX_TEXT] if isinstance(value, str) else value)
        for name, value in fields
        if isinstance(value, bool | int | float | str)
    ]
    return dict(simple[:MAX_STATE_FIELDS])


def _counts(metric: Collector) -> dict[tuple[str, ...], float]:
    """Values of a counter by its labels' values, in the order of the labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _total(metric: Collector) -> float:
    return sum(_counts(metric).values())
