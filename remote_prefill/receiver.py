"""One session at D: its control stream, opened anew where it breaks, decoding, ACKs, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

import grpc
import numpy as np
import numpy.typing as npt

from prfaas.clock import Clock, Deadline
from prfaas.codecs import CodecSet, Tile, digest_of
from prfaas.errors import (
    Cancelled,
    CorruptKv,
    PeerUnavailable,
    PrefillTimeout,
    PrfaasError,
    ProtocolError,
)
from prfaas.frames import Frame, FrameType, crc32c, parse_all
from prfaas.interfaces import KvSink
from prfaas.layout import KvLayout
from prfaas.ledger import Piece
from prfaas.limits import Limits
from prfaas.receive_session import Arrival, ReceiveSession, ReceiveState
from prfaas.rpc import convert
from remote_prefill.credit import CreditPool
from remote_prefill.lanes import LaneBook
from remote_prefill.link_meter import LinkMeter
from remote_prefill.streams import ClientStream, stream_error

ACK_S = 1.0
ACK_BUSY_S = 0.1
"""After bytes were verified, the sender hears of it within this."""
ACK_CREDIT_SHARE = 0.125
"""Earlier where so much of the credit is verified."""
RESUME_TRIES = 5
RESUME_FIRST_S = 0.05
LAST_FRAMES_S = 1.0
"""Silence after the sender's error, then frames still under way are given up."""


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


@dataclass(frozen=True, slots=True)
class ReceiverContext:
    """What all sessions at one instance share."""

    peer: str
    layout: KvLayout
    codecs: CodecSet
    executor: Executor
    meter: LinkMeter
    limits: Limits
    clock: Clock
    lanes: LaneBook
    credit: CreditPool
    free_staging: Callable[[], int]
    open_stream: Callable[[], ClientStream]
    """A control stream; its `cancel` is called in the end."""
    broke: Callable[[], None]
    """Called when a control stream has broken: lanes may have too."""


class Receiver:
    """Drives one ReceiveSession. `run` ends its streams however it ends.

    Whoever owns the lanes gives KV frames to `on_frames`. After `run` no thread writes into the
    target any more but under a pin.
    """

    def __init__(
        self,
        machine: ReceiveSession,
        context: ReceiverContext,
        *,
        sink: KvSink,
        target: Target,
        deadline: Deadline,
    ) -> None:
        self.machine = machine
        self.times = ReceiverTimes()
        self.resumes = 0
        self._context = context
        self._sink = sink
        self._target = target
        self._deadline = deadline
        self._stream: ClientStream | None = None
        self._decoding = 0
        self._error: PrfaasError | None = None
        self._changed = asyncio.Event()
        self._ack_due = asyncio.Event()
        self._timeline: list[tuple[float, int]] = []
        """(time, wire bytes so far) of every message."""
        self._phase_start_s = 0.0
        self._answered = False
        self._closing = False
        self._begun = asyncio.Event()
        """OPEN or RESUME was written on the stream."""
        self._told = False
        """The last control frame was written."""
        self._closed = False
        """The other side has closed the stream in order."""
        self._tasks: list[asyncio.Future[None]] = []

    @property
    def decoding(self) -> int:
        """Messages given to the decoding threads and not done."""
        return self._decoding

    @property
    def hidden_wire_bytes(self) -> int:
        """Wire bytes that were here before the sender's last layer was computed."""
        seal = self.machine.seal
        if seal is None:
            return 0
        last_layer_s = self._context.meter.local_time(seal.report.last_layer_s)
        if last_layer_s is None:
            return 0
        here = max((total for at, total in self._timeline if at <= last_layer_s), default=0)
        # Clocks are known to half a round trip; what was not yet sent was certainly not here.
        return min(here, seal.report.wire_bytes_before_last_layer)

    async def run(self) -> None:
        """To COMPLETE. Raises PrfaasError; what was decoded by then counts in the ledger.

        Cancelled: the session is cancelled at the sender too, and nothing more is committed.
        """
        self.times.opened_s = self._phase_start_s = self._context.clock.now()
        self._tasks = [asyncio.ensure_future(part) for part in (self._control(), self._send_acks())]
        try:
            await self._until_ended()
        except asyncio.CancelledError:
            self.machine.cancel()
            raise
        except PrfaasError:
            self.machine.fail()
            raise
        finally:
            self.times.ended_s = self._context.clock.now()
            self._closing = True
            self._ack_due.set()

    async def farewell(self) -> bool:
        """After `run`: have P hear how it ended, and close the stream; whether P did hear."""
        limit_s = self._context.limits.control_timeout_s
        try:
            _, pending = await asyncio.wait(self._tasks, timeout=limit_s)
            return self._told and self._closed and not pending
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._stream is not None:
                self._stream.cancel()

    def want(self, chunks: range | None = None, layers: range | None = None) -> None:
        """Of a session on demand: ask for these tensors (`ReceiveSession.want`)."""
        waited = self.machine.expecting
        if self.machine.want(chunks, layers):
            if not waited:
                self._phase_start_s = self._context.clock.now()
                self._changed.set()
            self._ack_due.set()

    # --- KV ---

    def on_frames(self, frames: Sequence[Frame]) -> None:
        """KV frames of this session that came on a lane, in one message."""
        now = self._context.clock.now()
        machine = self.machine
        arrivals: list[Arrival] = []
        try:
            for frame in frames:
                arrival = machine.receive(frame)
                if arrival is not None:
                    arrivals.append(arrival)
        except PrfaasError as exc:
            self._failed(exc)
        if arrivals:
            if not self.times.started_s and machine.state is ReceiveState.RECEIVING:
                self._accepted(now)  # a lane was faster than the stream that carries ACCEPT
            if not self.times.first_frame_s:
                self.times.first_frame_s = now
                self._changed.set()  # another deadline from here on
            self._phase_start_s = now
            self._timeline.append((now, machine.wire_bytes))
            self._decode(arrivals)

    def lane_lost(self) -> None:
        """A lane has ended: have the sender send again what was on it."""
        self._ack_due.set()

    def _decode(self, arrivals: list[Arrival]) -> None:
        if not self._target.pin():
            self._failed(Cancelled("the memory to decode into was given up"))
            return
        context = self._context
        self._decoding += 1
        loop = asyncio.get_running_loop()
        future = context.executor.submit(
            _decode_all, arrivals, context.layout, self._sink, context.codecs
        )
        future.add_done_callback(
            lambda done: loop.call_soon_threadsafe(self._decoded, arrivals, done)
        )

    def _decoded(self, arrivals: list[Arrival], future: Future[list[bytes | CorruptKv]]) -> None:
        self._target.unpin()
        self._decoding -= 1
        machine = self.machine
        try:
            if not future.cancelled():
                was_acked = machine.unacked_bytes == 0
                for arrival, result in zip(arrivals, future.result(), strict=True):
                    if isinstance(result, bytes):
                        machine.decoded(arrival, result)
                    else:
                        machine.broken(arrival, result)
                if was_acked and machine.unacked_bytes:
                    asyncio.get_running_loop().call_later(ACK_BUSY_S, self._ack_due.set)
                share = ACK_CREDIT_SHARE * machine.credit_bytes
                if machine.has_missing or machine.unacked_bytes >= share:
                    self._ack_due.set()
        except PrfaasError as exc:
            self._failed(exc)
        if machine.ended or self._error is not None:
            self._changed.set()

    def _failed(self, error: PrfaasError) -> None:
        self._error = self._error or error
        self._changed.set()

    # --- the end, and deadlines ---

    async def _until_ended(self) -> None:
        machine = self.machine
        while True:
            if self._error is not None and not self._decoding:
                raise self._error
            if machine.state is ReceiveState.COMPLETE:
                return
            left_s = self._deadline.remaining_s()
            if machine.expecting:
                limit_s = LAST_FRAMES_S if machine.failure is not None else self._phase_limit_s()
                left_s = min(left_s, self._phase_start_s + limit_s - self._context.clock.now())
            if left_s <= 0:
                raise machine.failure or self._timed_out()
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    @property
    def _phase(self) -> str:
        if not self.times.accepted_s:
            return "connect"
        if not self.times.started_s:
            return "queue"
        return "progress" if self.times.first_frame_s else "first_frame"

    def _phase_limit_s(self) -> float:
        limits = self._context.limits
        return {
            "connect": limits.connect_timeout_s,
            "queue": limits.progress_timeout_s,
            "first_frame": limits.first_frame_timeout_s,
            "progress": limits.progress_timeout_s,
        }[self._phase]

    def _timed_out(self) -> PrefillTimeout:
        phase = "total" if self._deadline.expired() else self._phase
        return PrefillTimeout(f"{self._context.peer}: silent in phase {phase}", phase=phase)

    # --- control ---

    async def _control(self) -> None:
        """Talk over one stream after another while the session can go on."""
        context, machine = self._context, self.machine
        frame = machine.open()
        tries = 0
        while not self._closing:
            self._answered = False
            try:
                await self._converse(frame)
            except PrfaasError as exc:
                if self._closing or (machine.failure is not None and not machine.ended):
                    return  # its end is known, and only KV may still come
                tries = 1 if self._answered else tries + 1
                broke = exc.kind == PeerUnavailable.kind and not machine.ended
                if not broke or tries > RESUME_TRIES:
                    self._failed(exc)
                    return
            context.broke()
            pause_s = RESUME_FIRST_S * 2 ** (tries - 1)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            self.resumes += 1
            frame = machine.resume(context.lanes.open, context.lanes.opened)

    async def _converse(self, frame: Frame) -> None:
        """One stream to its end. Raises PrfaasError."""
        peer = self._context.peer
        stream, old = self._context.open_stream(), self._stream
        self._stream = stream
        self._closed = False
        self._begun.clear()
        if old is not None:
            old.cancel()
        try:
            await stream.write(frame.serialize())
            self._begun.set()
            while isinstance(data := await stream.read(), bytes):
                frames = _control_frames(data, peer)
                self._answered = True
                for each in frames:
                    self._on_control(each)
            self._closed = True
        except grpc.RpcError as exc:
            raise stream_error(exc, peer=peer, phase=self._phase) from exc
        finally:
            self._begun.set()
        raise PeerUnavailable(f"{peer}: the stream ended before the session")

    def _on_control(self, frame: Frame) -> None:
        now = self._context.clock.now()
        self.machine.receive(frame)
        if frame.type is FrameType.ACCEPT:
            self._accepted(now)
        elif frame.type is FrameType.ERROR:
            self._phase_start_s = now
        self._changed.set()

    def _accepted(self, now: float) -> None:
        self.times.accepted_s = self.times.accepted_s or now
        if self.times.started_s:
            return
        self._phase_start_s = now
        self._ack_due.set()  # the lease may be shorter than was asked for
        if self.machine.state is not ReceiveState.QUEUED:
            self.times.started_s = now

    async def _send_acks(self) -> None:
        """Renew the lease, report what came and what is missing, grant credit; in the end tell how
        it ended.

        gRPC cancels a call whose reader or writer is cancelled, so this ends by itself.
        """
        context, machine = self._context, self.machine
        lanes = context.lanes
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ACK_S, machine.lease_s / 3)):
                    await self._ack_due.wait()
            self._ack_due.clear()
            if self.times.accepted_s and not self._closing:
                machine.grant(context.credit.share(context.layout))
                rate = context.meter.goodput_bytes_per_s
                # What a broken stream does not carry, RESUME will say again.
                report = context.meter.report(context.free_staging())
                await self._write(machine.ack(rate, lanes.open, lanes.opened, report))
        complete = machine.state is ReceiveState.COMPLETE
        last = machine.ack(0.0, lanes.open, lanes.opened) if complete else machine.cancel()
        self._told = await self._write(last, last=True)

    async def _write(self, frame: Frame, *, last: bool = False) -> bool:
        stream = self._stream
        if stream is None:
            return False
        await self._begun.wait()
        try:
            await stream.write(frame.serialize())
            if last:
                await stream.done_writing()
            return True
        except (grpc.RpcError, asyncio.InvalidStateError):
            return False


def _control_frames(data: bytes, peer: str) -> list[Frame]:
    """Frames of one message, and refusals of what is no session yet as exceptions.

    Raises PeerUnavailable: a stream that carries broken bytes, either way, is a broken stream.
    """
    try:
        frames = list(parse_all(data))
    except PrfaasError as exc:
        raise PeerUnavailable(f"{peer}: a broken control frame: {exc.message}") from exc
    for frame in frames:
        if frame.type is FrameType.ERROR and not frame.session:
            error = convert.error_from_bytes(frame.payload)
            if isinstance(error, CorruptKv | ProtocolError):
                raise PeerUnavailable(f"{peer} could not read our first frame: {error.message}")
            raise error
    return frames


def _decode_all(
    arrivals: Sequence[Arrival], layout: KvLayout, sink: KvSink, codecs: CodecSet
) -> list[bytes | CorruptKv]:
    """In a codec thread: check and decode into place; digests of the raw bytes, or what is wrong
    with a frame.
    """
    return [decode(arrival, layout, sink, codecs) for arrival in arrivals]


def decode(arrival: Arrival, layout: KvLayout, sink: KvSink, codecs: CodecSet) -> bytes | CorruptKv:
    """One frame of one layer, or of several, which lie apart in the sink."""
    pieces, frame = arrival.pieces, arrival.frame
    piece = pieces[0]
    if not frame.intact:
        return CorruptKv(f"{frame}: payload crc mismatch")
    codec = codecs.by_id(frame.codec)
    place = sink.in_place(piece) if len(pieces) == 1 else None
    raw: npt.NDArray[np.uint8]
    raw = np.empty(frame.raw_bytes, dtype=np.uint8) if place is None else place
    try:
        shape = Tile.of_pieces(layout.groups[piece.group], pieces)
        codec.decode_into(memoryview(frame.payload), raw, shape)
    except CorruptKv as exc:
        return CorruptKv(f"{piece}: {exc.message}")
    if len(pieces) > 1:
        for each, part in zip(pieces, np.split(raw, len(pieces)), strict=True):
            _put(each, part, sink)
    elif place is None:
        sink.scatter(piece, raw)
    crc = crc32c(frame.payload) if frame.payload_crc is None else frame.payload_crc
    return digest_of(codec, raw, crc)


def _put(piece: Piece, raw: npt.NDArray[np.uint8], sink: KvSink) -> None:
    place = sink.in_place(piece)
    if place is None:
        sink.scatter(piece, raw)
    else:
        place[:] = raw
