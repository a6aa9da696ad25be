"""One session at D: open a stream, take frames, decode into place, judge the seal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
import numpy as np
import numpy.typing as npt

from prfaas.clock import Clock, Deadline
from prfaas.codecs import CodecSet
from prfaas.errors import Cancelled, CorruptKv, PeerUnavailable, PrefillTimeout, PrfaasError
from prfaas.frames import FrameType, parse_all
from prfaas.ledger import piece_digest
from prfaas.limits import Limits
from prfaas.placement import StagingMap
from prfaas.rpc.status import error_of
from prfaas.sessions import Arrival, ReceiveSession, ReceiveState
from remote_prefill.link_meter import LinkMeter

DECODE_QUEUE_MESSAGES = 8
"""Messages received and not yet decoded; then reading stops and HTTP/2 holds the sender back."""
ACK_S = 1.0


class Stream(Protocol):
    """What we use of a gRPC stream call."""

    async def write(self, message: bytes) -> None: ...

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...


class Target(Protocol):
    """Memory that a decode thread may write into while pinned."""

    def pin(self) -> bool: ...

    def unpin(self) -> None: ...


class OwnMemory:
    """A target nobody else will get."""

    def pin(self) -> bool:
        return True

    def unpin(self) -> None:
        return


@dataclass(slots=True)
class ReceiverTimes:
    """Monotonic times of one session; zero: did not come to that."""

    opened_s: float = 0.0
    accepted_s: float = 0.0
    """First ACCEPT, possibly into the queue."""
    started_s: float = 0.0
    """ACCEPT with position 0."""
    first_frame_s: float = 0.0
    ended_s: float = 0.0


class Receiver:
    """Drives one ReceiveSession over one stream. `run` ends the stream however it ends.

    Borrows executor, meter and target; after `run` no thread writes into the target any more but
    under a pin.
    """

    def __init__(
        self,
        machine: ReceiveSession,
        stream: Stream,
        *,
        peer: str,
        staging: StagingMap,
        target: Target,
        codecs: CodecSet,
        executor: Executor,
        meter: LinkMeter,
        limits: Limits,
        deadline: Deadline,
        clock: Clock,
    ) -> None:
        self.machine = machine
        self.times = ReceiverTimes()
        self._stream = stream
        self._peer = peer
        self._staging = staging
        self._target = target
        self._codecs = codecs
        self._executor = executor
        self._meter = meter
        self._limits = limits
        self._deadline = deadline
        self._clock = clock
        self._arrivals: asyncio.Queue[list[Arrival] | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(DECODE_QUEUE_MESSAGES)
        self._timeline: list[tuple[float, int]] = []
        """(time, wire bytes so far) of every message."""
        self._phase_start_s = 0.0

    @property
    def hidden_wire_bytes(self) -> int:
        """Wire bytes that were here before the sender's last layer was computed."""
        seal = self.machine.seal
        if seal is None:
            return 0
        last_layer_s = self._meter.local_time(seal.report.last_layer_s)
        if last_layer_s is None:
            return 0
        here = max((total for at, total in self._timeline if at <= last_layer_s), default=0)
        # Clocks are known to half a round trip; what was not yet sent was certainly not here.
        return min(here, seal.report.wire_bytes_before_last_layer)

    async def run(self) -> None:
        """To COMPLETE. Raises PrfaasError; what was decoded by then counts in the ledger.

        Cancelled: the session is cancelled at the sender too, and nothing more is committed.
        """
        self.times.opened_s = self._phase_start_s = self._clock.now()
        tasks = [
            asyncio.ensure_future(part)
            for part in (self._read(), self._decode(), self._send_acks())
        ]
        reader, decoder, acks = tasks
        try:
            # The decoder ends after the reader: what has arrived is decoded also after an error.
            await asyncio.wait({decoder})
            decoder.result()
            reader.result()
        except asyncio.CancelledError:
            self.machine.cancel()
            raise
        except PrfaasError:
            self.machine.fail()
            raise
        finally:
            self.times.ended_s = self._clock.now()
            self._stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(reader, decoder, acks, return_exceptions=True)

    async def _read(self) -> None:
        try:
            await self._open()
            while not self.machine.ended and self.machine.state is not ReceiveState.SEALED:
                await self._slots.acquire()
                if not self._take(await self._next_message()):
                    self._slots.release()
        except grpc.RpcError as exc:
            raise error_of(exc, peer=self._peer, phase=self._phase) from exc
        finally:
            self._arrivals.put_nowait(None)

    async def _open(self) -> None:
        message = self.machine.open().serialize()
        try:
            async with asyncio.timeout(self._deadline.capped(self._limits.connect_timeout_s)):
                await self._stream.write(message)
        except TimeoutError:
            raise self._timed_out() from None
        except asyncio.InvalidStateError:
            return  # it has failed already; reading tells why

    async def _next_message(self) -> bytes:
        left = self._phase_start_s + self._phase_limit_s() - self._clock.now()
        try:
            async with asyncio.timeout(self._deadline.capped(max(0.0, left))):
                data = await self._stream.read()
        except TimeoutError:
            raise self._timed_out() from None
        if not isinstance(data, bytes):
            raise PeerUnavailable(f"{self._peer}: the stream ended before the seal")
        return data

    def _take(self, data: bytes) -> bool:
        """One message: through the machine, its KV on to the decoder; False where it had none."""
        now = self._clock.now()
        arrivals: list[Arrival] = []
        kv = False
        try:
            for frame in parse_all(data):
                kv = kv or frame.type is FrameType.KV
                arrival = self.machine.receive(frame)
                if arrival is not None:
                    arrivals.append(arrival)
                if frame.type is FrameType.ACCEPT:
                    self._accepted(now)
        finally:
            if kv:
                self.times.first_frame_s = self.times.first_frame_s or now
                self._phase_start_s = now
            if arrivals:
                self._timeline.append((now, self.machine.wire_bytes))
                limited = all(a.app_limited for a in arrivals)
                self._meter.message(len(data), app_limited=limited)
                self._arrivals.put_nowait(arrivals)
        return bool(arrivals)

    def _accepted(self, now: float) -> None:
        self._phase_start_s = now
        self.times.accepted_s = self.times.accepted_s or now
        if self.machine.state is ReceiveState.RECEIVING:
            self.times.started_s = now

    async def _decode(self) -> None:
        """Decode messages in the order they came, one at a time; sessions share the threads."""
        unpin = self._target.unpin
        unpin_soon = partial(asyncio.get_running_loop().call_soon_threadsafe, unpin)
        while (arrivals := await self._arrivals.get()) is not None:
            if not self._target.pin():
                raise Cancelled("the memory to decode into was given up")
            future = self._executor.submit(_decode_all, arrivals, self._staging, self._codecs)
            future.add_done_callback(lambda _: unpin_soon())
            digests = await asyncio.wrap_future(future)
            self._slots.release()
            for arrival, digest in zip(arrivals, digests, strict=True):
                self.machine.decoded(arrival, digest)

    async def _send_acks(self) -> None:
        """Renew the lease and report. Ends with the stream; the reader tells why."""
        interval_s = min(ACK_S, self.machine.request.lease_s / 3)
        while True:
            await asyncio.sleep(interval_s)
            ack = self.machine.ack(self._meter.goodput_bytes_per_s)
            try:
                await self._stream.write(ack.serialize())
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

    @property
    def _phase(self) -> str:
        if not self.times.accepted_s:
            return "connect"
        if not self.times.started_s:
            return "queue"
        return "progress" if self.times.first_frame_s else "first_frame"

    def _phase_limit_s(self) -> float:
        limits = self._limits
        return {
            "connect": limits.connect_timeout_s,
            "queue": limits.progress_timeout_s,
            "first_frame": limits.first_frame_timeout_s,
            "progress": limits.progress_timeout_s,
        }[self._phase]

    def _timed_out(self) -> PrefillTimeout:
        phase = "total" if self._deadline.expired() else self._phase
        return PrefillTimeout(f"{self._peer}: silent in phase {phase}", phase=phase)


def _decode_all(arrivals: Sequence[Arrival], staging: StagingMap, codecs: CodecSet) -> list[bytes]:
    """In a codec thread: decode into place; digests of the raw bytes. Raises CorruptKv."""
    digests: list[bytes] = []
    for arrival in arrivals:
        piece = arrival.piece
        item_bytes = staging.layout.groups[piece.group].item_bytes
        codec = codecs.by_id(arrival.codec)
        place = staging.in_place(piece)
        raw: npt.NDArray[np.uint8]
        raw = np.empty(arrival.raw_bytes, dtype=np.uint8) if place is None else place
        try:
            codec.decode_into(memoryview(arrival.payload), raw, item_bytes)
        except CorruptKv as exc:
            raise CorruptKv(f"{piece}: {exc.message}") from exc
        digests.append(piece_digest(raw.data))
        if place is None:
            staging.scatter(piece, raw)
    return digests
