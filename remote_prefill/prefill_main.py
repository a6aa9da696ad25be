"""The process `prfaas prefill`: P's agent with its port, gRPC service, health and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import grpc.aio

from prfaas.dialling import ends_at, open_files
from prfaas.kvport import PortServer
from prfaas.rpc.server_log import quiet_server_log
from prfaas.settings import Settings
from prfaas.tls import require_tls_or_loopback
from prfaas.tracing_on import open_spans
from remote_prefill.lifecycle import run_until_stopped, stop_grpc
from remote_prefill.metrics import metrics_server
from remote_prefill.prefill_agent import PrefillAgent
from remote_prefill.service import PrefillService
from remote_prefill.standard_services import HealthReporter, add_reflection
from remote_prefill.telemetry_service import TELEMETRY, TelemetryService
from remote_prefill.transport import (
    SERVICE,
    bind,
    control_bytes,
    gates,
    keep_queues_short,
    server_options,
    use_congestion,
)
from remote_prefill.vllm_engine import check_vllm

log = logging.getLogger(__name__)

STAGING_BYTES = 4096
"""A prefill engine imports nothing, but KvPort always hands over two segments."""
SPARE_RPCS = 256
"""Calls beside sessions: lanes, watchers, pings, health checks."""


class PrefillServer:
    """P's agent and its two servers, KvPort and gRPC. `stop` closes all of them."""

    def __init__(self, settings: Settings) -> None:
        mine, limits = settings.prefill, settings.limits
        require_tls_or_loopback(mine.host, mine.tls, "prefill.host")
        check_vllm(mine)
        self._files = open_files(mine.tls, "server", "prefill.tls")
        self._settings = mine
        self._spans = open_spans(settings.tracing, "prefill")
        self.agent = agent = PrefillAgent(mine, limits, spans=self._spans)
        agent.metrics.certificate_end.set_function(partial(ends_at, self._files))
        self._port_server = PortServer(
            mine.socket,
            agent_name=agent.feed.agent,
            ring_bytes=mine.ring_bytes,
            staging_bytes=STAGING_BYTES,
            max_queue=limits.port_send_queue,
            on_engine=agent.on_engine,
            on_rank=agent.on_rank,
        )
        most = limits.agent_max_sessions + SPARE_RPCS
        quiet_server_log()
        self._server = grpc.aio.server(
            interceptors=gates(mine.tls, most),
            options=server_options(control_bytes(limits)),
            maximum_concurrent_rpcs=most,
        )
        self._server.add_generic_rpc_handlers(
            (PrefillService(agent).handler(), TelemetryService(agent.feed).handler())
        )
        self._health = HealthReporter(self._server, SERVICE, lambda: agent.serving)
        add_reflection(self._server, SERVICE, TELEMETRY)

    async def start(self) -> int:
        """Listen; the gRPC port. Raises ConfigError where an address is taken."""
        port = bind(self._server, self._settings.host, self._settings.port, self._files)
        await self._port_server.start()
        await self._server.start()
        keep_queues_short(port)
        congestion = use_congestion(port, self._settings.congestion)
        self.agent.metrics.congestion.info({"in_use": congestion})
        await self._health.start()
        log.info("prefill service listens on %s:%d", self._settings.host, port)
        return port

    async def stop(self, grace_s: float = 0.0, force: asyncio.Event | None = None) -> None:
        """End sessions that are still open with an error, let what is sealed or said leave within
        `grace_s` or until `force`, then end everything else. Also after a failed start.
        """
        await self.agent.stop_sessions()
        self.agent.links.close_lanes()
        await self._health.stop()
        self.agent.feed.close()
        await stop_grpc(self._server, grace_s, force or asyncio.Event())
        await self._port_server.close()
        await self.agent.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


async def serve(settings: Settings, ready: Callable[[int], None] | None = None) -> None:
    """Run until a signal, then drain. `ready` gets the port once it serves. Raises ConfigError."""
    server, mine = PrefillServer(settings), settings.prefill
    with metrics_server(mine.metrics_host, mine.metrics_port, server.agent.metrics.registry):
        await run_until_stopped(server, server.agent, settings.limits.drain_timeout_s, ready)
