"""The connections to one prefill instance and the RPCs made over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

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
from remote_prefill.link_meter import LinkMeter
from remote_prefill.receiver import Stream
from remote_prefill.transport import SERVICE, TRANSFER, open_channel

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
        self.loads = [0] * count
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

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        """A Transfer stream on the data channel with the fewest."""
        index = self.loads.index(min(self.loads))
        self.loads[index] += 1
        self._idle.clear()
        try:
            yield self.data[index].stream_stream(TRANSFER)()
        finally:
            self.loads[index] -= 1
            if not any(self.loads):
                self._idle.set()

    async def close(self, grace_s: float | None = None) -> None:
        await asyncio.gather(*(each.close(grace_s) for each in (self.control, *self.data)))

    async def retire(self, grace_s: float) -> None:
        """Close once no stream is open; `grace_s` is for control RPCs under way."""
        await self._idle.wait()
        await self.close(grace_s)


class PeerChannels:
    """Owns one control channel and some data channels, each a connection of its own, kept warm.

    `renew` opens them anew when the certificates have changed. `close` ends them. All failures are
    PrfaasError.
    """

    def __init__(
        self, name: str, endpoint: Endpoint, count: int, limits: Limits, clock: Clock
    ) -> None:
        self.name = name
        self._endpoint = endpoint
        self._count = count
        self._limits = limits
        self._clock = clock
        self._set = ChannelSet(endpoint, count)
        self._retiring: set[asyncio.Task[None]] = set()
        self._unusable = ""
        """Version of certificates with which there was no connection, so that it is told once."""

    @property
    def loads(self) -> tuple[int, ...]:
        """Open streams of each data channel."""
        return tuple(self._set.loads)

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self._set.close()

    async def connect(self) -> None:
        """Have every connection up, with the certificates of now. Raises PeerUnavailable."""
        if self._endpoint.version() != self._set.version:
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

    def _replace(self, fresh: ChannelSet) -> None:
        old, self._set = self._set, fresh
        task = asyncio.create_task(old.retire(self._limits.control_timeout_s))
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

    async def cancel(self, session: int) -> None:
        """End a session whose stream may be broken; the lease ends it where this fails."""
        cancel = self._set.control.unary_unary(
            f"/{SERVICE}/Cancel", pb.CancelRequest.SerializeToString, pb.CancelReply.FromString
        )
        with contextlib.suppress(grpc.RpcError):
            await cancel(
                pb.CancelRequest(sessions=[session]), timeout=self._limits.control_timeout_s
            )

    def stream(self) -> contextlib.AbstractContextManager[Stream]:
        """A Transfer stream on the data channel with the fewest."""
        return self._set.stream()

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
