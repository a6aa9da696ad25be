"""The prefill side of a session, without I/O: pieces in, frames for lanes and control out.

A session is one try at one instance; its epoch tells its frames from those of earlier tries. Every
KV frame has a sequence number and is retained, encoded, until the receiver has verified it, so that
what a broken lane or a flipped bit took away can be sent again. Frames leave in one of two orders:
as they are made (push), or as the receiver asks for their tensors (on demand). gRPC, an in-memory
pipe and a simulated network drive the same code.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, replace

from prfaas.errors import CorruptKv, PrfaasError, ProtocolError
from prfaas.frames import HEADER_BYTES, Frame, FrameFlag, FrameType, with_flag
from prfaas.layout import KvLayout
from prfaas.ledger import Ledger, Piece
from prfaas.placement import cut_piece
from prfaas.rpc import convert
from prfaas.sequences import Range, SequenceSet
from prfaas.session_messages import (
    PrefillReport,
    ReceiverReport,
    SessionAccept,
    SessionAck,
    SessionOpen,
    SessionSeal,
)
from prfaas.wire_order import WireOrder

FIRST_MESSAGE_BYTES = 256 << 10
"""The first messages of a session: a cold connection delivers them sooner."""
FIRST_MESSAGES = 4
MESSAGE_BYTES = 1 << 20
SPAN_BYTES = 2 << 20
"""Raw bytes of a frame of several layers, which a lossy codec makes a message of less."""


class SendState(enum.StrEnum):
    """Where a session stands at the prefill side."""

    OPEN = "open"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    """All frames exist; some are not verified yet."""
    FAILING = "failing"
    """The error is told; the last frames are still to be handed out."""
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({SendState.COMPLETE, SendState.FAILED, SendState.CANCELLED})
_GIVING = frozenset({SendState.PREFILLING, SendState.SEALED, SendState.FAILING})


@dataclass(slots=True)
class _Retained:
    """A frame that the receiver has not verified; `lane` while it is under way, else queued."""

    frame: Frame
    lane: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Unasked:
    """A frame without a number, and the numbers of its tensors."""

    frame: Frame
    tensors: tuple[int, ...]


class SendSession:
    """Owns the retained frames of one session, until it has ended.

    Retained payloads are never more than the raw bytes that were reserved for the session, and
    bytes under way never more than the receiver's credit.
    """

    def __init__(
        self, *, session: int, epoch: int, request: SessionOpen, layout: KvLayout, chunk_tokens: int
    ) -> None:
        self.session = session
        self.epoch = epoch
        self.request = request
        self.state = SendState.OPEN
        self.ledger = Ledger(layout, request.send_from, request.token_count, chunk_tokens)
        self.credit_bytes = request.credit_bytes
        self.wire_bytes = 0
        """Of all frames, each counted once."""
        self.handed_bytes = 0
        """Given to lanes so far, without what was sent again."""
        self.resent_bytes = 0
        self.outstanding_bytes = 0
        """Under way: given to a lane, not verified, not known to be lost."""
        self.retained_bytes = 0
        self.messages = 0
        self.receive_bytes_per_s = 0.0
        """As the receiver says."""
        self.report: ReceiverReport | None = None
        """What the last ACK said of the receiver."""
        self.verified_bytes = 0
        """Of `handed_bytes`: what has arrived for certain."""
        self.seal_frame: Frame | None = None
        self.held = request.hold_until_sealed
        """Nothing is given out before the seal."""
        self._order: WireOrder | None = None
        """On demand only."""
        if request.on_demand:
            self._order = WireOrder(layout, request.send_from, request.token_count, chunk_tokens)
        self._wanted = SequenceSet()
        self._unasked: dict[int, list[_Unasked]] = {}
        """Frames that nobody has asked for yet, by each of their tensors; numbered once they are
        wanted.
        """
        self._retained: dict[int, _Retained] = {}
        self._acked = SequenceSet()
        self._queue: deque[int] = deque()
        self._resend: deque[int] = deque()
        self._on_lane: dict[int, dict[int, None]] = {}
        self._next = 0
        self._cut_bytes = 0
        self._seal_known = False

    def __repr__(self) -> str:
        return f"<SendSession {self.session:x} e={self.epoch} {self.state.name} {self.ledger!r}>"

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    @property
    def frames(self) -> int:
        """KV frames that may leave; their numbers are below."""
        return self._next

    @property
    def queued(self) -> int:
        """Frames waiting for a lane."""
        return 0 if self.held else len(self._queue) + len(self._resend)

    @property
    def starved(self) -> bool:
        """There is something to send, and no credit for it: the receiver is the slow one."""
        return self._peek() is not None and not self.sendable

    @property
    def sendable(self) -> bool:
        """`take` would give something."""
        first = self._peek()
        return first is not None and self._fits(first, 0)

    # --- control ---

    def accept(self, queue_position: int, retained_bytes: int, lease_s: float = 0.0) -> Frame:
        """ACCEPT; position 0 starts the prefill."""
        self._require(SendState.OPEN, SendState.QUEUED)
        self.state = SendState.QUEUED if queue_position else SendState.PREFILLING
        accept = SessionAccept(self.ledger.chunk_tokens, queue_position, retained_bytes, lease_s)
        return self._control(FrameType.ACCEPT, convert.accept_to_bytes(accept))

    def seal(self, report: PrefillReport) -> Frame:
        """SEAL. Raises CorruptKv naming what the engine never exported."""
        self._require(SendState.PREFILLING)
        if not self.ledger.whole:
            raise CorruptKv(f"the engine did not export {self.ledger.describe_missing()}")
        self.state = SendState.SEALED
        self.held = False
        seal = SessionSeal(
            self.ledger.frames,
            self.ledger.raw_bytes,
            self.wire_bytes,
            self.ledger.root_digest(),
            report,
        )
        self.seal_frame = self._control(FrameType.SEAL, convert.seal_to_bytes(seal))
        self._settle()
        return self.seal_frame

    def fail(self, error: PrfaasError) -> Frame:
        """ERROR, once. One more message of what is encoded already may be taken, then it ends:
        the other side learns of it soon, and keeps the chunks that were on their way.
        """
        if self.ended or self.state is SendState.FAILING:
            raise ProtocolError(f"{self!r} has ended already")
        self.retained_bytes -= sum(
            len(each.frame.payload)
            for tensor, frames in self._unasked.items()
            for each in frames
            if each.tensors[0] == tensor
        )
        self._unasked.clear()
        size = 0
        for index, sequence in enumerate(self._queue):
            size += self._retained[sequence].frame.wire_bytes
            if self.held or (index and size > MESSAGE_BYTES):
                for late in list(self._queue)[index:]:
                    self._release(late)
                self._queue = deque(list(self._queue)[:index])
                self._next = sequence
                break
        self.held = False
        self.state = SendState.FAILING
        frame = self._control(FrameType.ERROR, convert.error_to_bytes(error, self._next))
        self._settle()
        return frame

    def cancel(self) -> None:
        """The other side is gone or asked to stop, or waited long enough. Idempotent."""
        if not self.ended:
            self._end(SendState.FAILED if self.state is SendState.FAILING else SendState.CANCELLED)

    def receive(self, frame: Frame) -> None:
        """ACK, RESUME (whose link the caller has checked) or CANCEL; old epochs are dropped.

        Raises ProtocolError for anything else, and for an ACK of what was never sent.
        """
        if frame.session != self.session or frame.epoch > self.epoch:
            raise ProtocolError(f"{frame} is not of {self!r}")
        if frame.epoch < self.epoch or self.ended:
            return
        if frame.type is FrameType.ACK:
            self.acked(convert.ack_from_bytes(frame.payload))
        elif frame.type is FrameType.RESUME:
            self.acked(convert.resume_from_bytes(frame.payload).ack)
        elif frame.type is FrameType.CANCEL:
            self.cancel()
        else:
            raise ProtocolError(f"{frame} may not be sent to the prefill side of an open session")

    def acked(self, ack: SessionAck) -> None:
        """Free what is verified, queue what is lost or asked for, take the credit."""
        verified = ((0, ack.next_sequence), *ack.verified)
        highest = max((end for _, end in (*verified, *ack.held)), default=0)
        if highest > self._next and self.state is not SendState.FAILING:
            raise ProtocolError(f"{self!r}: an ack of frame {highest - 1} that was never sent")
        for start, end in verified:
            for sequence in range(max(start, self._acked.next), min(end, self._next)):
                self._verified(sequence)
        for sequence in ack.missing:
            self._send_again(sequence)
        held = ack.held
        for lane in list(self._on_lane):
            if lane < ack.lanes_opened and lane not in ack.lanes:
                for sequence in list(self._on_lane[lane]):
                    if not any(start <= sequence < end for start, end in held):
                        self._send_again(sequence)
        self._ask(ack.wanted)
        self.credit_bytes = ack.credit_bytes
        self.receive_bytes_per_s = ack.receive_bytes_per_s
        self.report = ack.report
        self._seal_known = self._seal_known or ack.sealed
        self._settle()

    def lane_lost(self, lane: int) -> None:
        """A lane is gone and the receiver did not say so in time: send again what was on it."""
        for sequence in list(self._on_lane.get(lane, ())):
            self._send_again(sequence)

    @property
    def lanes_used(self) -> tuple[int, ...]:
        """Lanes with frames under way."""
        return tuple(self._on_lane)

    # --- KV ---

    def claim(
        self, piece: Piece, nbytes: int, layers: int = 1, *, prepared: bool = False
    ) -> tuple[Piece, ...]:
        """A piece that the engine exported, cut so that no frame has more raw bytes than a message
        should where one token, or one head of a state, is not more than that. Raises ProtocolError:
        it does not fit.

        Of `layers` that will share frames each is cut alike, so that frames of SPAN_BYTES come out.
        What is `prepared` for a codec cannot be cut: it is a message at most, or does not fit.
        """
        self._require(SendState.PREFILLING)
        expected = self.ledger.piece_bytes(piece)
        if nbytes != expected:
            raise ProtocolError(f"{piece}: engine exported {nbytes} bytes, not {expected}")
        early = self._cut_bytes < FIRST_MESSAGES * FIRST_MESSAGE_BYTES
        self._cut_bytes += nbytes
        most = FIRST_MESSAGE_BYTES if early else MESSAGE_BYTES
        if layers > 1:
            most = SPAN_BYTES // layers
        if prepared:
            most = nbytes
            if nbytes > MESSAGE_BYTES:
                raise ProtocolError(f"{piece}: {nbytes} bytes were prepared as one message")
        keeps_state = self.ledger.layout.groups[piece.group].keeps_state
        cuts = tuple(cut_piece(piece, most, nbytes, keeps_state=keeps_state))
        for cut in cuts:
            if not self.ledger.claim(cut):
                raise ProtocolError(f"{cut}: engine exported it twice")
        return cuts

    def put(
        self,
        piece: Piece,
        *more: Piece,
        raw_bytes: int,
        digest: bytes,
        codec: int,
        payload: bytes,
        payload_crc: int | None = None,
        flags: FrameFlag = FrameFlag.NONE,
    ) -> None:
        """A claimed piece, now encoded, or the same place in further layers of its group with it:
        it waits for a lane, and on demand to be asked for.

        Payload of several layers is at most MESSAGE_BYTES: any credit lets it go.
        """
        self._require(SendState.PREFILLING)
        pieces = (piece, *more)
        self.ledger.commit_frame(pieces, digest, raw_bytes)
        frame = Frame(
            type=FrameType.KV,
            session=self.session,
            epoch=self.epoch,
            flags=flags,
            codec=codec,
            group=piece.group,
            chunk=piece.chunk,
            layer_start=piece.layer,
            layer_end=pieces[-1].layer + 1,
            token_start=piece.token_start,
            token_end=piece.token_end,
            head_start=piece.head_start,
            head_end=piece.head_end,
            raw_bytes=raw_bytes,
            sequence=self._next,
            payload=payload,
            payload_crc=payload_crc,
        )
        self.wire_bytes += frame.wire_bytes
        self.retained_bytes += len(payload)
        if self._order is None:
            self._enqueue(frame)
            return
        unasked = _Unasked(frame, tuple(map(self._order.number, pieces)))
        if any(tensor in self._wanted for tensor in unasked.tensors):
            self._enqueue(frame)
        else:
            for tensor in unasked.tensors:
                self._unasked.setdefault(tensor, []).append(unasked)

    def take(self, lane: int, *, app_limited: bool, most_bytes: int = MESSAGE_BYTES) -> list[Frame]:
        """Frames that leave now in one message on `lane`, of `most_bytes` where one frame is not
        more; none where there is nothing to send or no credit. What was lost goes first.
        """
        first = self.messages < FIRST_MESSAGES
        limit = min(most_bytes, FIRST_MESSAGE_BYTES if first else MESSAGE_BYTES)
        frames: list[Frame] = []
        size = 0
        while (sequence := self._peek()) is not None and self._fits(sequence, size):
            kept = self._retained[sequence]
            if frames and size + kept.frame.wire_bytes > limit:
                break
            if self._resend:
                self._resend.popleft()
                self.resent_bytes += kept.frame.wire_bytes
            else:
                self._queue.popleft()
                self.handed_bytes += kept.frame.wire_bytes
            kept.lane = lane
            self._on_lane.setdefault(lane, {})[sequence] = None
            size += kept.frame.wire_bytes
            frames.append(
                with_flag(kept.frame, FrameFlag.APP_LIMITED) if app_limited else kept.frame
            )
        if frames:
            self.messages += 1
            self.outstanding_bytes += size
            self._settle()
        return frames

    def _enqueue(self, frame: Frame) -> None:
        """The next number is this frame's."""
        if frame.sequence != self._next:
            frame = replace(frame, sequence=self._next)
        self._retained[self._next] = _Retained(frame)
        self._queue.append(self._next)
        self._next += 1

    def _ask(self, wanted: tuple[Range, ...]) -> None:
        if wanted and (self._order is None or wanted[-1][1] > len(self._order)):
            raise ProtocolError(f"{self!r}: an ack asks for what there is not")
        for start, end in wanted:
            for first, stop in self._wanted.absent(start, end):
                for tensor in range(first, stop):
                    self._wanted.add(tensor)
                    for each in self._unasked.pop(tensor, ()):
                        self._drop_unasked(each, tensor)
                        self._enqueue(each.frame)

    def _drop_unasked(self, frame: _Unasked, asked: int) -> None:
        for tensor in frame.tensors:
            if tensor != asked:
                self._unasked[tensor].remove(frame)
                if not self._unasked[tensor]:
                    del self._unasked[tensor]

    def _peek(self) -> int | None:
        if self.held or self.state not in _GIVING:
            return None
        if self._resend:
            return self._resend[0]
        return self._queue[0] if self._queue else None

    def _fits(self, sequence: int, more: int) -> bool:
        size = self._retained[sequence].frame.wire_bytes
        return self.outstanding_bytes + more + size <= self.credit_bytes

    def _verified(self, sequence: int) -> None:
        kept = self._retained.get(sequence)
        if kept is None:
            return
        if kept.lane is None and sequence not in self._resend:
            raise ProtocolError(f"{self!r}: an ack of frame {sequence} that was never sent")
        if kept.lane is None:
            self._resend.remove(sequence)
        self._acked.add(sequence)
        self.verified_bytes += kept.frame.wire_bytes
        self._release(sequence)

    def _send_again(self, sequence: int) -> None:
        kept = self._retained.get(sequence)
        if kept is not None and kept.lane is not None:
            self._leave_lane(sequence, kept)
            self._resend.append(sequence)

    def _leave_lane(self, sequence: int, kept: _Retained) -> None:
        if kept.lane is None:
            return
        on_lane = self._on_lane[kept.lane]
        del on_lane[sequence]
        if not on_lane:
            del self._on_lane[kept.lane]
        kept.lane = None
        self.outstanding_bytes -= kept.frame.wire_bytes

    def _release(self, sequence: int) -> None:
        kept = self._retained.pop(sequence)
        self._leave_lane(sequence, kept)
        self.retained_bytes -= len(kept.frame.payload)

    def _settle(self) -> None:
        left = self._retained or self._unasked
        if self.state is SendState.SEALED and self._seal_known and not left:
            self._end(SendState.COMPLETE)
        elif self.state is SendState.FAILING and not self._queue and not self._resend:
            self._end(SendState.FAILED)

    def _end(self, state: SendState) -> None:
        self.state = state
        self._retained.clear()
        self._unasked.clear()
        self._queue.clear()
        self._resend.clear()
        self._on_lane.clear()
        self.outstanding_bytes = self.retained_bytes = 0

    def _control(self, kind: FrameType, payload: bytes) -> Frame:
        return Frame(type=kind, session=self.session, epoch=self.epoch, payload=payload)

    def _require(self, *states: SendState) -> None:
        if self.state not in states:
            raise ProtocolError(f"{self!r} is not {' or '.join(s.name for s in states)}")


def least_credit(layout: KvLayout) -> int:
    """Credit under which a sender could not send its largest frame."""
    unit = max(max(g.token_bytes, g.state_bytes // g.kv_heads) for g in layout.groups)
    return HEADER_BYTES + max(MESSAGE_BYTES, unit)
