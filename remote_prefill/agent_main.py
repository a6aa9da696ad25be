"""The process `prfaas agent`: D's agent with its port, Watch, health and metrics."""

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
from remote_prefill.decode_agent import DecodeAgent
from remote_prefill.lifecycle import run_until_stopped, stop_grpc
from remote_prefill.metrics import metrics_server
from remote_prefill.standard_services import HealthReporter, add_reflection
from remote_prefill.telemetry_service import TELEMETRY, TelemetryService
from remote_prefill.transport import WATCH_REQUEST_BYTES, bind, gates, server_options
from remote_prefill.vllm_engine import check_vllm

log = logging.getLogger(__name__)

MAX_RPCS = 256
"""Watchers and health checks at once."""


class AgentServer:
    """D's agent and its two servers, KvPort and gRPC. `stop` closes all of them."""

    def __init__(self, settings: Settings) -> None:
        mine, limits = settings.agent, settings.limits
        require_tls_or_loopback(mine.host, mine.tls, "agent.host")
        check_vllm(mine)
        self._files = open_files(mine.tls, "both", "agent.tls")
        self._settings = mine
        self._spans = open_spans(settings.tracing, "agent")
        self.agent = agent = DecodeAgent(settings, tls=self._files, spans=self._spans)
        agent.metrics.certificate_end.set_function(partial(ends_at, self._files))
        self._port_server = PortServer(
            mine.socket,
            agent_name=mine.name,
            ring_bytes=mine.ring_bytes,
            staging_bytes=mine.staging_bytes,
            verify_import=mine.verify_import,
            max_queue=limits.port_send_queue,
            on_engine=agent.on_engine,
            on_rank=agent.on_rank,
        )
        quiet_server_log()
        self._server = grpc.aio.server(
            interceptors=gates(mine.tls, MAX_RPCS),
            options=server_options(WATCH_REQUEST_BYTES),
            maximum_concurrent_rpcs=MAX_RPCS,
        )
        keys = [key.get_secret_value().encode() for key in mine.transfer_keys]
        self._server.add_generic_rpc_handlers((TelemetryService(agent.feed, keys).handler(),))
        self._health = HealthReporter(self._server, TELEMETRY, lambda: agent.serving)
        add_reflection(self._server, TELEMETRY)

    async def start(self) -> int:
        """Listen; the gRPC port. Raises ConfigError where an address is taken."""
        port = bind(self._server, self._settings.host, self._settings.port, self._files)
        await self._port_server.start()
        await self._server.start()
        await self._health.start()
        log.info("agent listens on %s:%d", self._settings.host, port)
        return port

    async def stop(self, grace_s: float = 0.0, force: asyncio.Event | None = None) -> None:
        """Cut the engine, which aborts its fetches, let watchers have the outcomes within
        `grace_s` or until `force`, then end everything else.
        """
        await self._port_server.close()
        await self._health.stop()
        self.agent.feed.close()
        await stop_grpc(self._server, grace_s, force or asyncio.Event())
        await self.agent.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


async def serve(settings: Settings, ready: Callable[[int], None] | None = None) -> None:
    """Run until a signal, then drain. `ready` gets the port once it serves. Raises ConfigError."""
    server, mine = AgentServer(settings), settings.agent
    with metrics_server(mine.metrics_host, mine.metrics_port, server.agent.metrics.registry):
        await run_until_stopped(server, server.agent, settings.limits.drain_timeout_s, ready)
