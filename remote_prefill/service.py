"""The gRPC service of P's agent: handlers that join streams to sessions."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Literal, NoReturn, Protocol

import grpc
import grpc.aio

from prfaas.errors import Cancelled, PrefillTimeout, PrfaasError, ProtocolError
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.rpc import convert
from prfaas.rpc.status import status_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.sessions import SendState
from remote_prefill.prefill_agent import PrefillAgent, ServedSession
from remote_prefill.server_stream import ServerStream
from remote_prefill.transport import SERVICE

log = logging.getLogger(__name__)

PING_CHUNK_BYTES = 64 << 10
PING_PARTS = 16
"""A burst comes in at least so many replies, so that its pace can be measured."""
MAX_PROBE_BYTES = 8 << 20
OPEN_TIMEOUT_S = 5.0
"""A stream that does not open a session within this is closed."""


class Context(Protocol):
    """What we use of gRPC's servicer context."""

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
        """`Transfer` takes and gives bytes as they are; the rest is protobuf, parsed by us: gRPC
        would answer bytes that are none with its own traceback.
        """
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Handshake": grpc.unary_unary_rpc_method_handler(
                    self.handshake, None, pb.HandshakeReply.SerializeToString
                ),
                "Transfer": grpc.stream_stream_rpc_method_handler(self.transfer),
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

    async def transfer(self, _: AsyncIterator[bytes], context: Context) -> None:
        """One session. Every failure is an ERROR frame, then the stream ends."""
        stream = ServerStream(context)
        try:
            await self._run(stream, context)
        finally:
            await stream.close()

    async def _run(self, stream: ServerStream, context: Context) -> None:
        opening = Frame(FrameType.ERROR, 0)
        try:
            client = self._agent.access.client(context)
            opening = await self._opening(stream)
            served = self._agent.admit(opening, client)
        except PrfaasError as exc:
            await self._refuse(opening, exc, stream)
            return
        reason = "cancelled"
        try:
            reason = await self._serve(served, stream)
        finally:
            if served.machine.state is SendState.SEALED:
                reason = ""  # a stream that the receiver closes once it has the seal
            self._agent.end(served, reason)
            log.info("session ended %r reason=%s", served.machine, reason or "none")

    async def _opening(self, stream: ServerStream) -> Frame:
        try:
            data = await asyncio.wait_for(stream.read(), OPEN_TIMEOUT_S)
        except TimeoutError:
            raise PrefillTimeout("no OPEN frame came", phase="connect") from None
        frames = list(parse_all(data))
        if len(frames) != 1 or frames[0].type is not FrameType.OPEN:
            raise ProtocolError("a stream begins with one OPEN frame")
        return frames[0]

    async def _refuse(self, opening: Frame, error: PrfaasError, stream: ServerStream) -> None:
        log.info("session refused s=%x kind=%s: %s", opening.session, error.kind, error)
        self._agent.metrics.sessions.labels("refused", error.kind).inc()
        payload = convert.error_to_bytes(error)
        frame = Frame(FrameType.ERROR, opening.session, opening.epoch, payload=payload)
        await self._tell(frame, stream)

    async def _serve(self, served: ServedSession, stream: ServerStream) -> str:
        """Run the session beside what its other side says; the kind of its error, or empty."""
        machine = served.machine
        sender = asyncio.ensure_future(self._agent.sender(served, stream.write).run())
        listener = asyncio.ensure_future(self._listen(served, stream))
        stopped = asyncio.ensure_future(served.stopped.wait())
        try:
            await self._first_of(served, sender, listener, stopped)
            return ""
        except PrfaasError as exc:
            error = exc
        except Exception as exc:
            log.exception("session failed %r", machine)
            error = PrfaasError(f"internal error: {exc!r}")
        finally:
            for task in (sender, listener, stopped):
                task.cancel()
            await asyncio.gather(sender, listener, stopped, return_exceptions=True)
        # A silent other side, or one that has left, takes no frame; its bytes are freed now.
        if isinstance(error, Cancelled) or error.phase == "lease":
            machine.cancel()
        elif not machine.ended:
            await self._tell(machine.fail(error), stream)
        return error.kind

    async def _first_of(
        self,
        served: ServedSession,
        sender: asyncio.Task[None],
        listener: asyncio.Task[NoReturn],
        stopped: asyncio.Task[Literal[True]],
    ) -> None:
        """Return when the session is sealed. Raises what ended it otherwise."""
        deadline_s = served.machine.request.deadline_s
        limit_s = min(deadline_s, self._agent.limits.transfer_timeout_s)
        done, _ = await asyncio.wait(
            {sender, listener, stopped}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise PrefillTimeout(f"not sealed within {limit_s:.1f} s", phase="total")
        if sender in done:
            sender.result()
        elif served.stop_error is not None:
            raise served.stop_error
        else:
            listener.result()

    async def _tell(self, frame: Frame, stream: ServerStream) -> None:
        timeout_s = self._agent.limits.control_timeout_s
        try:
            await asyncio.wait_for(stream.write(frame.serialize()), timeout_s)
        except (TimeoutError, Cancelled):
            log.info("session %x: nobody takes its error", frame.session)

    async def _listen(self, served: ServedSession, stream: ServerStream) -> NoReturn:
        """Take ACK and CANCEL until an error: Cancelled, PrefillTimeout (lease), ProtocolError."""
        clock = self._agent.clock
        read = asyncio.ensure_future(stream.read())
        try:
            while True:
                left = served.heard_s + served.lease_s - clock.now()
                done, _ = await asyncio.wait({read}, timeout=max(0.0, left))
                if not done:
                    raise PrefillTimeout(
                        f"the other side was silent for {served.lease_s:.1f} s", phase="lease"
                    )
                message = read.result()
                served.heard_s = clock.now()
                for frame in parse_all(message):
                    served.machine.receive(frame)
                if served.machine.state is SendState.CANCELLED:
                    raise Cancelled("the other side has cancelled")
                read = asyncio.ensure_future(stream.read())
        finally:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
