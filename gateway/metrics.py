"""Prometheus metrics of one gateway, in a registry of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.admission import Admission, FallbackBudget
from gateway.breaker import BreakerState
from gateway.cluster_view import ClusterView
from gateway.counts import Counts
from gateway.engines import Engines
from gateway.histogram import Histogram
from gateway.live_policy import Chosen
from gateway.members import Members
from gateway.prompt_memory import PromptMemory
from gateway.records import RequestRecord
from gateway.state.metrics import StateMetrics
from gateway.tenancy.metrics import TenantMetrics
from gateway.tokenizer_check import TokenizerCheck
from gateway.workers.metrics import WorkerMetrics
from prfaas.clock import Clock
from prfaas.snapshot import PREFIX_AT_D, Decision, Outcome
from prfaas.telemetry import LinkLimit

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
STAGE_BUCKETS = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.25, 1, 4, 16, 64, 256)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

FELL_BACK = frozenset({"partial", "local", "refused", "failed"})
"""Outcomes in which D did not get all it was to get; `aborted` is the client's doing."""

_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class LiveSources:
    """Where gauges are read from."""

    view: ClusterView
    admission: Admission
    budget: FallbackBudget
    engines: Engines
    tokenizer_check: TokenizerCheck
    clock: Clock
    memory: PromptMemory | None = None


class GatewayMetrics:
    """Owns the registry; `render` is what `/metrics` serves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counts("requests", "Requests by HTTP status.", "target", "status")
        self.decisions = self._counts("decisions", "Decisions and why.", "target", "reason")
        self.fallbacks = self._counts(
            "fallbacks", "Requests meant for a peer of which D prefilled some or all.", "reason"
        )
        self.outcomes = self._counts(
            "outcomes",
            "Transfers by how they ended; `unknown`: no agent said; `moved`: called off by us.",
            "status",
        )
        self.engine_retries = self._counter(
            "engine_retries", "Requests that went on to another engine.", "engine", "reason"
        )
        self.moves = self._counter(
            "moves",
            "Requests that moved while they waited, `to_remote` or `to_local`.",
            "direction",
        )
        self.policy_changes = self._counter(
            "policy_changes",
            "Policies that were `loaded`, `refused` or `rolled_back` while it runs.",
            "role",
            "result",
        )
        self.policy_decisions = self._counts(
            "policy_decisions", "Decisions by who made them.", "role", "policy"
        )
        self.shadow_decisions = self._counter(
            "shadow_decisions", "What the shadow policy was asked.", "agrees"
        )
        self.shadow_saved = self._counter(
            "shadow_saved_seconds", "Estimated TTFT that the shadow policy would have saved."
        )
        self.shadow_lost = self._counter(
            "shadow_lost_seconds", "Estimated TTFT that the shadow policy would have lost."
        )
        self.passed_requests = self._counts(
            "passed_requests",
            "Requests that were passed on undecided, by endpoint and HTTP status.",
            "api",
            "status",
        )
        self.discovery_changes = self._counter(
            "discovery_changes",
            "New sets of engines and peers that were `applied` or `refused`.",
            "source",
            "result",
        )
        self.discovery_failures = self._counter(
            "discovery_failures", "Look-ups that failed; the last known set stays.", "source"
        )
        self.discovered = Gauge(
            "prfaas_gateway_discovered_members",
            "Engines and prefill instances that a source last gave.",
            ("source", "kind"),
            registry=self.registry,
        )
        self.refused = self._counter("refused", "Requests refused at the door.", "reason")
        self.certificate_end = Gauge(
            "prfaas_gateway_certificate_end_seconds",
            "Unix time at which its certificate ends; 0: no TLS.",
            registry=self.registry,
        )
        self.stripped = self._counter(
            "stripped_fields", "Transfer fields of clients that were removed.", "field"
        )
        self.broken_streams = self._counter(
            "broken_streams", "Answers that broke off after their first byte.", "reason"
        )
        self.offloaded_tokens = self._counts("offloaded_tokens", "Uncached tokens sent to peers.")
        self.kv_raw_bytes = self._counts("kv_raw_bytes", "KV received from peers, decoded.")
        self.kv_wire_bytes = self._counts("kv_wire_bytes", "KV received from peers, as sent.")
        self.kv_prefix_bytes = self._counts(
            "kv_prefix_bytes",
            "KV not sent because D had it, decoded.",
        )
        self.kv_quality = self._counts(
            "kv_quality_transfers", "Transfers that brought KV, by its quality class.", "quality"
        )
        self.ttft = self._histogram("ttft_seconds", "To the first event of a stream.", TTFT_BUCKETS)
        self.stages = self._histogram(
            "stage_seconds",
            "Of one request in the gateway: `admission`, `tokenise`, `room` (waiting for an "
            "engine), `decide`, `upstream` (at an engine), and of that `first_event`.",
            STAGE_BUCKETS,
            "stage",
        )
        self.itl = self._histogram("itl_seconds", "Between two events of a stream.", ITL_BUCKETS)
        self.policy_ttft = self._histogram(
            "policy_ttft_seconds", "To the first event, by who decided.", TTFT_BUCKETS, "role"
        )
        self.e2e = self._histogram("e2e_seconds", "To the end of the answer.", E2E_BUCKETS)
        self.tenants = TenantMetrics(self.registry)
        self.state = StateMetrics(self.registry)
        self.workers = WorkerMetrics(self.registry)

    def watch(self, sources: LiveSources) -> None:
        """Add the gauges that are read from live state when scraped."""
        self.registry.register(_LiveGauges(sources))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def finished(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        target = record.target_name
        self.requests.inc(target, record.status)
        if record.ttft_s is not None:
            self.ttft.observe(target, record.ttft_s)
            if record.policy_role:
                self.policy_ttft.observe(record.policy_role, record.ttft_s)
        if record.e2e_s is not None:
            self.e2e.observe(target, record.e2e_s)
        for stage, seconds in record.stage_seconds():
            self.stages.observe(stage, seconds)
        if record.committed and record.error and record.status == "200":
            self.broken_streams.labels(word(record.error)).inc()

    def passed(self, record: RequestRecord) -> None:
        """Count a request that was passed on undecided and has ended."""
        self.passed_requests.inc(record.api, record.status)
        if record.committed and record.error and record.status == "200":
            self.broken_streams.labels(word(record.error)).inc()

    def discovery_changed(self, source: str, result: str) -> None:
        self.discovery_changes.labels(source, result).inc()

    def discovery_failed(self, source: str) -> None:
        self.discovery_failures.labels(source).inc()

    def discovery_found(self, source: str, part: Members) -> None:
        self.discovered.labels(source, "engine").set(len(part.engines))
        self.discovered.labels(source, "peer").set(len(part.peers))

    def engine_left(self, engine: str) -> None:
        """Labels of engines that come and go do not add up."""
        self.engine_retries.remove_by_labels({"engine": engine})

    def policy_changed(self, role: str, result: str) -> None:
        self.policy_changes.labels(role, result).inc()

    def policy_decided(self, chosen: Chosen) -> None:
        """Count a decision, and what the shadow policy says to it."""
        self.policy_decisions.inc(chosen.role, chosen.policy)
        shadow = chosen.shadow
        if shadow is not None:
            self.shadow_decisions.labels("yes" if shadow.agrees else "no").inc()
            if shadow.saved_s is not None:
                (self.shadow_saved if shadow.saved_s > 0 else self.shadow_lost).inc(
                    abs(shadow.saved_s)
                )

    def decided(self, decision: Decision) -> None:
        """Count a decision."""
        self.decisions.inc(decision.target._value_, decision.reason._value_)

    def outcome(self, outcome: Outcome, token_bytes: int = 0) -> None:
        """Count what became of a transfer. `token_bytes`: raw KV of a token at D."""
        self.outcomes.inc(word(outcome.status))
        self.kv_raw_bytes.add(outcome.raw_bytes)
        self.kv_wire_bytes.add(outcome.wire_bytes)
        if outcome.received_tokens or outcome.reason == PREFIX_AT_D:
            self.kv_prefix_bytes.add(outcome.have_tokens * token_bytes)
        if outcome.quality:
            self.kv_quality.inc(word(outcome.quality))
        if outcome.status in FELL_BACK and outcome.reason != PREFIX_AT_D:
            self.fallbacks.inc(word(outcome.reason))

    def _counts(self, name: str, text: str, *labels: str) -> Counts:
        counts = Counts(f"prfaas_gateway_{name}", text, *labels)
        self.registry.register(counts)
        return counts

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"prfaas_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], label: str = "target"
    ) -> Histogram:
        histogram = Histogram(f"prfaas_gateway_{name}", text, label, buckets)
        self.registry.register(histogram)
        return histogram


def word(reason: str) -> str:
    """A reason from outside as a label value: only stable words, so that labels stay few."""
    return reason if _WORD.fullmatch(reason) else "other"


class _LiveGauges(Collector):
    """Read from live state at each scrape."""

    def __init__(self, sources: LiveSources) -> None:
        self._sources = sources
        self._view = sources.view

    def collect(self) -> Iterable[Metric]:
        admission, budget = self._sources.admission, self._sources.budget
        yield _single("in_flight_requests", "Requests being served.", admission.in_flight)
        yield _single("in_flight_requests_peak", "The most so far.", admission.peak)
        yield from self._turns()
        yield from self._memory()
        yield from self._outliers()
        yield _single(
            "fallback_granted_tokens",
            "Uncached tokens of unfinished offloads that may fall back to D.",
            budget.granted_tokens,
        )
        difference = self._sources.tokenizer_check.difference
        yield _single(
            "tokenizer_difference_ratio",
            "Share of token ids in which the gateway's tokenizer last differed from the engine's.",
            math.nan if difference is None else difference,
        )
        most = _family("engine_most_requests", "That this gateway lets it have now.", "engine")
        up = _family("engine_up", "1 where the engine's /health answers.", "engine")
        busy = _family("engine_in_flight_requests", "Requests of this gateway there.", "engine")
        recent = _family("recent_prefix_blocks", "Blocks that were sent there of late.", "engine")
        for engine in self._sources.engines:
            up.add_metric([engine.name], engine.probe.reachable)
            busy.add_metric([engine.name], engine.in_flight)
            if self._sources.engines.turns is not None:
                most.add_metric([engine.name], engine.most)
            recent.add_metric([engine.name], self._sources.engines.recent.blocks(engine.name))
        yield from (up, busy, most, recent)
        yield from self._breakers()
        yield from self._feeds()
        yield from self._links()
        yield from self._limits()

    def _outliers(self) -> Iterable[Metric]:
        engines = self._sources.engines
        out = _family("engine_out", "1 while it rests: much worse than the others.", "engine")
        for engine in engines:
            out.add_metric([engine.name], engines.outliers.out(engine.name))
        ejections = CounterMetricFamily(
            "prfaas_gateway_engine_ejections",
            "How often an engine was sent to rest, as it was `slow` or `failing`.",
            labels=["engine", "reason"],
        )
        for name, reason, count in engines.outliers.ejections():
            ejections.add_metric([name, reason], count)
        yield from (out, ejections)

    def _memory(self) -> Iterable[Metric]:
        memory = self._sources.memory
        pieces = 0 if memory is None else len(memory)
        yield _single(
            "prompt_memory_pieces", "Pieces of prompts whose tokens are remembered.", pieces
        )
        chars = CounterMetricFamily(
            "prfaas_gateway_prompt_memory_chars",
            "Characters of prompts that were tokenised: whose tokens were `known`, or `new`.",
            labels=["tokens"],
        )
        chars.add_metric(["known"], 0 if memory is None else memory.known_chars)
        chars.add_metric(["new"], 0 if memory is None else memory.new_chars)
        yield chars

    def _turns(self) -> Iterable[Metric]:
        turns = self._sources.engines.turns
        waiting, refused = (0, 0) if turns is None else (turns.waiting, turns.refused)
        yield _single("waiting_requests", "Waiting for an engine to have room.", waiting)
        yield CounterMetricFamily(
            "prfaas_gateway_overtakes",
            "Requests that went to an engine before one that had waited for longer.",
            value=0 if turns is None else turns.overtakes,
        )
        yield CounterMetricFamily(
            "prfaas_gateway_waits_refused",
            "Requests that found too many waiting, or waited in vain for an engine.",
            value=refused,
        )

    def _breakers(self) -> Iterable[Metric]:
        is_open = _family(
            "breaker_open",
            "1 where an `engine`, `instance` or `link` gets no requests but a trial.",
            "what",
            "name",
        )
        opened = CounterMetricFamily(
            "prfaas_gateway_breaker_openings", "How often it has opened.", labels=["what", "name"]
        )
        for info in self._view.breakers.infos():
            is_open.add_metric([info.what, info.name], info.state is not BreakerState.CLOSED)
            opened.add_metric([info.what, info.name], info.opened)
        yield from (is_open, opened)

    def _feeds(self) -> Iterable[Metric]:
        now, view = self._sources.clock.now(), self._view
        age = _family("telemetry_age_seconds", "Since the agent was last heard.", "agent")
        connected = _family("telemetry_connected", "1 while the feed is open.", "agent")
        blocks = _family("index_blocks", "Blocks the prefix index knows.", "engine")
        for feed in view.feeds.values():
            age.add_metric([feed.place], feed.age_s(now))
            connected.add_metric([feed.place], feed.connected)
            blocks.add_metric([feed.place], view.index.blocks(feed.place))
        events = _family(
            "cache_events",
            "1 where D publishes cache events; 0: what it caches is unknown.",
            "engine",
        )
        for engine in view.engines:
            events.add_metric([engine.name], view.cache_known(engine.name))
        yield from (age, connected, blocks, events)

    def _links(self) -> Iterable[Metric]:
        values: tuple[tuple[str, str, Callable[..., float]], ...] = (
            ("link_ready", "1 where the peer is paired and reachable.", lambda k: k.ready),
            (
                "link_goodput_bytes_per_second",
                "Measured; 0: not yet.",
                lambda k: k.goodput_bytes_per_s,
            ),
            ("link_rtt_seconds", "Measured round trip.", lambda k: k.rtt_s),
            (
                "link_queueing_seconds",
                "Round trip over the shortest of the last minutes.",
                lambda k: k.queueing_s,
            ),
            (
                "link_rate_bytes_per_second",
                "What has come in the last second.",
                lambda k: k.rate_bytes_per_s,
            ),
            ("link_in_flight_bytes", "Wire bytes still to come.", lambda k: k.in_flight_bytes),
            ("link_wire_ratio", "Raw over wire bytes.", lambda k: k.wire_ratio),
        )
        for name, text, value in values:
            family = _family(name, text, "engine", "peer", "instance")
            for engine in self._view.engines:
                feed = self._view.feeds.get(engine.name)
                for link in feed.links.values() if feed is not None else ():
                    labels = [engine.name, link.peer, link.instance]
                    family.add_metric(labels, float(value(link)))
            yield family

    def _limits(self) -> Iterable[Metric]:
        limits = _family(
            "link_limit",
            "1 for what limits a link now (`idle`, `sender`, `receiver`, `link`), as the agent at "
            "its end `d` or `p` judges it.",
            "engine",
            "peer",
            "instance",
            "end",
            "limit",
        )
        stalled = _family(
            "link_stalled_seconds",
            "So long nothing has moved, although bytes are under way; 0 below a second.",
            "engine",
            "peer",
            "instance",
            "end",
        )
        view = self._view
        for engine, peer in product(view.engines, view.peers):
            feed = view.feeds.get(engine.name)
            name = (peer.peer, peer.instance)
            ends = {
                "d": feed.links.get(name) if feed is not None else None,
                "p": view.served_link(engine.name, peer),
            }
            for end, link in ends.items():
                if link is None:
                    continue
                labels = [engine.name, *name, end]
                stalled.add_metric(labels, link.stalled_s)
                for each in LinkLimit if link.limit is not None else ():
                    limits.add_metric([*labels, each.value], link.limit is each)
        yield from (limits, stalled)


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prfaas_gateway_{name}", text, labels=list(labels))


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prfaas_gateway_{name}", text, value=value)
