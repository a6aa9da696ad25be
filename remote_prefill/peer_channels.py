"""The connections to one prefill instance and the RPCs made over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import grpc.aio

from prfaas.clock import Clock
from prfaas.errors import PeerUnavailable, PrefillTimeout, ProtocolError
from prfaas.limits import Limits
from prfaas.rpc import convert
from prfaas.rpc.status import error_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.session_messages import Handshake
from remote_prefill.link_meter import LinkMeter
from remote_prefill.receiver import Stream
from remote_prefill.transport import SERVICE, TRANSFER, open_channel

_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class PeerChannels:
    """Owns one control channel and some data channels, each a connection of its own, kept warm.

    `close` ends them. All failures are PrfaasError.
    """

    def __init__(self, name: str, address: str, count: int, limits: Limits, clock: Clock) -> None:
        self.name = name
        self._limits = limits
        self._clock = clock
        self._control = open_channel(address)
        self._data = [open_channel(address) for _ in range(count)]
        self._loads = [0] * count
        self._handshake = self._control.unary_unary(
            f"/{SERVICE}/Handshake",
            pb.HandshakeRequest.SerializeToString,
            pb.HandshakeReply.FromString,
        )
        self._cancel = self._control.unary_unary(
            f"/{SERVICE}/Cancel", pb.CancelRequest.SerializeToString, pb.CancelReply.FromString
        )

    @property
    def loads(self) -> tuple[int, ...]:
        """Open streams of each data channel."""
        return tuple(self._loads)

    async def close(self) -> None:
        for channel in (self._control, *self._data):
            await channel.close()

    async def connect(self) -> None:
        """Have every connection up. Raises PeerUnavailable, at once where nobody listens."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                channels = (self._control, *self._data)
                for channel in channels:
                    channel.get_state(try_to_connect=True)  # all at the same time
                for channel in channels:
                    await self._up(channel)
        except TimeoutError:
            raise PeerUnavailable(f"{self.name}: no connection in time") from None

    async def _up(self, channel: grpc.aio.Channel) -> None:
        while (state := channel.get_state(try_to_connect=True)) is not _READY:
            if state is _FAILED:
                raise PeerUnavailable(f"{self.name}: cannot connect")
            await channel.wait_for_state_change(state)

    async def handshake(self, mine: Handshake) -> Handshake:
        """The other side's. Raises what it refused with."""
        try:
            reply = await self._handshake(
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
        _, last = await self._ping(self._control, 0)
        meter.ping(sent_s, last.server_s)
        return last.engine_epoch

    async def burst(self, nbytes: int, meter: LinkMeter) -> None:
        """`nbytes` of padding on a data channel, measured."""
        arrivals, _ = await self._ping(self._data[0], nbytes)
        half = next((i for i, (_, total) in enumerate(arrivals) if total * 2 >= nbytes), None)
        if half is not None and half + 1 < len(arrivals):
            (start_s, before), (end_s, total) = arrivals[half], arrivals[-1]
            meter.burst(total, total - before, end_s - start_s)

    async def cancel(self, session: int) -> None:
        """End a session whose stream may be broken; the lease ends it where this fails."""
        with contextlib.suppress(grpc.RpcError):
            await self._cancel(
                pb.CancelRequest(sessions=[session]), timeout=self._limits.control_timeout_s
            )

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        """A Transfer stream on the data channel with the fewest."""
        index = self._loads.index(min(self._loads))
        self._loads[index] += 1
        try:
            yield self._data[index].stream_stream(TRANSFER)()
        finally:
            self._loads[index] -= 1

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
                error = PeerUnavailable(f"{self.name}: no answer to a ping")
            raise error from exc
        finally:
            call.cancel()  # gRPC forgets to where the reader is cancelled before the call is up
        if last is None:
            raise ProtocolError(f"{self.name}: ping without a last reply")
        return arrivals, last
