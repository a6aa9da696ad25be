"""The decode side of a session, without I/O: frames in, what to decode and what to say out.

KV comes as it is made or, on demand, as this side asks for it.

KV frames come on any lane in any order, more than once or broken; control frames come on the
session's own stream and may overtake them. Success means that every frame was verified and is in
place, and that counts and root digest agree with the seal.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prfaas.codecs import CodecSet, Quality
from prfaas.errors import CorruptKv, PrfaasError, ProtocolError
from prfaas.frames import Frame, FrameFlag, FrameType
from prfaas.layout import KvLayout
from prfaas.ledger import Ledger, Piece
from prfaas.rpc import convert
from prfaas.sequences import MAX_RANGES, Range, SequenceSet
from prfaas.session_messages import (
    ReceiverReport,
    SessionAck,
    SessionOpen,
    SessionResume,
    SessionSeal,
)
from prfaas.wire_order import WireOrder

CORRUPT_IN_A_ROW = 10
"""So many broken frames with no good one between fail the session."""


class ReceiveState(enum.StrEnum):
    """Where a session stands at the decode side."""

    OPENING = "opening"
    QUEUED = "queued"
    RECEIVING = "receiving"
    SEALED = "sealed"
    """The seal is here; some frames are not, or not verified."""
    FAILING = "failing"
    """The sender's error is here; frames it sent before are still under way."""
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({ReceiveState.COMPLETE, ReceiveState.FAILED, ReceiveState.CANCELLED})
_TAKING = (ReceiveState.RECEIVING, ReceiveState.SEALED, ReceiveState.FAILING)


def pieces_of(
    frame: Frame, layout: KvLayout, spans: Sequence[tuple[int, ...]]
) -> tuple[Piece, ...]:
    """The places a KV frame names: one layer, or one of `spans`, the layers that its codec takes
    together. Raises ProtocolError for anything else.
    """
    layers: tuple[int, ...] = (frame.layer_start,)
    if frame.layer_end != frame.layer_start + 1:
        groups = layout.groups
        of_group = groups[frame.group].layers if frame.group < len(groups) else ()
        layers = tuple(x for x in of_group if frame.layer_start <= x < frame.layer_end)
        if layers not in spans or (layers[0], layers[-1] + 1) != (
            frame.layer_start,
            frame.layer_end,
        ):
            raise ProtocolError(f"{frame}: its codec takes one layer in a frame, or {list(spans)}")
    return tuple(
        Piece(
            chunk=frame.chunk,
            layer=layer,
            group=frame.group,
            token_start=frame.token_start,
            token_end=frame.token_end,
            head_start=frame.head_start,
            head_end=frame.head_end,
        )
        for layer in layers
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A KV frame in its places, one for each layer, whose payload is still to be checked and
    decoded.
    """

    pieces: tuple[Piece, ...]
    frame: Frame

    @property
    def piece(self) -> Piece:
        """The first of its places."""
        return self.pieces[0]

    @property
    def app_limited(self) -> bool:
        return bool(self.frame.flags & FrameFlag.APP_LIMITED)


@dataclass(slots=True)
class Carried:
    """What one codec has carried, decoded and as it came."""

    raw_bytes: int = 0
    wire_bytes: int = 0


class ReceiveSession:
    """Checks frames, keeps the ledger, says what is missing, judges the seal."""

    def __init__(
        self,
        *,
        session: int,
        epoch: int,
        request: SessionOpen,
        layout: KvLayout,
        codecs: CodecSet,
        chunk_tokens: int,
    ) -> None:
        self.session = session
        self.epoch = epoch
        self.request = request
        self.state = ReceiveState.OPENING
        self.ledger = Ledger(layout, request.send_from, request.token_count, chunk_tokens)
        self.queue_position = 0
        self.lease_s = request.lease_s
        """An ACK has to reach the sender within."""
        self.wire_bytes = 0
        """Of all KV frames taken, each counted once."""
        self.pending_bytes = 0
        """Received and not verified."""
        self.unacked_bytes = 0
        """Verified since the last ACK."""
        self.duplicates = 0
        self.late = 0
        """Frames dropped: of an older epoch, or after the end."""
        self.corrupt = 0
        self.wasted_bytes = 0
        """Received in vain: duplicate, late or broken."""
        self.seal: SessionSeal | None = None
        self.failure: PrfaasError | None = None
        """The sender's error, while FAILING."""
        self.credit_bytes = request.credit_bytes
        self._most_credit = request.credit_bytes
        self._codecs = codecs.within(request.codecs, Quality(request.quality))
        self.carried: dict[int, Carried] = {}
        """What is verified, by the number of its codec."""
        self._received = SequenceSet()
        self._verified = SequenceSet()
        self._held = SequenceSet()
        self._missing: dict[int, None] = {}
        self._untold: dict[int, None] = {}
        self._corrupt_row = 0
        self._order: WireOrder | None = None
        """On demand only."""
        if request.on_demand:
            self._order = WireOrder(layout, request.send_from, request.token_count, chunk_tokens)
        self._wanted = SequenceSet()
        """Asked for and not all here."""
        self._frames: int | None = None
        """How many there are, once the sender has said so."""

    def __repr__(self) -> str:
        return f"<ReceiveSession {self.session:x} e={self.epoch} {self.state.name} {self.ledger!r}>"

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    @property
    def has_missing(self) -> bool:
        """Frames came broken and the sender does not know."""
        return bool(self._untold)

    @property
    def expecting(self) -> bool:
        """The sender owes something: silence means that it, or the link, has stopped."""
        if self._order is None or self.state not in (ReceiveState.RECEIVING, ReceiveState.SEALED):
            return not self.ended
        return len(self._wanted) > 0 or self.ledger.whole

    def want(self, chunks: range | None = None, layers: range | None = None) -> bool:
        """On demand: ask for all tensors of these chunks (of the sender's grid) and model layers;
        None: of all. Whether the next ACK asks for something new. Nothing has to be asked for
        where the sender pushes.
        """
        if self._order is None:
            return False
        before = len(self._wanted)
        for number in self._order.within(chunks, layers):
            if not self.ledger.holds(*self._order.places[number]):
                self._wanted.add(number)
        return len(self._wanted) > before

    def open(self) -> Frame:
        """OPEN, the first frame up."""
        return self._control(FrameType.OPEN, convert.open_to_bytes(self.request))

    def grant(self, credit_bytes: int) -> None:
        """What the next ACK allows to be under way; 0 holds the sender until there is more."""
        self.credit_bytes = credit_bytes
        self._most_credit = max(self._most_credit, credit_bytes)

    def ack(
        self,
        receive_bytes_per_s: float = 0.0,
        lanes: Iterable[int] = (),
        lanes_opened: int = 0,
        report: ReceiverReport | None = None,
    ) -> Frame:
        """ACK; renews the lease. `report`: what the sender may know of this side."""
        ack = self._ack(self._untold, receive_bytes_per_s, lanes, lanes_opened)
        ack = replace(ack, report=report)
        return self._control(FrameType.ACK, convert.ack_to_bytes(ack))

    def resume(self, lanes: Iterable[int], lanes_opened: int) -> Frame:
        """RESUME, the first frame on another control stream."""
        ack = self._ack(self._missing, 0.0, lanes, lanes_opened)
        resume = SessionResume(self.request.link, ack)
        return self._control(FrameType.RESUME, convert.resume_to_bytes(resume))

    def cancel(self) -> Frame:
        """CANCEL; everything that still comes is late."""
        if not self.ended:
            self.state = ReceiveState.CANCELLED
        return self._control(FrameType.CANCEL, b"")

    def fail(self) -> None:
        """This side found an error, or waited long enough. Idempotent."""
        if not self.ended:
            self.state = ReceiveState.FAILED

    def receive(self, frame: Frame) -> Arrival | None:
        """Take one frame; a KV frame comes back to be decoded, unless it is late or a duplicate.

        Raises what an ERROR frame carries once nothing more can come, and ProtocolError or
        CorruptKv for a frame that breaks the rules; the session has failed then. Nothing is
        allocated for a frame that is refused.
        """
        if frame.session != self.session or frame.epoch > self.epoch:
            self.fail()
            raise ProtocolError(f"{frame} is not of {self!r}")
        if frame.epoch < self.epoch or self.ended:
            self.late += 1
            self.wasted_bytes += frame.wire_bytes
            return None
        try:
            return self._take(frame)
        except PrfaasError:
            self.fail()
            raise

    def decoded(self, arrival: Arrival, digest: bytes) -> bool:
        """An arrival's bytes are in place; False where the session was cancelled meanwhile.

        After a failure they still count: whole chunks are kept. Raises CorruptKv when it was the
        last one and the seal does not agree, and the sender's error when that was waiting for it.
        """
        frame = arrival.frame
        if self.state is ReceiveState.CANCELLED:
            self.late += 1
            return False
        self._decided(frame)
        self._corrupt_row = 0
        self._verified.add(frame.sequence)
        self.unacked_bytes += frame.wire_bytes
        self.ledger.commit_frame(arrival.pieces, digest, frame.raw_bytes)
        carried = self.carried.setdefault(frame.codec, Carried())
        carried.raw_bytes += frame.raw_bytes
        carried.wire_bytes += len(frame.payload)
        if self._order is not None:
            for piece in arrival.pieces:
                if self.ledger.holds(piece.chunk, piece.layer, piece.group):
                    self._wanted.discard(self._order.number(piece))
        self._judge()
        return True

    def broken(self, arrival: Arrival, error: CorruptKv) -> None:
        """An arrival did not verify: it will be asked for again.

        Raises CorruptKv where too many in a row did not.
        """
        frame = arrival.frame
        self.corrupt += 1
        self.wasted_bytes += frame.wire_bytes
        if self.state is ReceiveState.CANCELLED:
            return
        self._decided(frame)
        for piece in arrival.pieces:
            self.ledger.unclaim(piece)
        self._received.discard(frame.sequence)
        self.wire_bytes -= frame.wire_bytes
        self._missing[frame.sequence] = self._untold[frame.sequence] = None
        self._corrupt_row += 1
        if self._corrupt_row >= CORRUPT_IN_A_ROW and not self.ended:
            self.fail()
            raise CorruptKv(f"{self._corrupt_row} broken frames in a row: {error.message}")

    def _decided(self, frame: Frame) -> None:
        self._held.discard(frame.sequence)
        self.pending_bytes -= frame.wire_bytes

    def _take(self, frame: Frame) -> Arrival | None:
        if frame.type is FrameType.KV:
            return self._take_kv(frame)
        if frame.type is FrameType.ACCEPT:
            self._accepted(frame)
        elif frame.type is FrameType.SEAL:
            if self.seal is None:
                self._require(frame, ReceiveState.RECEIVING)
            self.seal = convert.seal_from_bytes(frame.payload)
            self._frames = self.seal.frames
            self.state = ReceiveState.SEALED
            self._judge()
        elif frame.type is FrameType.ERROR:
            told = convert.session_error_from_bytes(frame.payload)
            self.failure, self._frames = told.error, told.frames
            self.state = ReceiveState.FAILING
            self._judge()
        else:
            raise ProtocolError(f"{frame} may not be sent to the decode side")
        return None

    def _accepted(self, frame: Frame) -> None:
        accept = convert.accept_from_bytes(frame.payload)
        if 0 < accept.lease_s < self.lease_s:
            self.lease_s = accept.lease_s
        if self.state in _TAKING:  # told again after a resume
            return
        self._require(frame, ReceiveState.OPENING, ReceiveState.QUEUED)
        if accept.chunk_tokens != self.ledger.chunk_tokens:
            raise ProtocolError(
                f"{frame}: chunks of {accept.chunk_tokens} tokens, "
                f"{self.ledger.chunk_tokens} in the handshake"
            )
        self.queue_position = accept.queue_position
        queued = accept.queue_position > 0
        self.state = ReceiveState.QUEUED if queued else ReceiveState.RECEIVING

    def _take_kv(self, frame: Frame) -> Arrival | None:
        if self.state in (ReceiveState.OPENING, ReceiveState.QUEUED):
            # A lane may be faster than the control stream that carries ACCEPT.
            self.state = ReceiveState.RECEIVING
        sequence = frame.sequence
        if self._frames is not None and sequence >= self._frames:
            raise ProtocolError(f"{frame}: there are {self._frames} frames")
        if sequence in self._received:
            self.duplicates += 1
            self.wasted_bytes += frame.wire_bytes
            return None
        codec = self._codecs.by_id(frame.codec)
        pieces = pieces_of(frame, self.ledger.layout, codec.spans)
        raw_bytes = sum(map(self.ledger.piece_bytes, pieces))
        if frame.raw_bytes != raw_bytes:
            raise ProtocolError(f"{frame}: {frame.raw_bytes} raw bytes, the layout has {raw_bytes}")
        if len(frame.payload) > raw_bytes:
            raise ProtocolError(f"{frame}: payload is longer than its {raw_bytes} raw bytes")
        if self.pending_bytes + frame.wire_bytes > self._most_credit:
            raise ProtocolError(f"{frame}: more than the {self._most_credit} bytes of its credit")
        if not all(map(self.ledger.claim, pieces)):
            raise ProtocolError(f"{frame}: its place is taken by another frame")
        self._received.add(sequence)
        self._held.add(sequence)
        self._missing.pop(sequence, None)
        self._untold.pop(sequence, None)
        self.wire_bytes += frame.wire_bytes
        self.pending_bytes += frame.wire_bytes
        return Arrival(pieces, frame)

    def _judge(self) -> None:
        if self._frames is None or self._verified.next < self._frames:
            return
        if self.state is ReceiveState.FAILING and self.failure is not None:
            self.state = ReceiveState.FAILED
            raise self.failure
        if self.state is not ReceiveState.SEALED or self.seal is None:
            return
        seal, ledger = self.seal, self.ledger
        self.state = ReceiveState.FAILED
        if not ledger.whole:
            raise CorruptKv(f"missing at the seal: {ledger.describe_missing()}")
        if (seal.frames, seal.raw_bytes) != (ledger.frames, ledger.raw_bytes):
            counted = f"{ledger.frames} and {ledger.raw_bytes}"
            ledger.distrust()
            raise CorruptKv(
                f"seal counts {seal.frames} frames and {seal.raw_bytes} bytes, received {counted}"
            )
        if seal.root_digest != ledger.root_digest():
            ledger.distrust()
            raise CorruptKv("root digest at the seal differs from what was received")
        self.state = ReceiveState.COMPLETE

    def _ack(
        self, missing: dict[int, None], rate: float, lanes: Iterable[int], lanes_opened: int
    ) -> SessionAck:
        told = tuple(list(missing)[:MAX_RANGES])
        for sequence in told:
            self._untold.pop(sequence, None)
        self.unacked_bytes = 0
        return SessionAck(
            next_sequence=self._verified.next,
            verified=_beyond_first(self._verified),
            held=tuple(self._held.ranges())[:MAX_RANGES],
            missing=told,
            credit_bytes=self.credit_bytes,
            lanes=tuple(lanes),
            lanes_opened=lanes_opened,
            receive_bytes_per_s=rate,
            sealed=self.seal is not None,
            wanted=tuple(self._wanted.ranges())[:MAX_RANGES],
        )

    def _control(self, kind: FrameType, payload: bytes) -> Frame:
        return Frame(type=kind, session=self.session, epoch=self.epoch, payload=payload)

    def _require(self, frame: Frame, *states: ReceiveState) -> None:
        if self.state not in states:
            raise ProtocolError(f"{frame} while {self.state.name}")


def _beyond_first(numbers: SequenceSet) -> tuple[Range, ...]:
    ranges = list(numbers.ranges())
    return tuple(ranges[1 if ranges and ranges[0][0] == 0 else 0 :])[:MAX_RANGES]
