"""The gRPC service `Telemetry` of both agents."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NoReturn, Protocol

import grpc

from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.errors import ProtocolError
from prfaas.rpc.convert import parse
from prfaas.rpc.convert_watch import watch_to_pb
from prfaas.rpc.status import status_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.transfer import key_id
from remote_prefill.watch import WatchFeed

TELEMETRY = "prfaas.rpc.v1.Telemetry"
TIME_KEY = "prfaas-time"
KEYS_KEY = "prfaas-key-ids"
"""Initial metadata of Watch (docs/protocol.md)."""


class WatchContext(Protocol):
    """What we use of gRPC's servicer context."""

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None: ...

    async def write(self, message: pb.WatchEvent) -> None: ...

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn: ...


class TelemetryService:
    """`Watch` over a feed; borrows it."""

    def __init__(
        self, feed: WatchFeed, transfer_keys: Sequence[bytes] = (), clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Watchers are told what `prfaas check` compares: our clock and the ids of the keys."""
        self._feed = feed
        self._clock = clock
        self._key_ids = ",".join(key_id(key) for key in transfer_keys)

    def handler(self) -> grpc.GenericRpcHandler:
        watch = grpc.unary_stream_rpc_method_handler(
            self.watch, None, pb.WatchEvent.SerializeToString
        )
        return grpc.method_handlers_generic_handler(TELEMETRY, {"Watch": watch})

    async def watch(self, data: bytes, context: WatchContext) -> None:
        """Until the watcher leaves; a slow one blocks in `write`, and the feed merges for it."""
        try:
            parse(pb.WatchRequest, data)
        except ProtocolError as exc:
            await context.abort(*status_of(exc))
        await context.send_initial_metadata(
            ((TIME_KEY, f"{self._clock.wall():.6f}"), (KEYS_KEY, self._key_ids))
        )
        async with contextlib.aclosing(self._feed.watch()) as updates:
            async for update in updates:
                await context.write(watch_to_pb(update))
