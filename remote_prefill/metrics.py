"""Prometheus metrics of both agents, each in a registry of its own, and their port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    start_http_server,
)

from prfaas.agent_peers import Peers
from prfaas.codecs import base_name
from prfaas.errors import ConfigError
from remote_prefill.link_metrics import LinkCollector, Links

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class PrefillMetrics:
    """What P's agent counts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.sessions = Counter(
            "prfaas_prefill_sessions",
            "Sessions by how they ended; `reason` is the error kind, empty when sealed.",
            ("status", "reason"),
            registry=registry,
        )
        self.raw_bytes = Counter(
            "prfaas_prefill_raw_bytes", "KV bytes of sealed sessions, decoded.", registry=registry
        )
        self.wire_bytes = Counter(
            "prfaas_prefill_wire_bytes", "KV bytes sent, with frame headers.", registry=registry
        )
        self.client_sessions = Counter(
            "prfaas_prefill_client_sessions",
            "Sessions by client (empty without TLS), tenant as in the configuration, and end.",
            ("client", "tenant", "status"),
            registry=registry,
        )
        self.client_wire_bytes = Counter(
            "prfaas_prefill_client_wire_bytes",
            "KV bytes sent to a client for a tenant.",
            ("client", "tenant"),
            registry=registry,
        )
        self.codec_raw_bytes, self.codec_wire_bytes = _by_codec(registry, "prefill", "encoded")
        self.quality_sessions = Counter(
            "prfaas_prefill_quality_sessions",
            "Sessions by the quality class asked for.",
            ("quality",),
            registry=registry,
        )
        self.resent_bytes = Counter(
            "prfaas_prefill_resent_bytes",
            "KV bytes sent again after a lane broke or a frame came broken.",
            registry=registry,
        )
        self.resumes = Counter(
            "prfaas_prefill_resumes",
            "Sessions that went on over another control stream.",
            registry=registry,
        )
        self.congestion = Info(
            "prfaas_prefill_congestion",
            "TCP congestion control of accepted connections, read back.",
            registry=registry,
        )
        self.certificate_end = Gauge(
            "prfaas_prefill_certificate_end_seconds",
            "Unix time at which its certificate ends; 0: no TLS.",
            registry=registry,
        )
        self.session_seconds = Histogram(
            "prfaas_prefill_session_seconds",
            "From OPEN to the end of a session.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._registry = registry

    def encoded(self, codec: str, raw_bytes: int, wire_bytes: int) -> None:
        """A piece was encoded."""
        name = base_name(codec)
        self.codec_raw_bytes.labels(name).inc(raw_bytes)
        self.codec_wire_bytes.labels(name).inc(wire_bytes)

    def gauges(
        self,
        *,
        sessions: Callable[[], float],
        queued: Callable[[], float],
        retention_used: Callable[[], float],
        ring_records: Callable[[], float],
        engine_connected: Callable[[], float],
    ) -> None:
        """Values that are read when the metrics are."""
        _gauge(self._registry, "prfaas_prefill_open_sessions", "Sessions open now.", sessions)
        _gauge(
            self._registry,
            "prfaas_prefill_queued_sessions",
            "Sessions waiting for retention.",
            queued,
        )
        _gauge(
            self._registry,
            "prfaas_prefill_retention_used_bytes",
            "Retention reserved by open sessions.",
            retention_used,
        )
        _gauge(
            self._registry,
            "prfaas_prefill_ring_records",
            "Records in the engine's ring that are not copied out yet.",
            ring_records,
        )
        _gauge(
            self._registry,
            "prfaas_prefill_engine_connected",
            "1 while an engine is connected.",
            engine_connected,
        )

    def watch_links(self, links: Links) -> None:
        """Add what is read from the links' meters when scraped."""
        self._registry.register(LinkCollector("prfaas_prefill", links, at_p=True))


class AgentMetrics:
    """What D's agent counts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.fetches = Counter(
            "prfaas_agent_fetches",
            "Fetches answered, by status and reason (empty when staged).",
            ("status", "reason"),
            registry=registry,
        )
        self._discovery_changes = Counter(
            "prfaas_agent_discovery_changes",
            "New sets of prefill instances that were `applied` or `refused`.",
            ("source", "result"),
            registry=registry,
        )
        self._discovery_failures = Counter(
            "prfaas_agent_discovery_failures",
            "Look-ups that failed; the last known set stays.",
            ("source",),
            registry=registry,
        )
        self._discovered = Gauge(
            "prfaas_agent_discovered_instances",
            "Prefill instances that a source listed last.",
            ("source",),
            registry=registry,
        )
        self.tries = Counter(
            "prfaas_agent_tries",
            "Sessions tried at an instance; `result` is `complete` or an error kind.",
            ("peer", "instance", "result"),
            registry=registry,
        )
        self.raw_bytes = Counter(
            "prfaas_agent_raw_bytes",
            "KV bytes received, decoded.",
            ("peer", "instance"),
            registry=registry,
        )
        self.wire_bytes = Counter(
            "prfaas_agent_wire_bytes",
            "KV bytes received, with frame headers.",
            ("peer", "instance"),
            registry=registry,
        )
        self.codec_raw_bytes, self.codec_wire_bytes = _by_codec(registry, "agent", "verified")
        self.quality_fetches = Counter(
            "prfaas_agent_quality_fetches",
            "Fetches that brought KV, by the quality class asked for and that of what came.",
            ("asked", "came"),
            registry=registry,
        )
        self.dropped_frames = Counter(
            "prfaas_agent_dropped_frames",
            "Frames dropped because they were late or duplicate, or fetched again because they "
            "came broken.",
            ("why",),
            registry=registry,
        )
        self.wasted_bytes = Counter(
            "prfaas_agent_wasted_bytes",
            "KV bytes received in vain: late, duplicate or broken.",
            ("peer", "instance"),
            registry=registry,
        )
        self.resumes = Counter(
            "prfaas_agent_resumes",
            "Sessions whose control stream was opened anew.",
            ("peer", "instance"),
            registry=registry,
        )
        self.lanes_opened = Counter(
            "prfaas_agent_lanes_opened",
            "Lanes opened, reopened ones included.",
            ("peer", "instance"),
            registry=registry,
        )
        self.imports = Counter(
            "prfaas_agent_imports",
            "What engines said of their imports; `digest_mismatch` is an error of this side.",
            ("result",),
            registry=registry,
        )
        self.phase_seconds = Histogram(
            "prfaas_agent_phase_seconds",
            "Phases of remote prefills.",
            ("phase",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.certificate_end = Gauge(
            "prfaas_agent_certificate_end_seconds",
            "Unix time at which its certificate ends; 0: no TLS.",
            registry=registry,
        )
        self.pairings = Counter(
            "prfaas_agent_pairings",
            "Handshakes with probe, by result: `ok` or an error kind.",
            ("peer", "instance", "result"),
            registry=registry,
        )

    def discovery_changed(self, source: str, result: str) -> None:
        self._discovery_changes.labels(source, result).inc()

    def discovery_failed(self, source: str) -> None:
        self._discovery_failures.labels(source).inc()

    def discovery_found(self, source: str, part: Peers) -> None:
        self._discovered.labels(source).set(part.instances)

    def gauges(
        self,
        *,
        sessions: Callable[[], float],
        staging_used: Callable[[], float],
        staging_waiting: Callable[[], float],
        ready_instances: Callable[[], float],
        engine_connected: Callable[[], float],
    ) -> None:
        """Values that are read when the metrics are."""
        registry = self.registry
        _gauge(registry, "prfaas_agent_open_sessions", "Fetches not ended yet.", sessions)
        _gauge(registry, "prfaas_agent_staging_used_bytes", "Staging reserved.", staging_used)
        _gauge(
            registry,
            "prfaas_agent_staging_waiting",
            "Fetches waiting for staging.",
            staging_waiting,
        )
        _gauge(
            registry,
            "prfaas_agent_ready_instances",
            "Prefill instances paired and reachable.",
            ready_instances,
        )
        _gauge(
            registry,
            "prfaas_agent_engine_connected",
            "1 while an engine is connected.",
            engine_connected,
        )

    def watch_links(self, links: Links) -> None:
        """Add what is read from the links' meters when scraped."""
        self.registry.register(LinkCollector("prfaas_agent", links, at_p=False))


def _by_codec(registry: CollectorRegistry, side: str, done: str) -> tuple[Counter, Counter]:
    """Raw and wire bytes by codec; `raw` also stands for what another could not make smaller."""
    raw, wire = (
        Counter(f"prfaas_{side}_codec_{kind}_bytes", text, ("codec",), registry=registry)
        for kind, text in (
            ("raw", f"KV bytes {done} by codec, decoded."),
            ("wire", f"KV bytes {done} by codec, encoded, without frame headers."),
        )
    )
    return raw, wire


def _gauge(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    Gauge(name, text, registry=registry).set_function(value)


@contextmanager
def metrics_server(host: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve `registry` while inside; port 0: nothing is served. Raises ConfigError."""
    if port == 0:
        yield 0
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {exc}") from exc
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
