"""Session machines of one remote prefill, both ends, without I/O: frames in, frames out.

A session is one try at one instance; its epoch tells its frames from those of earlier tries. gRPC,
an in-memory pipe and the simulator drive the same code.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from prfaas.codecs import CodecSet
from prfaas.errors import CorruptKv, PrfaasError, ProtocolError
from prfaas.frames import HEADER_BYTES, Frame, FrameFlag, FrameType
from prfaas.layout import KvLayout
from prfaas.ledger import Ledger, Piece
from prfaas.rpc import convert
from prfaas.session_messages import (
    PrefillReport,
    SessionAccept,
    SessionAck,
    SessionOpen,
    SessionSeal,
)


class SendState(enum.StrEnum):
    """Where a session stands at the prefill side."""

    OPEN = "open"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReceiveState(enum.StrEnum):
    """Where a session stands at the decode side."""

    OPENING = "opening"
    QUEUED = "queued"
    RECEIVING = "receiving"
    SEALED = "sealed"
    """The seal is here, some pieces are still being decoded."""
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


_SEND_ENDS = frozenset({SendState.SEALED, SendState.FAILED, SendState.CANCELLED})
_RECEIVE_ENDS = frozenset({ReceiveState.COMPLETE, ReceiveState.FAILED, ReceiveState.CANCELLED})


def piece_of(frame: Frame) -> Piece:
    """The place a KV frame names. Raises ProtocolError: wire 1.0 carries one layer a frame."""
    if frame.layer_end != frame.layer_start + 1:
        raise ProtocolError(f"{frame}: wire 1.0 carries one layer in a frame")
    return Piece(
        chunk=frame.chunk,
        layer=frame.layer_start,
        group=frame.group,
        token_start=frame.token_start,
        token_end=frame.token_end,
        head_start=frame.head_start,
        head_end=frame.head_end,
    )


class SendSession:
    """The prefill side of one session: turns what the engine exports into frames and the seal."""

    def __init__(
        self, *, session: int, epoch: int, request: SessionOpen, layout: KvLayout, chunk_tokens: int
    ) -> None:
        self.session = session
        self.epoch = epoch
        self.request = request
        self.state = SendState.OPEN
        self.ledger = Ledger(layout, request.send_from, request.token_count, chunk_tokens)
        self.wire_bytes = 0

    def __repr__(self) -> str:
        return f"<SendSession {self.session:x} e={self.epoch} {self.state.name} {self.ledger!r}>"

    @property
    def ended(self) -> bool:
        return self.state in _SEND_ENDS

    def accept(self, queue_position: int, retained_bytes: int) -> Frame:
        """ACCEPT; position 0 starts the prefill."""
        self._require(SendState.OPEN, SendState.QUEUED)
        self.state = SendState.QUEUED if queue_position else SendState.PREFILLING
        accept = SessionAccept(self.ledger.chunk_tokens, queue_position, retained_bytes)
        return self._control(FrameType.ACCEPT, convert.accept_to_bytes(accept))

    def claim(self, piece: Piece, nbytes: int, max_bytes: int) -> tuple[Piece, ...]:
        """A piece that the engine exported, cut by tokens so that no frame has over `max_bytes`
        raw bytes where one token is not more than that. Raises ProtocolError: it does not fit.
        """
        self._require(SendState.PREFILLING)
        expected = self.ledger.piece_bytes(piece)
        if nbytes != expected:
            raise ProtocolError(f"{piece}: engine exported {nbytes} bytes, not {expected}")
        tokens = piece.token_end - piece.token_start
        step = max(1, max_bytes * tokens // nbytes)
        cuts = tuple(
            replace(piece, token_start=at, token_end=min(at + step, piece.token_end))
            for at in range(piece.token_start, piece.token_end, step)
        )
        for cut in cuts:
            if not self.ledger.claim(cut):
                raise ProtocolError(f"{cut}: engine exported it twice")
        return cuts

    def kv(
        self,
        piece: Piece,
        *,
        raw_bytes: int,
        digest: bytes,
        codec: int,
        payload: bytes,
        flags: FrameFlag = FrameFlag.NONE,
    ) -> Frame:
        """The KV frame of a claimed piece, now encoded."""
        self._require(SendState.PREFILLING)
        self.ledger.commit(piece, digest, raw_bytes)
        self.wire_bytes += HEADER_BYTES + len(payload)
        return Frame(
            type=FrameType.KV,
            session=self.session,
            epoch=self.epoch,
            flags=flags,
            codec=codec,
            group=piece.group,
            chunk=piece.chunk,
            layer_start=piece.layer,
            layer_end=piece.layer + 1,
            token_start=piece.token_start,
            token_end=piece.token_end,
            head_start=piece.head_start,
            head_end=piece.head_end,
            raw_bytes=raw_bytes,
            payload=payload,
        )

    def seal(self, report: PrefillReport) -> Frame:
        """SEAL. Raises CorruptKv naming what the engine never exported (case 34)."""
        self._require(SendState.PREFILLING)
        if not self.ledger.whole:
            raise CorruptKv(f"the engine did not export {self.ledger.describe_missing()}")
        self.state = SendState.SEALED
        seal = SessionSeal(
            self.ledger.frames,
            self.ledger.raw_bytes,
            self.wire_bytes,
            self.ledger.root_digest(),
            report,
        )
        return self._control(FrameType.SEAL, convert.seal_to_bytes(seal))

    def fail(self, error: PrfaasError) -> Frame:
        """ERROR, once; the session has ended."""
        if self.ended:
            raise ProtocolError(f"{self!r} has ended already")
        self.state = SendState.FAILED
        return self._control(FrameType.ERROR, convert.error_to_bytes(error))

    def cancel(self) -> None:
        """The other side is gone or asked to stop. Idempotent."""
        if not self.ended:
            self.state = SendState.CANCELLED

    def receive(self, frame: Frame) -> SessionAck | None:
        """An ACK, or None for CANCEL (the session is then CANCELLED) and for old epochs.

        Raises ProtocolError for anything else.
        """
        if frame.session != self.session or frame.epoch > self.epoch:
            raise ProtocolError(f"{frame} is not of {self!r}")
        if frame.epoch < self.epoch:
            return None
        if frame.type is FrameType.ACK:
            return convert.ack_from_bytes(frame.payload)
        if frame.type is FrameType.CANCEL:
            self.cancel()
            return None
        raise ProtocolError(f"{frame} may not be sent to the prefill side of an open session")

    def _control(self, kind: FrameType, payload: bytes) -> Frame:
        return Frame(type=kind, session=self.session, epoch=self.epoch, payload=payload)

    def _require(self, *states: SendState) -> None:
        if self.state not in states:
            raise ProtocolError(f"{self!r} is not {' or '.join(s.name for s in states)}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A checked KV frame whose payload is still to be decoded."""

    piece: Piece
    raw_bytes: int
    codec: int
    payload: memoryview | bytes
    app_limited: bool


class ReceiveSession:
    """The decode side of one session: checks frames, keeps the ledger, judges the seal."""

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
        self.wire_bytes = 0
        """Of all KV frames taken."""
        self.duplicates = 0
        self.late = 0
        """Frames dropped: of an older epoch, or after the end."""
        self.seal: SessionSeal | None = None
        self._codecs = codecs
        self._pending = 0

    def __repr__(self) -> str:
        return f"<ReceiveSession {self.session:x} e={self.epoch} {self.state.name} {self.ledger!r}>"

    @property
    def ended(self) -> bool:
        return self.state in _RECEIVE_ENDS

    def open(self) -> Frame:
        """OPEN, the first frame up."""
        return self._control(FrameType.OPEN, convert.open_to_bytes(self.request))

    def ack(self, receive_bytes_per_s: float) -> Frame:
        """ACK of what is verified; renews the lease."""
        ack = SessionAck(self.ledger.frames, self.wire_bytes, receive_bytes_per_s)
        return self._control(FrameType.ACK, convert.ack_to_bytes(ack))

    def cancel(self) -> Frame:
        """CANCEL; everything that still comes is late."""
        if not self.ended:
            self.state = ReceiveState.CANCELLED
        return self._control(FrameType.CANCEL, b"")

    def fail(self) -> None:
        """This side found an error, or the stream broke. Idempotent."""
        if not self.ended:
            self.state = ReceiveState.FAILED

    def receive(self, frame: Frame) -> Arrival | None:
        """Take one frame; a KV frame comes back to be decoded, unless it is late or a duplicate.

        Raises what an ERROR frame carries, and ProtocolError or CorruptKv for a frame that breaks
        the rules; the session has failed then. Nothing is allocated for a frame that is refused.
        """
        if frame.session != self.session or frame.epoch > self.epoch:
            self.fail()
            raise ProtocolError(f"{frame} is not of {self!r}")
        if frame.epoch < self.epoch or self.ended:
            self.late += 1
            return None
        try:
            return self._take(frame)
        except PrfaasError:
            self.fail()
            raise

    def decoded(self, arrival: Arrival, digest: bytes) -> bool:
        """An arrival's bytes are in place; False where the session was cancelled meanwhile.

        After a failure they still count: whole chunks are kept. Raises CorruptKv when it was the
        last one and the seal does not agree.
        """
        self._pending -= 1
        if self.state is ReceiveState.CANCELLED:
            self.late += 1
            return False
        self.ledger.commit(arrival.piece, digest, arrival.raw_bytes)
        self._judge_seal()
        return True

    def _take(self, frame: Frame) -> Arrival | None:
        if frame.type is FrameType.KV:
            return self._take_kv(frame)
        if frame.type is FrameType.ACCEPT:
            self._require(frame, ReceiveState.OPENING, ReceiveState.QUEUED)
            accept = convert.accept_from_bytes(frame.payload)
            if accept.chunk_tokens != self.ledger.chunk_tokens:
                raise ProtocolError(
                    f"{frame}: chunks of {accept.chunk_tokens} tokens, "
                    f"{self.ledger.chunk_tokens} in the handshake"
                )
            self.queue_position = accept.queue_position
            queued = accept.queue_position > 0
            self.state = ReceiveState.QUEUED if queued else ReceiveState.RECEIVING
        elif frame.type is FrameType.SEAL:
            self._require(frame, ReceiveState.RECEIVING)
            self.seal = convert.seal_from_bytes(frame.payload)
            self.state = ReceiveState.SEALED
            self._judge_seal()
        elif frame.type is FrameType.ERROR:
            raise convert.error_from_bytes(frame.payload)
        else:
            raise ProtocolError(f"{frame} may not be sent to the decode side")
        return None

    def _take_kv(self, frame: Frame) -> Arrival | None:
        self._require(frame, ReceiveState.RECEIVING)
        piece = piece_of(frame)
        raw_bytes = self.ledger.piece_bytes(piece)
        if frame.raw_bytes != raw_bytes:
            raise ProtocolError(f"{frame}: {frame.raw_bytes} raw bytes, the layout has {raw_bytes}")
        if len(frame.payload) > raw_bytes:
            raise ProtocolError(f"{frame}: payload is longer than its {raw_bytes} raw bytes")
        self._codecs.by_id(frame.codec)
        if not self.ledger.claim(piece):
            self.duplicates += 1
            return None
        self.wire_bytes += HEADER_BYTES + len(frame.payload)
        self._pending += 1
        app_limited = bool(frame.flags & FrameFlag.APP_LIMITED)
        return Arrival(piece, raw_bytes, frame.codec, frame.payload, app_limited)

    def _judge_seal(self) -> None:
        if self.state is not ReceiveState.SEALED or self._pending or self.seal is None:
            return
        seal, ledger = self.seal, self.ledger
        self.state = ReceiveState.FAILED
        if not ledger.whole:
            raise CorruptKv(f"missing at the seal: {ledger.describe_missing()}")
        if (seal.frames, seal.raw_bytes) != (ledger.frames, ledger.raw_bytes):
            raise CorruptKv(
                f"seal counts {seal.frames} frames and {seal.raw_bytes} bytes, "
                f"received {ledger.frames} and {ledger.raw_bytes}"
            )
        if seal.root_digest != ledger.root_digest():
            raise CorruptKv("root digest at the seal differs from what was received")
        self.state = ReceiveState.COMPLETE

    def _control(self, kind: FrameType, payload: bytes) -> Frame:
        return Frame(type=kind, session=self.session, epoch=self.epoch, payload=payload)

    def _require(self, frame: Frame, *states: ReceiveState) -> None:
        if self.state not in states:
            raise ProtocolError(f"{frame} while {self.state.name}")
