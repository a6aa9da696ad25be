"""The short way of a generating request: its bytes in, the engine's bytes out, nothing between.

Plain POSTs to the generating endpoints are read and answered here. Everything else that clients
may say in HTTP goes to aiohttp, bytes as they came and the connection with them: other paths,
chunked or compressed bodies, `Expect`, upgrades, malformed heads. aiohttp's server, with its
request objects, was more than half of what a short request cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
from collections.abc import Callable, Mapping
from typing import cast

from gateway.admission import Admission
from gateway.answers import REQUEST_ID_HEADER, AnswerHeads, error_answer
from gateway.client_head import (
    MAX_HEAD_BYTES,
    ClientHead,
    KnownClientHeads,
    may_become_head,
    request_id_of,
)
from gateway.events import Channel, Gaps, native
from gateway.generation import Generation
from gateway.http1 import LAST_CHUNK
from gateway.ids import Ids
from gateway.job import Inbound
from gateway.metrics import GatewayMetrics
from gateway.outbox import Outbox
from gateway.quality import QUALITY_HEADER
from gateway.relay import WholeAnswer
from gateway.tenancy.door import ANYBODY, Door
from gateway.trace import trace_of
from gateway.unread import Unread
from prfaas.errors import Cancelled, InvalidRequest, Overloaded, PrfaasError
from prfaas.limits import Limits

logger = logging.getLogger(__name__)

AHEAD_BYTES = 64 << 10
"""More than this sent before its turn, and a client is not read from any more."""
SWEEP_S = 1.0
CHUNKED = "transfer-encoding: chunked\r\n"

CLOSED_BY_PEER = getattr(select, "POLLRDHUP", 0)
"""Where there is none, only a connection that was reset is found out."""

Fallback = Callable[[], asyncio.Protocol]


class Front:
    """Owns the listening socket and the connections that have not gone to aiohttp; close it with
    `close`. One timer watches idle connections and bodies on their way.
    """

    def __init__(
        self,
        limits: Limits,
        generation: Generation,
        admission: Admission,
        metrics: GatewayMetrics,
        ids: Ids,
        fallback: Fallback,
        idle_s: float,
        door: Door | None = None,
    ) -> None:
        """`fallback` makes aiohttp's protocol for a connection that is handed over."""
        self.limits = limits
        self.max_body_bytes = limits.max_body_bytes
        self.generation = generation
        self.admission = admission
        self.metrics = metrics
        self.ids = ids
        self.fallback = fallback
        self.door = door
        self.heads = AnswerHeads()
        self.outbox = Outbox()
        self.known_heads = KnownClientHeads()
        self._idle_s = idle_s
        self._connections: set[ClientConnection] = set()
        self.unread = Unread()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_s = min(SWEEP_S, idle_s / 4, limits.slow_client_timeout_s / 4)

    @property
    def open(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen, `shared`: beside other processes that do; returns the port. Raises OSError where
        that is not possible.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self), host, port, backlog=1024, reuse_port=shared or None
        )
        self._timer = loop.call_later(self._sweep_s, self._sweep)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, cut_s: float) -> None:
        """Take no more connections, close idle ones, and cut the others after `cut_s`."""
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        tasks = [connection.stop() for connection in tuple(self._connections)]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=cut_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # the loop closes the sockets

    def opened(self, connection: ClientConnection, transport: asyncio.Transport) -> None:
        self._connections.add(connection)
        self.unread.add(transport)

    def gone(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now, slow_s = loop.time(), self.limits.slow_client_timeout_s
        self._timer = loop.call_later(self._sweep_s, self._sweep)
        for connection in tuple(self._connections):
            connection.tick(now, self._idle_s, slow_s)
        self.unread.sweep(now, slow_s)


class ClientConnection(asyncio.Protocol):
    """Owns one socket and the task that answers its requests, one after the other."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._channel: Channel | None = None
        self._writing_paused = self._reading_paused = False
        self._held = b""
        self._head: ClientHead | None = None
        self._parts: list[bytes] = []
        self._missing = 0
        """Of the body of `_head`; at 0 the request is the task's."""
        self._refusal: PrfaasError | None = None
        self._visit = ANYBODY
        self._admitted = False
        self._stopping = False
        self._since = 0.0

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._since = self._loop.time()
        self._task = self._loop.create_task(self._serve())
        self._front.opened(self, self._transport)

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self._begin(self._held + data if self._held else data)
        elif self._missing:
            self._add(data)
        else:
            self._hold(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._close_channel()
        self._front.gone(self)
        if self._task is not None:
            self._task.cancel()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._head is not None and self._missing:
            self._release()

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._close_channel()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # --- reading ---

    def _begin(self, data: bytes) -> None:
        """A request from its first byte."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4 and len(data) <= MAX_HEAD_BYTES and may_become_head(data):
            self._held = data
            return
        self._held = b""
        front = self._front
        found = front.known_heads.read(data, end)
        if found is None or found[1] > front.max_body_bytes:
            self._hand_over(data)
            return
        head, self._missing = found
        try:
            front.admission.enter()
            self._admitted = True
        except Overloaded as exc:
            draining = front.admission.draining
            front.metrics.refused.labels("draining" if draining else "full").inc()
            self._refusal = exc
        else:
            if front.door is not None:
                self._visit = front.door.enter(head.fields.get("authorization", ""))
                self._refusal = self._visit.refusal
                if self._refusal is not None:  # its body may come as slowly as it likes
                    self._give_back()
        self._head = head
        self._since = self._loop.time()
        if end < len(data) or not self._missing:
            self._add(data[end:])

    def _add(self, data: bytes) -> None:
        """Bytes of a body, and perhaps some of what follows it."""
        if len(data) > self._missing:
            self._hold(data[self._missing :])
            data = data[: self._missing]
        self._missing -= len(data)
        if self._refusal is None:  # of a request that is refused, nothing is kept
            self._parts.append(data)
        if not self._missing and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > AHEAD_BYTES and not self._reading_paused:
            assert self._transport is not None
            self._reading_paused = True
            self._transport.pause_reading()

    def _hand_over(self, data: bytes) -> None:
        """The connection is aiohttp's from here on."""
        transport, task = self._transport, self._task
        assert transport is not None
        self._front.outbox.flush()
        self._front.gone(self)
        self._transport = self._task = None
        if task is not None:
            task.cancel()
        protocol = self._front.fallback()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)

    def tick(self, now: float, idle_s: float, slow_s: float) -> None:
        """Close what has been idle for too long, or has left with something unread, and refuse a
        body that does not arrive.
        """
        if self._transport is None or self._transport.is_closing():
            return
        if self._reading_paused and _has_left(self._transport):
            self.abort()
        elif self._head is None:
            if now - self._since > idle_s:
                self._transport.close()
        elif self._missing and now - self._since > slow_s:
            error = InvalidRequest("the body did not arrive in time")
            request_id = request_id_of(self._head.fields.get("x-request-id", ""), self._front.ids)
            self.say(error_answer(error), request_id, closing=True)
            self._front.outbox.close(self._transport)

    def stop(self) -> asyncio.Task[None]:
        """No request begins after this; the task ends with the one under way."""
        self._stopping = True
        assert self._task is not None
        if self._head is None or self._missing:
            self._task.cancel()
            self.close_after_writing()
        return self._task

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- answering ---

    async def _serve(self) -> None:
        """Requests in order, until the connection ends or goes to aiohttp."""
        while True:
            if self._head is None or self._missing:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            head = self._head
            assert head is not None
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            try:
                await self._answer(head, body)
            finally:
                self._release()
            transport = self._transport
            if transport is None:
                return
            if self._stopping or self._front.admission.draining:
                self.close_after_writing()
                return
            self._since = self._loop.time()
            self._next()
            if self._transport is None:  # handed over
                return

    def _next(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._held:
            data, self._held = self._held, b""
            self._begin(data)

    def _release(self) -> None:
        self._head = self._refusal = self._channel = None
        self._missing = 0
        self._visit.leave()
        self._visit = ANYBODY
        self._give_back()

    def _give_back(self) -> None:
        """Its place among the requests in flight."""
        if self._admitted:
            self._admitted = False
            self._front.admission.leave()

    async def _answer(self, head: ClientHead, body: bytes) -> None:
        front, fields = self._front, head.fields
        request_id = request_id_of(fields.get("x-request-id", ""), front.ids)
        trace = trace_of(fields.get("traceparent"), front.ids)
        visit = self._visit
        stream = ClientStream(self, request_id)
        try:
            if self._refusal is not None:
                visit.refused(request_id, trace.trace_id, head.api.value)
                raise self._refusal
            inbound = Inbound(
                request_id=request_id,
                api=head.api,
                trace=trace,
                body=body,
                salt_header=fields.get("x-cache-salt", ""),
                quality_header=fields.get(QUALITY_HEADER, ""),
                passed_headers=visit.passed_headers(head.passed),
                visit=visit,
                task=self._task,
                say=stream.say,
            )
            answer = await front.generation.serve(inbound, stream)
        except asyncio.CancelledError:
            self.abort()
            raise
        except PrfaasError as exc:
            answer = error_answer(exc)
        except Exception:
            logger.exception("internal error at %s", head.api.path)
            answer = error_answer(PrfaasError("internal error"), 500)
        if answer is not None:
            if (
                stream.started or stream.said
            ):  # too late for a status: a cut connection is the honest end
                self.abort()
                return
            self.say(answer, request_id)
        elif not stream.said:
            return
        if self._writing_paused:
            with contextlib.suppress(Cancelled):  # then the connection is gone, and this task next
                await self.drain()

    def say(self, answer: WholeAnswer, request_id: str, *, closing: bool = False) -> None:
        transport = self._transport
        if transport is None:
            return
        framing = f"content-length: {len(answer.body)}\r\n"
        if closing or self._stopping or self._front.admission.draining:
            framing += "connection: close\r\n"
        answer.headers[REQUEST_ID_HEADER] = request_id
        head = self._front.heads.head(answer.status, answer.headers.items(), framing)
        at_work = self._front.admission.in_flight
        self._front.outbox.write(transport, head + answer.body, at_work)

    def stream_head(self, fields: Mapping[str, str]) -> bytes:
        return self._front.heads.head(200, fields.items(), CHUNKED)

    def write(self, data: bytes) -> bool:
        """True where the client is slow, and `drain` waits for it. Raises Cancelled."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Cancelled("the client went away")
        if self._channel is not None:  # whose events must not overtake these
            self._front.outbox.flush()
        self._front.outbox.write(transport, data, 0)  # events seldom come with others
        return self._writing_paused

    def channel(self, gaps: Gaps) -> Channel | None:
        """A way past `write`, which ends when the client is slow or has gone."""
        transport = self._transport
        if native is None or transport is None or self._writing_paused:
            return None
        self._front.outbox.flush()
        self._channel = native.Channel(
            transport.write, transport.is_closing, gaps.now, gaps.note, gaps.last_at()
        )
        return self._channel

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.open = False
            self._channel = None

    async def drain(self) -> None:
        """Wait for a slow client, as long as that is allowed; then it is cut. Raises Cancelled."""
        if not self._writing_paused or self._transport is None:
            return
        timeout_s = self._front.limits.slow_client_timeout_s
        self._drained = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained
        except TimeoutError as exc:
            self.abort()
            raise Cancelled(f"the client read nothing for {timeout_s:g} s") from exc
        finally:
            self._drained = None

    def close_after_writing(self) -> None:
        if self._transport is not None:
            self._front.outbox.close(self._transport)


class ClientStream:
    """The client's side of one streamed answer."""

    __slots__ = ("_connection", "_ended", "_head", "_request_id", "said", "started")

    def __init__(self, connection: ClientConnection, request_id: str) -> None:
        self._connection = connection
        self._request_id = request_id
        self._head = b""
        """Goes out with the first bytes that follow."""
        self.started = self.said = self._ended = False

    def say(self, answer: WholeAnswer) -> None:
        """A whole answer instead of a stream."""
        self.said = True
        self._connection.say(answer, self._request_id)

    async def start(self, headers: Mapping[str, str]) -> None:
        self._head = self._connection.stream_head(
            {
                **headers,
                REQUEST_ID_HEADER: self._request_id,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        self.started = True

    def put(self, data: bytes, last: bool = False) -> bool:
        head, self._head = self._head, b""
        self._ended = last
        end = LAST_CHUNK if last else b""
        return self._connection.write(b"%b%x\r\n%b\r\n%b" % (head, len(data), data, end))

    async def drain(self) -> None:
        await self._connection.drain()

    def channel(self, gaps: Gaps) -> Channel | None:
        return self._connection.channel(gaps)

    async def end(self, complete: bool) -> None:
        if not self._ended:
            self._connection.write(self._head + LAST_CHUNK)
            self._head = b""
        if not complete:
            self._connection.close_after_writing()


def _has_left(transport: asyncio.Transport) -> bool:
    """Its client has closed, of which nobody is told while nothing is read."""
    watch = select.poll()
    watch.register(transport.get_extra_info("socket").fileno(), CLOSED_BY_PEER)
    return bool(watch.poll(0))
