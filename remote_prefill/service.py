"""The gRPC service of P's agent: handlers that join streams to sessions."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import NoReturn, Protocol

import grpc
import grpc.aio

from prfaas.errors import Cancelled, PrefillTimeout, PrfaasError, ProtocolError
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.rpc import convert
from prfaas.rpc.status import status_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from remote_prefill.prefill_agent import PrefillAgent
from remote_prefill.served_link import ServedLane, ServedLink
from remote_prefill.server_stream import ServerStream
from remote_prefill.transport import SERVICE, bound_queue, unsent_bytes_at

log = logging.getLogger(__name__)

PING_CHUNK_BYTES = 64 << 10
PING_PARTS = 16
"""A burst comes in at least so many replies, so that its pace can be measured."""
MAX_PROBE_BYTES = 8 << 20
OPEN_TIMEOUT_S = 5.0
"""A stream that does not open a session within this is closed."""


class Context(Protocol):
    """What we use of gRPC's servicer context."""

    def peer(self) -> str: ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn: ...


class PrefillService:
    """Handlers of `prfaas.rpc.v1.Prefill`; borrows the agent."""

    def __init__(self, agent: PrefillAgent) -> None:
        self._agent = agent
        self._padding = os.urandom(PING_CHUNK_BYTES)

    def handler(self) -> grpc.GenericRpcHandler:
        """`Session` and `Data` take and give bytes as they are; the rest is protobuf, parsed by us:
        gRPC would answer bytes that are none with its own traceback.
        """
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Handshake": grpc.unary_unary_rpc_method_handler(
                    self.handshake, None, pb.HandshakeReply.SerializeToString
                ),
                "Session": grpc.stream_stream_rpc_method_handler(self.session),
                "Data": grpc.stream_stream_rpc_method_handler(self.data),
                "Cancel": grpc.unary_unary_rpc_method_handler(
                    self.cancel, None, pb.CancelReply.SerializeToString
                ),
                "Ping": grpc.unary_stream_rpc_method_handler(
                    self.ping, None, pb.PingReply.SerializeToString
                ),
            },
        )

    async def handshake(self, data: bytes, context: Context) -> pb.HandshakeReply:
        name = ""
        try:
            client = self._agent.access.client(context)
            request = convert.parse(pb.HandshakeRequest, data)
            name = request.client
            theirs = convert.handshake_from_request(request)
            return convert.handshake_reply(self._agent.handshake(theirs, client))
        except PrfaasError as exc:
            log.info("handshake refused client=%r kind=%s: %s", name, exc.kind, exc)
            await context.abort(*status_of(exc))

    async def cancel(self, data: bytes, context: Context) -> pb.CancelReply:
        """Sessions of the caller; a number that only others have is as good as none."""
        try:
            client = self._agent.access.client(context)
            request = convert.parse(pb.CancelRequest, data)
        except PrfaasError as exc:
            await context.abort(*status_of(exc))
        cancelled = sum(self._agent.cancel(session, client) for session in request.sessions)
        return pb.CancelReply(cancelled=cancelled)

    async def ping(self, data: bytes, context: Context) -> AsyncIterator[pb.PingReply]:
        try:
            self._agent.access.client(context)
            request = convert.parse(pb.PingRequest, data)
        except PrfaasError as exc:
            await context.abort(*status_of(exc))
        left = min(request.probe_bytes, MAX_PROBE_BYTES)
        part = min(max(left // PING_PARTS, 1), PING_CHUNK_BYTES)
        while left > 0:
            yield pb.PingReply(padding=self._padding[: min(left, part)])
            left -= part
        engine = self._agent.engine
        yield pb.PingReply(
            last=True,
            server_s=self._agent.clock.now(),
            engine_epoch=engine.hello.epoch if engine else "",
        )

    async def session(self, _: AsyncIterator[bytes], context: Context) -> None:
        """One control stream of one session. Every refusal is an ERROR frame."""
        stream = ServerStream(context)
        opening = Frame(FrameType.ERROR, 0)
        try:
            try:
                client = self._agent.access.client(context)
                opening = await _first_frame(stream, FrameType.OPEN, FrameType.RESUME)
                if opening.type is FrameType.OPEN:
                    served = self._agent.admit(opening, client)
                else:
                    served = self._agent.resume(opening, client)
            except Cancelled:
                return
            except PrfaasError as exc:
                log.info("session refused s=%x kind=%s: %s", opening.session, exc.kind, exc)
                self._agent.metrics.sessions.labels("refused", exc.kind).inc()
                await self._refuse(opening, exc, stream)
                return
            await served.attend(stream)
        finally:
            await stream.close()

    async def data(self, _: AsyncIterator[bytes], context: Context) -> None:
        """One lane, for as long as the other side keeps it."""
        stream = ServerStream(context)
        try:
            try:
                client = self._agent.access.client(context)
                opening = await _first_frame(stream, FrameType.ATTACH)
                attach = convert.attach_from_bytes(opening.payload)
                link = self._agent.links.find(attach.link, client.identity)
                lane = link.attach(attach.lane, context.peer())
            except Cancelled:
                return
            except PrfaasError as exc:
                await self._refuse(Frame(FrameType.ERROR, 0), exc, stream)
                return
            closed = asyncio.ensure_future(_until_closed(lane, stream))
            try:
                await stream.write(opening.serialize())
                await self._send(link, lane, stream)
            except Cancelled:
                log.info("lane %d of %s broke", lane.number, link.name)
            finally:
                link.detach(lane)
                closed.cancel()
                await asyncio.gather(closed, return_exceptions=True)
        finally:
            await stream.close()

    async def _send(self, link: ServedLink, lane: ServedLane, stream: ServerStream) -> None:
        now = self._agent.clock.now
        while (message := await link.next_message(lane)) is not None:
            if lane.resize_queue(unsent_bytes_at(link.lane_bytes_per_s)):
                bound_queue(lane.peer, lane.queue_bytes)
            lane.writing_since_s = start_s = now()
            await stream.write(message)
            lane.writing_since_s = None
            lane.blocked_s += now() - start_s
            lane.sent_bytes += len(message)

    async def _refuse(self, opening: Frame, error: PrfaasError, stream: ServerStream) -> None:
        payload = convert.error_to_bytes(error)
        frame = Frame(FrameType.ERROR, opening.session, opening.epoch, payload=payload)
        timeout_s = self._agent.limits.control_timeout_s
        try:
            await asyncio.wait_for(stream.write(frame.serialize()), timeout_s)
        except (TimeoutError, Cancelled):
            log.info("session %x: nobody takes its error", frame.session)


async def _first_frame(stream: ServerStream, *expected: FrameType) -> Frame:
    names = " or ".join(kind.name for kind in expected)
    try:
        data = await asyncio.wait_for(stream.read(), OPEN_TIMEOUT_S)
    except TimeoutError:
        raise PrefillTimeout(f"no {names} frame came", phase="connect") from None
    frames = list(parse_all(data))
    if len(frames) != 1 or frames[0].type not in expected:
        raise ProtocolError(f"such a stream begins with one {names} frame")
    return frames[0]


async def _until_closed(lane: ServedLane, stream: ServerStream) -> None:
    """What the other side says here only shows it whether the lane is there; when it has closed its
    end, so do we.
    """
    try:
        while True:
            await stream.read()
    finally:
        lane.close()
