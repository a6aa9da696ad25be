"""The gRPC service `Telemetry` of both agents."""

from __future__ import annotations

import contextlib
from typing import NoReturn, Protocol

import grpc

from prfaas.errors import ProtocolError
from prfaas.rpc.convert import parse
from prfaas.rpc.convert_watch import watch_to_pb
from prfaas.rpc.status import status_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from remote_prefill.watch import WatchFeed

TELEMETRY = "prfaas.rpc.v1.Telemetry"


class WatchContext(Protocol):
    """What we use of gRPC's servicer context."""

    async def write(self, message: pb.WatchEvent) -> None: ...

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn: ...


class TelemetryService:
    """`Watch` over a feed; borrows it."""

    def __init__(self, feed: WatchFeed) -> None:
        self._feed = feed

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
        async with contextlib.aclosing(self._feed.watch()) as updates:
            async for update in updates:
                await context.write(watch_to_pb(update))
