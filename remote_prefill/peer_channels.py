"""The connections to one prefill instance and the RPCs made over them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from prfaas.clock import Clock
from prfaas.dialling import Endpoint
from prfaas.errors import PeerUnavailable, PrefillTimeout, ProtocolError
from prfaas.limits import Limits
from prfaas.rpc import convert
from prfaas.rpc.status import error_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.session_messages import Handshake
from remote_prefill.lanes import LaneBook, LaneEvents, LaneSet
from remote_prefill.link_meter import LinkMeter
from remote_prefill.streams import ClientStream
from remote_prefill.transport import SERVICE, SESSION, open_channel

log = logging.getLogger(__name__)

_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class ChannelSet:
    """Owns the channels that were opened under one version of the certificates; `close` ends them.

    Once `retire` was called they close by themselves, when their last stream has ended.
    """

    def __init__(self, endpoint: Endpoint, count: int) -> None:
        self.version = endpoint.version()
        self.control = open_channel(endpoint)
        self.data = [open_channel(endpoint) for _ in range(count)]
        self.lanes: LaneSet | None = None
        self.streams = 0
        """Control streams that are open."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def connect(self, name: str, limit_s: float) -> None:
        """Have every connection up. Raises PeerUnavailable, at once where nobody listens."""
        try:
            async with asyncio.timeout(limit_s):
                channels = (self.control, *self.data)
                for channel in channels:
                    channel.get_state(try_to_connect=True)  # all at the same time
                for channel in channels:
                    while (state := channel.get_state(try_to_connect=True)) is not _READY:
                        if state is _FAILED:
                            raise PeerUnavailable(f"{name}: cannot connect")
                        await channel.wait_for_state_change(state)
        except TimeoutError:
            raise PeerUnavailable(f"{name}: no connection in time") from None

    def session_stream(self) -> ClientStream:
        """A control stream; `cancel` gives it back."""
        self.streams += 1
        self._idle.clear()
        return _CountedStream(self.control.stream_stream(SESSION)(), self._ended)

    def _ended(self) -> None:
        self.streams -= 1
        if not self.streams:
            self._idle.set()

    async def close(self, grace_s: float | None = None) -> None:
        if self.lanes is not None:
            await self.lanes.close()
        await asyncio.gather(*(each.close(grace_s) for each in (self.control, *self.data)))

    async def retire(self, grace_s: float) -> None:
        """Close once no stream is open; `grace_s` is for control RPCs under way."""
        if self.lanes is not None:
            await self.lanes.drain()
        await self._idle.wait()
        await self.close(grace_s)


class _CountedStream:
    """A stream whose `cancel` is told once."""

    def __init__(self, call: ClientStream, ended: Callable[[], None]) -> None:
        self._call = call
        self._ended: Callable[[], None] | None = ended
        self.read = call.read
        self.write = call.write
        self.done_writing = call.done_writing

    def cancel(self) -> bool:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
        return self._call.cancel()


class PeerChannels:
    """Owns one control channel and some data channels, each a connection of its own, kept warm.

    `renew` opens them anew when the certificates have changed. `close` ends them. All failures are
    PrfaasError.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        count: int,
        limits: Limits,
        clock: Clock,
        events: LaneEvents,
    ) -> None:
        self.name = name
        self.book = LaneBook()
        self._events = events
        self._token = b""
        self._endpoint = endpoint
        self._count = count
        self._limits = limits
        self._clock = clock
        self._set = ChannelSet(endpoint, count)
        self._retiring: set[asyncio.Task[None]] = set()
        self._silent = False
        """A connection is open and does not answer."""
        self._unusable = ""
        """Version of certificates with which there was no connection, so that it is told once."""

    @property
    def streams(self) -> int:
        """Control streams that are open."""
        return self._set.streams

    @property
    def token(self) -> bytes:
        """Of the link whose lanes are open; empty before the first."""
        return self._token

    async def attach(self, token: bytes) -> None:
        """Have lanes of this link open on every data channel, at least one of them at once.

        Raises PeerUnavailable.
        """
        lanes = self._set.lanes
        if lanes is None or token != self._token:
            self._token = token
            if lanes is not None:
                await lanes.close()
            lanes = self._set.lanes = self._lanes(self._set)
        await lanes.up()

    def _lanes(self, channels: ChannelSet) -> LaneSet:
        return LaneSet(
            self.name,
            channels.data,
            self._token,
            self.book,
            self._events,
            self._limits.connect_timeout_s,
            self._clock,
        )

    def poke(self, silent_s: float = 0.0) -> None:
        """Find out which lanes are gone (`LaneSet.poke`)."""
        if self._set.lanes is not None:
            self._set.lanes.poke(silent_s)

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self._set.close()

    async def connect(self) -> None:
        """Have every connection up, with the certificates of now. Raises PeerUnavailable."""
        if self._silent:
            self._reset()
        elif self._endpoint.version() != self._set.version:
            self._replace(ChannelSet(self._endpoint, self._count))
        await self._set.connect(self.name, self._limits.connect_timeout_s)

    async def renew(self) -> None:
        """Where certificates have changed, connect with them and use those channels from then on.

        Streams under way end on the old ones, which also stay where the new ones do not connect.
        """
        version = self._endpoint.version()
        if version == self._set.version:
            return
        fresh = ChannelSet(self._endpoint, self._count)
        try:
            await fresh.connect(self.name, self._limits.connect_timeout_s)
            if self._token:
                fresh.lanes = self._lanes(fresh)
                await fresh.lanes.up()
        except BaseException as exc:
            await fresh.close()
            if not isinstance(exc, PeerUnavailable):
                raise
            if self._unusable != version:
                log.warning("%s: no connection with the new certificates", self.name)
            self._unusable = version
            return
        self._replace(fresh)
        log.info("%s: connected anew with the certificates %s", self.name, version[:8])

    async def check(self, meter: LinkMeter) -> None:
        """Where a connection does not answer, although it is open, open all of them anew: what a
        middle box has swallowed of a connection leaves it waiting for bytes that never come.

        Sessions go on over the new ones. Raises PeerUnavailable where control does not answer.
        """
        answers = await asyncio.gather(
            *(self._ping(channel, 0) for channel in self._set.data), return_exceptions=True
        )
        if any(isinstance(answer, BaseException) for answer in answers):
            log.warning("%s: a data channel does not answer; connecting anew", self.name)
            self._reset()
        await self.ping(meter)

    def distrust(self) -> None:
        """What is open does not answer as it should: `connect` will open all of it anew."""
        self._silent = True

    def _reset(self) -> None:
        """Other channels, the old ones closed at once."""
        self._silent = False
        old, self._set = self._set, ChannelSet(self._endpoint, self._count)
        if self._token:
            self._set.lanes = self._lanes(self._set)
        self._later(old.close())

    def _replace(self, fresh: ChannelSet) -> None:
        old, self._set = self._set, fresh
        self._later(old.retire(self._limits.control_timeout_s))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def handshake(self, mine: Handshake) -> Handshake:
        """The other side's. Raises what it refused with."""
        try:
            shake = self._set.control.unary_unary(
                f"/{SERVICE}/Handshake",
                pb.HandshakeRequest.SerializeToString,
                pb.HandshakeReply.FromString,
            )
            reply = await shake(
                convert.handshake_request(mine), timeout=self._limits.control_timeout_s
            )
        except grpc.RpcError as exc:
            raise error_of(exc, peer=self.name, phase="handshake") from exc
        theirs = convert.handshake_from_reply(reply)
        if theirs.chunk_tokens < 1 or theirs.max_tokens < 1:
            raise ProtocolError(f"{self.name}: handshake without chunk_tokens or max_tokens")
        return theirs

    async def ping(self, meter: LinkMeter) -> str:
        """One round trip on the control channel, measured; the engine's epoch (empty: none)."""
        sent_s = self._clock.now()
        _, last = await self._ping(self._set.control, 0)
        meter.ping(sent_s, last.server_s)
        return last.engine_epoch

    async def burst(self, nbytes: int, meter: LinkMeter) -> None:
        """`nbytes` of padding on a data channel, measured."""
        arrivals, _ = await self._ping(self._set.data[0], nbytes)
        half = next((i for i, (_, total) in enumerate(arrivals) if total * 2 >= nbytes), None)
        if half is not None and half + 1 < len(arrivals):
            (start_s, before), (end_s, total) = arrivals[half], arrivals[-1]
            meter.burst(total, total - before, end_s - start_s)

    async def cancel(self, session: int) -> bool:
        """End a session whose stream may be broken; whether P has heard."""
        cancel = self._set.control.unary_unary(
            f"/{SERVICE}/Cancel", pb.CancelRequest.SerializeToString, pb.CancelReply.FromString
        )
        try:
            await cancel(
                pb.CancelRequest(sessions=[session]), timeout=self._limits.control_timeout_s
            )
            return True
        except grpc.RpcError:
            return False

    def session_stream(self) -> ClientStream:
        """A stream on the control channel; `cancel` gives it back."""
        return self._set.session_stream()

    async def _ping(
        self, channel: grpc.aio.Channel, nbytes: int
    ) -> tuple[list[tuple[float, int]], pb.PingReply]:
        """(time, bytes so far) of each reply with padding, and the last reply."""
        ping = channel.unary_stream(
            f"/{SERVICE}/Ping", pb.PingRequest.SerializeToString, pb.PingReply.FromString
        )
        call = ping(pb.PingRequest(probe_bytes=nbytes), timeout=self._limits.control_timeout_s)
        arrivals: list[tuple[float, int]] = []
        total = 0
        last: pb.PingReply | None = None
        try:
            async for reply in call:
                total += len(reply.padding)
                if reply.last:
                    last = reply
                else:
                    arrivals.append((self._clock.now(), total))
        except grpc.RpcError as exc:
            error = error_of(exc, peer=self.name, phase="ping")
            # A link that answers nothing in time is as good as down.
            if isinstance(error, PrefillTimeout):
                self._silent = self._silent or channel is self._set.control
                error = PeerUnavailable(f"{self.name}: no answer to a ping")
            raise error from exc
        finally:
            call.cancel()  # gRPC forgets to where the reader is cancelled before the call is up
        if last is None:
            raise ProtocolError(f"{self.name}: ping without a last reply")
        return arrivals, last
