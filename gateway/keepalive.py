"""Comments for a client who would wait in silence, so that no proxy on the way gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property

from gateway.events import Channel, Gaps
from gateway.relay import ClientSink, Relayed, WholeAnswer, write
from prfaas.errors import Cancelled, PrfaasError

COMMENT = b": keepalive\n\n"
LOOKS = 16
"""At the most, between two comments of a stream."""


async def kept_alive(
    sink: ClientSink,
    headers: Mapping[str, str],
    keepalives: Keepalives,
    answering: Callable[[ClientSink], Awaitable[WholeAnswer | Relayed]],
    end_refused: Callable[[ClientSink, WholeAnswer], Awaitable[Relayed]],
    end_broken: Callable[[ClientSink, PrfaasError], Awaitable[Relayed]],
) -> WholeAnswer | Relayed:
    """What `answering` makes of `sink` with comments in it. Where a comment has gone out, whole
    answers and errors are too late for a status of their own: `end_refused` and `end_broken` say
    them in the stream.

    Raises what `answering` raises before that, and Cancelled.
    """
    kept = KeepaliveSink(sink, headers, keepalives)
    try:
        answer = await answering(kept)
        if isinstance(answer, WholeAnswer) and sink.started:
            return await end_refused(kept, answer)
        return answer
    except PrfaasError as exc:
        if isinstance(exc, Cancelled) or not sink.started:
            raise
        return await end_broken(kept, exc)
    finally:
        await kept.close()


class Keepalives:
    """One timer for the comments of all streams that get one every `interval_s` of silence.

    Owns it while there are streams; close it with `close`, after the last of them. A timer for each
    stream is set and cancelled, for a silence that next to none of them has.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._sinks: set[KeepaliveSink] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sinks)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add(self, sink: KeepaliveSink) -> None:
        """To be followed by `discard`."""
        self._sinks.add(sink)
        if self._timer is None:
            self._timer = self.loop.call_later(self.interval_s, self._sweep)

    def discard(self, sink: KeepaliveSink) -> None:
        self._sinks.discard(sink)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        """Let those speak whose time has come, and come back for the next one, or a little later:
        streams are as many as looks between two comments are few.
        """
        self._timer = None
        if not self._sinks:
            return
        now = self.loop.time()
        left_s = min([sink.tick(now) for sink in tuple(self._sinks)])
        least_s = self.interval_s / LOOKS
        self._timer = self.loop.call_later(max(left_s, least_s), self._sweep)


class KeepaliveSink:
    """A client's side that says something now and then, whatever the engine does.

    Owns the write of a comment while it goes out; close it with `close`, after which the client's
    side itself may still be used. The first comment commits: status 200 goes out. What is written
    through it must end with whole events.
    """

    def __init__(
        self, sink: ClientSink, headers: Mapping[str, str], keepalives: Keepalives
    ) -> None:
        self._sink = sink
        self._headers = headers
        self._keepalives = keepalives
        self._loop = keepalives.loop
        self._said_at = self._loop.time()
        self._writing = self._ended = False
        self._late = b""
        self._comment: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        keepalives.add(self)

    @property
    def started(self) -> bool:
        return self._sink.started

    async def start(self, headers: Mapping[str, str]) -> None:
        await self._begin()
        try:
            if not self._sink.started:
                await self._sink.start(headers)
        finally:
            self._writing = False

    def put(self, data: bytes, last: bool = False) -> bool:
        self._said_at = self._loop.time()
        if self._comment is not None:  # it goes first
            self._late = data
            self._writing = True
        else:
            self._ended = last
            self._writing = self._sink.put(data, last)
        return self._writing

    def channel(self, gaps: Gaps) -> Channel | None:
        self._channel = self._sink.channel(gaps) if self._comment is None else None
        return self._channel

    async def drain(self) -> None:
        self._writing = True
        self._channel = None
        try:
            if self._late:
                await self._begin()
                data, self._late = self._late, b""
                if not self._sink.put(data):
                    return
            await self._sink.drain()
        finally:
            self._writing = False
            self._said_at = self._loop.time()

    async def end(self, complete: bool) -> None:
        await self._begin()
        self._ended = True
        await self._sink.end(complete)

    async def close(self) -> None:
        """No comment begins after this, and none is under way."""
        self._ended = True
        self._keepalives.discard(self)
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    async def _begin(self) -> None:
        """From now on no comment begins; wait for one that is going out. Raises Cancelled where it
        found the client gone.
        """
        self._writing = True
        if self._comment is not None:
            comment, self._comment = self._comment, None
            await comment

    def tick(self, now: float) -> float:
        """Speak if it is time; returns the seconds left until it may be."""
        interval_s = self._keepalives.interval_s
        if self._channel is not None:
            if not self._channel.open:  # the client is slow, and waited for next
                return interval_s
            self._said_at = max(self._said_at, self._channel.said_at)
        if self._ended or self._writing or not self._may_say():
            return interval_s
        left_s = interval_s - (now - self._said_at)
        if left_s > 0:
            return left_s
        if self._channel is not None:  # what comes now goes after the comment
            self._channel.open = False
            self._channel = None
        self._comment = self._loop.create_task(self._say())
        return interval_s

    def _may_say(self) -> bool:
        """Not while one goes out, nor after one that found the client gone."""
        return self._comment is None or (self._comment.done() and self._comment.exception() is None)

    async def _say(self) -> None:
        if not self._sink.started:
            await self._sink.start(self._headers)
        await write(self._sink, COMMENT)
        self._said_at = self._loop.time()
