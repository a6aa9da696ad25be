"""Watch clients: one stream for each agent, reconnected with jitter, pushed into the view."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from gateway.cluster_view import ClusterView, place_of
from gateway.members import Members
from prfaas.dialling import Endpoint, checked_endpoint
from prfaas.errors import PeerUnavailable, PrfaasError, ProtocolError
from prfaas.limits import Limits
from prfaas.rpc.convert_watch import watch_from_pb
from prfaas.rpc.status import error_of
from prfaas.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Outcome
from prfaas.telemetry import WatchUpdate
from prfaas.tls_files import TlsFiles

logger = logging.getLogger(__name__)

MAX_EVENT_BYTES = 64 << 20
"""A full event lists every cached block (16 bytes each): enough for four million of them."""

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_EVENT_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 3.0


class WatchClient:
    """Follows one agent until cancelled; owns its channel while it runs.

    A stream that is silent for `watch_stale_s`, or skips a sequence number, is opened anew, which
    brings the full state. So is one whose certificates have changed, while what is known stays.
    """

    def __init__(
        self,
        view: ClusterView,
        place: str,
        endpoint: Endpoint,
        gateway_name: str,
        limits: Limits,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._view = view
        self._place = place
        self._endpoint = endpoint
        self._gateway_name = gateway_name
        self._limits = limits
        self._on_outcome = on_outcome
        self._random = random.Random()

    async def run(self) -> None:
        """Never returns; ends by being cancelled."""
        backoff_s = FIRST_BACKOFF_S
        told = False
        try:
            while True:
                heard = False
                try:
                    async for update in self._updates():
                        if not heard:
                            logger.info("watching %s at %s", self._place, self._endpoint.address)
                        heard, told, backoff_s = True, False, FIRST_BACKOFF_S
                        for outcome in self._view.update(self._place, update):
                            self._on_outcome(outcome)
                    continue
                except PrfaasError as exc:
                    if not told:  # once for each outage
                        logger.warning("lost the feed of %s: %s", self._place, exc.message)
                    told = True
                except Exception:  # a fault of ours: the full state comes with the next stream
                    logger.exception("what %s tells cannot be taken in", self._place)
                self._view.disconnected(self._place)
                await asyncio.sleep(backoff_s * (0.5 + self._random.random()))
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        finally:
            self._view.disconnected(self._place)

    async def _updates(self) -> AsyncIterator[WatchUpdate]:
        """Events in sequence, to the end when certificates change.

        Raises PrfaasError when the stream fails, ends, stalls or skips.
        """
        address, version = self._endpoint.address, self._endpoint.version()
        async with self._endpoint.open(_CHANNEL_OPTIONS) as channel:
            stub = prefill_pb2_grpc.TelemetryStub(channel)
            call = stub.Watch(prefill_pb2.WatchRequest(gateway=self._gateway_name))
            try:
                last_seq: int | None = None
                while True:
                    update = await self._next(call)
                    if update is None:
                        raise PeerUnavailable(f"{address}: the agent ended the stream")
                    if last_seq is None and not update.full:
                        raise ProtocolError(f"{address}: the first event is not full")
                    if last_seq is not None and update.seq != last_seq + 1:
                        raise ProtocolError(f"{address}: event {update.seq} follows {last_seq}")
                    last_seq = update.seq
                    yield update
                    if self._endpoint.version() != version:
                        return
            finally:
                call.cancel()

    async def _next(
        self, call: grpc.aio.UnaryStreamCall[object, prefill_pb2.WatchEvent]
    ) -> WatchUpdate | None:
        try:
            async with asyncio.timeout(self._limits.watch_stale_s):
                message = await call.read()
        except TimeoutError as exc:
            raise PeerUnavailable(
                f"no telemetry for {self._limits.watch_stale_s:g} s", phase="progress"
            ) from exc
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc, peer=self._place, phase="connect") from exc
        return None if message is grpc.aio.EOF else watch_from_pb(message)


def watch_endpoints(
    settings: GatewaySettings | Members, files: TlsFiles | None
) -> dict[str, Endpoint]:
    """Where each place of the cluster view is watched. Raises ConfigError naming the setting."""
    found = {
        place_of(peer): checked_endpoint(
            peer.watch, files, peer.tls_name, f"gateway.peers {place_of(peer)}"
        )
        for peer in settings.peers
    }
    for engine in settings.engines:
        if engine.agent is not None:
            key = f"gateway.engines {engine.name}"
            found[engine.name] = checked_endpoint(engine.agent, files, engine.tls_name, key)
    return found
