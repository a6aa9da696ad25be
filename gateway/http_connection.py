"""One connection to an engine: a request goes out, its answer is read with back-pressure."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from enum import StrEnum
from typing import cast

from gateway.events import Channel, Took
from gateway.http1 import Headers, KnownHeads, ResponseParser
from gateway.outbox import Outbox
from prfaas.errors import ProtocolError
from prfaas.limits import Limits

HIGH_WATER_BYTES = 64 << 10
"""More of a body than this unread, and the engine is not read from any more."""
MERGE_S = 0.001
"""What comes faster than this is read once in so long: one event costs nearly what ten do."""
Taker = Callable[[bytes], bool]
"""Takes a piece of a body; True: no more, until somebody asks again."""
KEEPALIVE_PROBES = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""A machine that is gone without a word is found out in half a minute, whatever we wait for."""


class State(StrEnum):
    IDLE = "idle"
    BUSY = "busy"
    CLOSED = "closed"


class Broken(Exception):
    """The exchange cannot go on; `phase` is where it was, `unheard`: before a byte came back."""

    def __init__(self, text: str, phase: str, unheard: bool) -> None:
        super().__init__(text)
        self.phase = phase
        self.unheard = unheard


class Connection(asyncio.Protocol):
    """Owns one socket; the pool closes it. One exchange at a time: `send`, then `head`, then
    `take` until it is empty, with `more` or `follow` in between. `tick` keeps its deadlines.
    """

    def __init__(
        self,
        limits: Limits,
        on_closed: Callable[[Connection], None],
        known: KnownHeads,
        outbox: Outbox,
    ) -> None:
        """`known` and `outbox` are shared by all connections to one engine."""
        self._limits = limits
        self._known = known
        self._outbox = outbox
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._spare: ResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._channel: Channel | None = None
        self._taker_error: Exception | None = None
        self._failure: Broken | None = None
        self._reading_paused = False
        self._sending_stuck = False
        self._moved_at = 0.0
        self.state = State.IDLE
        self.exchanges = 0
        self.idle_since = 0.0

    def __repr__(self) -> str:
        return f"<Connection {self.state} exchanges={self.exchanges}>"

    @property
    def still_s(self) -> float:
        """Since something was last sent or came."""
        return self._loop.time() - self._moved_at

    def usable(self, idle_s: float) -> bool:
        """A request may be sent, as far as can be known on this side, and it has not been idle for
        longer than that.
        """
        transport = self._transport
        return (
            self.state is State.IDLE
            and transport is not None
            and not transport.is_closing()
            and self._loop.time() - self.idle_since <= idle_s
        )

    # --- one exchange ---

    def send(self, method: str, head: bytes, body: bytes, at_work: int = 0) -> None:
        """Hand a request to the socket; the connection must be idle. `at_work`: so many are not."""
        assert self.state is State.IDLE, self
        assert self._transport is not None
        self.state = State.BUSY
        self.exchanges += 1
        if self._spare is None:
            self._parser = ResponseParser(method, self._limits.engine_head_bytes, self._known)
        else:
            self._parser, self._spare = self._spare, None
            self._parser.rearm(method)
        self._moved_at = self._loop.time()
        if len(body) <= HIGH_WATER_BYTES:
            self._outbox.write(self._transport, head + body, at_work)
        else:
            self._transport.writelines((head, body))  # large ones are not copied

    def head(self) -> tuple[int, Headers] | None:
        """Status and headers; None where `more` has to be awaited first. Raises Broken."""
        parser = self._parser
        assert parser is not None
        if parser.headers is not None:
            return parser.status, parser.headers
        if self._failure is not None:
            raise self._failure
        return None

    def take(self) -> bytes | None:
        """What arrived of the body since the last call; empty at its end, None where `more` has to
        be awaited first. Raises Broken.
        """
        parser = self._parser
        assert parser is not None
        parts = parser.body
        if parts:
            piece = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            parser.body_bytes = 0
            if self._reading_paused:
                self._resume()
            return piece
        if parser.complete:
            return b""
        if self._failure is not None:
            raise self._failure
        return None

    def take_whole(self) -> bytes:
        """The whole body where it has come in one piece; else nothing is taken."""
        parser = self._parser
        if parser is None or not parser.complete or len(parser.body) != 1:
            return b""
        parser.body_bytes = 0
        if self._reading_paused:
            self._resume()
        return parser.body.pop()

    @property
    def has_news(self) -> bool:
        """`take` has something to give, an end or a failure among them."""
        parser = self._parser
        return parser is None or bool(parser.body) or parser.complete or self._failure is not None

    @property
    def ended(self) -> bool:
        """The body has come whole, and nothing of it is left to `take`."""
        parser = self._parser
        return parser is not None and parser.complete and not parser.body

    def more(self) -> asyncio.Future[None]:
        """Done when there is something new; one waits at a time."""
        self._waiter = self._loop.create_future()
        return self._waiter

    async def follow(self, taker: Taker, channel: Channel | None = None) -> None:
        """Let `taker` have what arrives as soon as it arrives, without a task in between, until it
        wants no more, or the body has ended or broken, which `take` tells then. What `channel`
        takes does not come to `taker`.

        To be called when there is nothing to `take`. Raises what the two raise.
        """
        waiter = self.more()
        self._taker, self._channel = taker, channel
        try:
            await waiter
        finally:
            self._taker = self._channel = None
            error, self._taker_error = self._taker_error, None
        if error is not None:
            raise error

    @property
    def content_length(self) -> int | None:
        return None if self._parser is None else self._parser.content_length

    def finish(self) -> bool:
        """End the exchange; True where the connection may carry the next one."""
        parser, transport = self._parser, self._transport
        reusable = (
            self.state is State.BUSY
            and parser is not None
            and parser.reusable
            and not parser.body
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # an early answer: the body still goes out
        )
        self._parser = self._failure = None
        if parser is not None and reusable and parser.rearmable:
            self._spare = parser
        elif parser is not None:
            parser.close()
        if reusable:
            self.state = State.IDLE
            self.idle_since = self._loop.time()
        else:
            self.abort()
        return reusable

    def abort(self) -> None:
        """Close at once; an engine at work sees it."""
        if self._transport is not None:
            self._transport.abort()

    def tick(self, now: float) -> None:
        """Fail an exchange that has been still for too long."""
        if self.state is not State.BUSY or self._reading_paused or self._parser is None:
            return
        still_s = now - self._moved_at
        limits = self._limits
        if self._sending_stuck and still_s > limits.engine_send_timeout_s:
            self._fail(f"took nothing of the request for {limits.engine_send_timeout_s:g} s")
        elif self._parser.headers is not None and still_s > limits.engine_silence_timeout_s:
            self._fail(f"said nothing for {limits.engine_silence_timeout_s:g} s")

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE_PROBES:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            self.abort()  # nobody asked
            return
        before, self._moved_at = self._moved_at, self._loop.time()
        if self._taker is not None:
            try:
                over = self._pass_on(self._taker, parser, data)
            except Exception as exc:  # raised where it is waited for
                self._taker_error, over = exc, True
            self._passed(over, before)
        elif self._read(parser, data):
            if parser.body_bytes > HIGH_WATER_BYTES:
                self._pause()
            if parser.complete or parser.body or parser.headers is not None:
                self._wake()

    def eof_received(self) -> None:
        self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc is not None else "")
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        self.state = State.CLOSED
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._sending_stuck = True

    def resume_writing(self) -> None:
        self._sending_stuck = False
        self._moved_at = self._loop.time()

    # ---

    def _end(self, error: str) -> None:
        if self._parser is None or self._failure is not None:
            return
        try:
            if error and not self._parser.complete:
                raise ProtocolError(error)
            self._parser.eof()
        except ProtocolError as exc:
            self._fail(exc.message)
        self._wake()

    def _fail(self, text: str) -> None:
        parser = self._parser
        assert parser is not None
        if self._failure is None:
            phase = "send" if self._sending_stuck else "progress"
            self._failure = Broken(text, phase, not parser.heard)
        self.abort()
        self._wake()

    def _read(self, parser: ResponseParser, data: bytes) -> bool:
        """False where it is no answer, and has failed."""
        try:
            parser.feed(data)
        except ProtocolError as exc:
            self._fail(exc.message)
            return False
        return True

    def _pass_on(self, taker: Taker, parser: ResponseParser, data: bytes) -> bool:
        """What has just come, to whom follows; True where the following is over. Raises what those
        raise.
        """
        if self._channel is not None and parser.chunks is not None:
            took = self._channel.take(parser.chunks, data, self._moved_at)
            if took:
                return took == Took.SLOW
        if not self._read(parser, data):
            return True
        parts = parser.body
        if not parts:
            return parser.complete
        piece = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        parser.body_bytes = 0
        return taker(piece) or parser.complete

    def _passed(self, over: bool, before: float) -> None:
        """A piece went to whom follows; `before`: when the one before it came."""
        if over:
            self._taker = self._channel = None
            self._wake()
        elif self._moved_at - before < MERGE_S:
            self._pause()
            self._loop.call_later(MERGE_S, self._merged)

    def _merged(self) -> None:
        if self._parser is not None and self._parser.body_bytes <= HIGH_WATER_BYTES:
            self._resume()

    def _pause(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._moved_at = self._loop.time()  # the silence was ours
            self._transport.resume_reading()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
