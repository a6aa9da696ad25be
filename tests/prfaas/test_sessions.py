"""Session machines at both ends, joined by an in-memory pipe: no I/O, every kind of bad frame."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.codecs import default_codecs, encode
from prfaas.errors import CorruptKv, EngineUnavailable, Overloaded, PrfaasError, ProtocolError
from prfaas.frames import HEADER_BYTES, Frame, FrameFlag, FrameType, parse_all
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece, piece_digest
from prfaas.receive_session import Arrival, ReceiveSession, ReceiveState
from prfaas.rpc import convert
from prfaas.send_session import MESSAGE_BYTES, SendSession, SendState, least_credit
from prfaas.session_messages import PrefillReport, SessionAck, SessionOpen
from prfaas.testing.kv_pieces import split_pieces

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1, 2), 2, 4, "bfloat16"),))
CODECS = default_codecs()
GRID = 8


def request(send_from: int = 0, tokens: int = 20) -> SessionOpen:
    return SessionOpen(
        transfer_id="t",
        model="m",
        tokens=bytes(4 * tokens),
        send_from=send_from,
        salt="",
        use_cache=True,
        quality="exact",
        codecs=CODECS.names,
        deadline_s=10,
        lease_s=5,
        engine_epoch="e",
        link=b"link",
        credit_bytes=1 << 20,
    )


@dataclass
class Pair:
    """Both machines and what is between them."""

    send: SendSession
    receive: ReceiveSession

    @staticmethod
    def make(send_from: int = 0, tokens: int = 20, *, accepted: bool = True) -> Pair:
        opening = request(send_from, tokens)
        pair = Pair(
            SendSession(session=7, epoch=2, request=opening, layout=LAYOUT, chunk_tokens=GRID),
            ReceiveSession(
                session=7,
                epoch=2,
                request=opening,
                layout=LAYOUT,
                codecs=CODECS,
                chunk_tokens=GRID,
            ),
        )
        if accepted:
            assert pair.deliver(pair.send.accept(0, 0)) is None
        return pair

    def frame(self, piece: Piece, *, flags: FrameFlag = FrameFlag.NONE) -> Frame:
        raw = raw_of(piece)
        assert self.send.claim(piece, raw.nbytes) == (piece,)
        codec = CODECS.negotiate(["planes-zstd"])
        codec_id, payload = encode(codec, raw, 2)
        self.send.put(
            piece,
            raw_bytes=raw.nbytes,
            digest=piece_digest(raw),
            codec=codec_id,
            payload=payload,
            flags=flags,
        )
        (frame,) = self.send.take(0, app_limited=False)
        return frame

    def deliver(self, frame: Frame) -> Arrival | None:
        """Through bytes, as on the wire."""
        (parsed,) = parse_all(frame.serialize())
        return self.receive.receive(parsed)

    def decode(self, arrival: Arrival) -> bool:
        frame = arrival.frame
        assert frame.intact
        out = np.empty(frame.raw_bytes, dtype=np.uint8)
        CODECS.by_id(frame.codec).decode_into(memoryview(frame.payload), out, 2)
        assert (out == raw_of(arrival.piece)).all()
        return self.receive.decoded(arrival, piece_digest(out))

    def ack(self, *, lanes: tuple[int, ...] = (0,), opened: int = 1) -> None:
        (frame,) = parse_all(self.receive.ack(0.0, lanes, opened).serialize())
        self.send.receive(frame)

    def pass_on(self, frame: Frame) -> None:
        arrival = self.deliver(frame)
        assert arrival is not None
        assert self.decode(arrival)

    def pieces(self) -> list[Piece]:
        ledger = self.send.ledger
        heads = LAYOUT.groups[0].kv_heads
        return [
            Piece(e.span.index, e.layer, e.group, e.span.start, e.span.end, 0, heads)
            for e in LAYOUT.extents(ledger.start, ledger.end, GRID)
        ]


def raw_of(piece: Piece) -> np.ndarray:
    """Bytes that differ from piece to piece; half of them compress."""
    nbytes = LAYOUT.groups[0].token_bytes // LAYOUT.groups[0].kv_heads * piece.area
    rng = np.random.default_rng(abs(hash(piece)) % (1 << 32))
    raw = rng.integers(0, 256, nbytes, dtype=np.uint8)
    raw[1::2] = piece.layer
    return raw


@settings(max_examples=40)
@given(
    send_from=st.integers(0, 19),
    seed=st.integers(0, 10_000),
)
def test_any_order_of_pieces_and_of_decoding_completes_once_all_is_there(
    send_from: int, seed: int
) -> None:
    rng = random.Random(seed)
    pair = Pair.make(send_from)
    frames = [pair.frame(p) for p in split_pieces(LAYOUT, send_from, 20, GRID, rng)]
    seal = pair.send.seal(PrefillReport(computed_tokens=20))
    rng.shuffle(frames)
    arrivals = [pair.deliver(frame) for frame in frames]
    pair.deliver(seal)
    assert pair.receive.state is ReceiveState.SEALED
    rng.shuffle(arrivals)
    for arrival in arrivals:
        assert pair.receive.state is ReceiveState.SEALED
        assert arrival is not None
        assert pair.decode(arrival)
    assert pair.receive.state is ReceiveState.COMPLETE
    assert pair.receive.ledger.whole
    assert pair.receive.wire_bytes == pair.send.wire_bytes
    assert pair.receive.wire_bytes == sum(HEADER_BYTES + len(f.payload) for f in frames)
    assert pair.receive.seal is not None
    assert pair.receive.seal.report.computed_tokens == 20


def test_queue_position_is_told_until_the_prefill_starts() -> None:
    pair = Pair.make(accepted=False)
    assert (pair.send.state, pair.receive.state) == (SendState.OPEN, ReceiveState.OPENING)
    for position in (2, 1):
        pair.deliver(pair.send.accept(position, 0))
        assert pair.send.state is SendState.QUEUED
        assert pair.receive.state is ReceiveState.QUEUED
        assert pair.receive.queue_position == position
    pair.deliver(pair.send.accept(0, 100))
    assert pair.send.state is SendState.PREFILLING
    assert pair.receive.state is ReceiveState.RECEIVING


def test_open_carries_the_request() -> None:
    pair = Pair.make(accepted=False)
    (frame,) = parse_all(pair.receive.open().serialize())
    assert (frame.type, frame.session, frame.epoch) == (FrameType.OPEN, 7, 2)
    assert convert.open_from_bytes(frame.payload) == request()


def test_an_error_comes_out_as_the_class_that_went_in() -> None:
    pair = Pair.make()
    frame = pair.send.fail(Overloaded("full", retry_after_s=2.5))
    with pytest.raises(Overloaded, match="full") as caught:
        pair.deliver(frame)
    assert caught.value.retry_after_s == 2.5
    assert (pair.send.state, pair.receive.state) == (SendState.FAILED, ReceiveState.FAILED)
    with pytest.raises(ProtocolError, match="ended already"):
        pair.send.fail(EngineUnavailable("gone"))


def test_whole_chunks_are_kept_when_the_session_fails() -> None:
    pair = Pair.make(send_from=3)
    for piece in pair.pieces()[:2]:
        pair.pass_on(pair.frame(piece))
    third = pair.deliver(pair.frame(pair.pieces()[2]))
    assert third is not None
    assert pair.deliver(pair.send.fail(EngineUnavailable("gone"))) is None
    assert pair.send.state is SendState.FAILED
    assert pair.receive.state is ReceiveState.FAILING
    assert pair.receive.ledger.watermark == 3
    with pytest.raises(EngineUnavailable):
        pair.decode(third)  # had been sent before the failure
    assert pair.receive.state is ReceiveState.FAILED
    assert pair.receive.ledger.watermark == 8


def test_an_error_gives_one_more_message_of_what_is_encoded() -> None:
    tokens = MESSAGE_BYTES // 32  # one chunk of one layer is two messages
    wide = KvLayout((LayerGroup(GroupKind.FULL, (0,), 2, 4, "bfloat16"),))
    opening = replace(request(0, 2 * tokens), credit_bytes=1 << 30)
    send = SendSession(session=7, epoch=2, request=opening, layout=wide, chunk_tokens=2 * tokens)
    send.accept(0, 0)
    piece = Piece(0, 0, 0, 0, 2 * tokens, 0, 2)
    for cut in send.claim(piece, send.ledger.piece_bytes(piece)):
        nbytes = send.ledger.piece_bytes(cut)
        send.put(cut, raw_bytes=nbytes, digest=b"", codec=0, payload=bytes(nbytes))
    before = send.frames
    error = convert.session_error_from_bytes(send.fail(EngineUnavailable("gone")).payload)
    assert 0 < error.frames < before
    assert send.state is SendState.FAILING
    taken = []
    while frames := send.take(0, app_limited=False):
        taken += frames
    assert [f.sequence for f in taken] == list(range(error.frames))
    assert send.state is SendState.FAILED
    assert (send.retained_bytes, send.outstanding_bytes) == (0, 0)


def test_a_duplicate_frame_is_dropped_and_counted() -> None:
    pair = Pair.make()
    frames = [pair.frame(p) for p in pair.pieces()]
    first = pair.deliver(frames[0])
    assert first is not None
    assert pair.deliver(frames[0]) is None
    pair.decode(first)
    assert pair.deliver(frames[0]) is None
    assert pair.receive.duplicates == 2
    for frame in frames[1:]:
        pair.pass_on(frame)
    pair.deliver(pair.send.seal(PrefillReport()))
    assert pair.receive.state is ReceiveState.COMPLETE


def test_frames_of_an_older_epoch_are_late_whatever_they_are() -> None:
    pair = Pair.make()
    frame = pair.frame(pair.pieces()[0])
    assert pair.deliver(replace(frame, epoch=1)) is None
    assert pair.deliver(replace(pair.send.fail(Overloaded("x")), epoch=1)) is None
    assert pair.receive.late == 2
    assert pair.receive.state is ReceiveState.RECEIVING


def test_after_a_cancel_everything_is_late_and_nothing_is_committed() -> None:
    pair = Pair.make()
    first, second = (pair.frame(p) for p in pair.pieces()[:2])
    arrival = pair.deliver(first)
    assert arrival is not None
    cancel = pair.receive.cancel()
    pair.send.receive(cancel)
    assert pair.send.state is SendState.CANCELLED
    assert pair.deliver(second) is None
    assert not pair.decode(arrival)
    assert pair.receive.late == 2
    assert pair.receive.ledger.frames == 0
    assert pair.receive.state is ReceiveState.CANCELLED


def test_a_seal_before_accept_is_refused() -> None:
    pair = Pair.make(accepted=False)
    with pytest.raises(ProtocolError, match="while OPENING"):
        pair.receive.receive(Frame(FrameType.SEAL, 7, 2))
    assert pair.receive.state is ReceiveState.FAILED


def test_a_lane_may_be_faster_than_the_stream_that_carries_accept() -> None:
    pair = Pair.make(accepted=False)
    accept = pair.send.accept(0, 0)
    pair.pass_on(pair.frame(pair.pieces()[0]))
    assert pair.receive.state is ReceiveState.RECEIVING
    assert pair.deliver(accept) is None
    assert pair.receive.state is ReceiveState.RECEIVING


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"session": 8}, ProtocolError, "is not of"),
        ({"epoch": 3}, ProtocolError, "is not of"),
        ({"layer_end": 3}, ProtocolError, "one layer"),
        ({"raw_bytes": 255}, ProtocolError, "the layout has 256"),
        ({"raw_bytes": 1 << 62}, ProtocolError, "the layout has 256"),
        ({"payload": bytes(257)}, ProtocolError, "longer than its 256 raw bytes"),
        ({"codec": 9}, CorruptKv, "codec 9"),
        ({"codec": 3}, CorruptKv, "codec 3"),  # int8 may be here, but the session is exact
        ({"chunk": 9}, ProtocolError, "chunk is not in"),
        ({"group": 1}, ProtocolError, "1 groups"),
        ({"layer_start": 3, "layer_end": 4}, ProtocolError, "layer is not in the group"),
        ({"token_end": 9}, ProtocolError, "tokens are not within"),
        ({"head_end": 3}, ProtocolError, "2 heads"),
        ({"type": FrameType.OPEN}, ProtocolError, "may not be sent"),
        ({"type": FrameType.ACK}, ProtocolError, "may not be sent"),
        ({"type": FrameType.ACCEPT, "payload": b"\xff"}, ProtocolError, "not a SessionAccept"),
        ({"type": FrameType.SEAL, "payload": b"\xff"}, ProtocolError, "not a SessionSeal"),
        ({"type": FrameType.ERROR, "payload": b"\xff"}, ProtocolError, "not a ErrorDetail"),
    ],
)
def test_a_frame_that_breaks_the_rules_fails_the_session(
    changes: dict[str, object], error: type[PrfaasError], says: str
) -> None:
    pair = Pair.make()
    frame = pair.frame(pair.pieces()[0])
    with pytest.raises(error, match=says):
        pair.receive.receive(replace(frame, **changes))  # type: ignore[arg-type]
    assert pair.receive.state is ReceiveState.FAILED
    assert pair.deliver(frame) is None
    assert pair.receive.late == 1


def test_a_chunk_grid_that_differs_from_the_handshake_is_refused() -> None:
    pair = Pair.make(accepted=False)
    other = SendSession(session=7, epoch=2, request=request(), layout=LAYOUT, chunk_tokens=16)
    with pytest.raises(ProtocolError, match="chunks of 16 tokens, 8 in the handshake"):
        pair.deliver(other.accept(0, 0))


def test_a_layer_the_engine_never_exported_is_an_error_at_the_seal_that_names_it() -> None:
    pair = Pair.make()
    for piece in pair.pieces():
        if (piece.chunk, piece.layer) != (1, 2):
            pair.pass_on(pair.frame(piece))
    with pytest.raises(CorruptKv, match="did not export chunk 1 group 0 layer 2"):
        pair.send.seal(PrefillReport())
    assert pair.send.state is SendState.PREFILLING


def test_what_was_on_a_lost_lane_is_sent_again_and_nothing_else() -> None:
    pair = Pair.make()
    frames = [pair.frame(p) for p in pair.pieces()]
    for frame in [*frames[:4], *frames[5:]]:
        pair.pass_on(frame)
    held = pair.deliver(frames[4])
    assert held is not None
    pair.ack()
    assert pair.send.take(1, app_limited=False) == []
    pair.deliver(pair.send.seal(PrefillReport()))
    assert pair.receive.state is ReceiveState.SEALED
    pair.ack(lanes=(), opened=1)  # lane 0 is gone, but its frame is here: it is being decoded
    assert pair.send.take(1, app_limited=False) == []
    pair.receive.broken(held, CorruptKv("flipped"))
    pair.ack(lanes=(1,), opened=2)
    (again,) = pair.send.take(1, app_limited=False)
    assert again.sequence == 4
    pair.ack(lanes=(), opened=2)  # and that one is lost with lane 1
    (once_more,) = pair.send.take(2, app_limited=False)
    pair.pass_on(once_more)
    assert pair.receive.state is ReceiveState.COMPLETE
    pair.ack()
    assert pair.send.state is SendState.COMPLETE
    assert pair.send.resent_bytes == 2 * again.wire_bytes


def test_without_a_word_of_the_receiver_a_lost_lane_is_sent_again_too() -> None:
    pair = Pair.make()
    frame = pair.frame(pair.pieces()[0])
    assert pair.send.lanes_used == (0,)
    pair.send.lane_lost(0)
    assert pair.send.outstanding_bytes == 0
    assert pair.send.take(1, app_limited=False) == [frame]


def test_broken_frames_are_fetched_again_and_ten_in_a_row_fail() -> None:
    pair = Pair.make()
    good = pair.frame(pair.pieces()[0])
    frame = pair.frame(pair.pieces()[1])
    for count in range(1, 10):
        arrival = pair.deliver(frame)
        assert arrival is not None
        pair.receive.broken(arrival, CorruptKv("flipped"))
        assert pair.receive.corrupt == count
        pair.ack()
        (frame,) = pair.send.take(0, app_limited=False)
    pair.pass_on(good)  # not in a row any more
    for _ in range(9):
        arrival = pair.deliver(frame)
        assert arrival is not None
        pair.receive.broken(arrival, CorruptKv("flipped"))
    arrival = pair.deliver(frame)
    assert arrival is not None
    with pytest.raises(CorruptKv, match="10 broken frames in a row: flipped"):
        pair.receive.broken(arrival, CorruptKv("flipped"))
    assert pair.receive.state is ReceiveState.FAILED


def test_resume_says_again_what_is_missing() -> None:
    pair = Pair.make()
    arrival = pair.deliver(pair.frame(pair.pieces()[0]))
    assert arrival is not None
    pair.receive.broken(arrival, CorruptKv("flipped"))
    pair.receive.ack(0.0, (0,), 1)  # lost with the stream
    (resume,) = parse_all(pair.receive.resume((0,), 1).serialize())
    assert convert.resume_from_bytes(resume.payload).link == b"link"
    pair.send.receive(resume)
    (again,) = pair.send.take(0, app_limited=False)
    pair.pass_on(again)


def test_no_more_than_the_credit_is_under_way() -> None:
    pair = Pair.make()
    assert pair.send.sendable is False
    frame = pair.frame(pair.pieces()[0])
    pair.receive.grant(frame.wire_bytes)
    pair.ack()
    piece = pair.pieces()[1]
    raw = raw_of(piece)
    pair.send.claim(piece, raw.nbytes)
    pair.send.put(piece, raw_bytes=raw.nbytes, digest=b"", codec=0, payload=raw.tobytes())
    assert pair.send.starved
    assert pair.send.take(0, app_limited=False) == []
    pair.receive.grant(least_credit(LAYOUT))
    pair.ack()
    assert not pair.send.starved
    assert len(pair.send.take(0, app_limited=False)) == 1


def test_a_sender_that_exceeds_its_credit_is_refused() -> None:
    pair = Pair.make()
    pair.receive._most_credit = 10
    with pytest.raises(ProtocolError, match="of its credit"):
        pair.deliver(pair.frame(pair.pieces()[0]))


def test_an_ack_of_what_was_never_sent_is_refused() -> None:
    pair = Pair.make()
    pair.frame(pair.pieces()[0])
    with pytest.raises(ProtocolError, match="never sent"):
        pair.send.acked(SessionAck(2))
    piece = pair.pieces()[1]
    pair.send.claim(piece, 256)
    pair.send.put(piece, raw_bytes=256, digest=b"", codec=0, payload=bytes(256))
    with pytest.raises(ProtocolError, match="never sent"):
        pair.send.acked(SessionAck(0, ((1, 2),)))


def test_held_frames_leave_after_the_seal() -> None:
    opening = replace(request(), hold_until_sealed=True)
    send = SendSession(session=7, epoch=2, request=opening, layout=LAYOUT, chunk_tokens=GRID)
    send.accept(0, 0)
    pair = Pair.make()
    for piece in pair.pieces():
        raw = raw_of(piece)
        send.claim(piece, raw.nbytes)
        send.put(piece, raw_bytes=raw.nbytes, digest=b"", codec=0, payload=raw.tobytes())
        assert (send.queued, send.take(0, app_limited=False)) == (0, [])
    send.seal(PrefillReport())
    assert len(send.take(0, app_limited=False)) == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"root_digest": bytes(16)}, "root digest"),
        ({"frames": 8}, "counts 8 frames"),
        ({"raw_bytes": 1}, "and 1 bytes"),
    ],
)
def test_a_seal_that_disagrees_is_corrupt(change: dict[str, object], says: str) -> None:
    pair = Pair.make()
    for piece in pair.pieces():
        pair.pass_on(pair.frame(piece))
    frame = pair.send.seal(PrefillReport())
    seal = replace(convert.seal_from_bytes(frame.payload), **change)  # type: ignore[arg-type]
    with pytest.raises(CorruptKv, match=says):
        pair.deliver(replace(frame, payload=convert.seal_to_bytes(seal)))
    assert pair.receive.state is ReceiveState.FAILED
    assert pair.receive.ledger.watermark == 0  # nobody knows which part is wrong


def test_other_bytes_under_the_right_crc_are_found_at_the_seal() -> None:
    pair = Pair.make()
    *frames, last = (pair.frame(p) for p in pair.pieces())
    for frame in frames:
        pair.pass_on(frame)
    arrival = pair.deliver(last)
    assert arrival is not None
    pair.deliver(pair.send.seal(PrefillReport()))
    with pytest.raises(CorruptKv, match="root digest"):
        pair.receive.decoded(arrival, piece_digest(b"other"))


def test_the_engine_may_not_export_rubbish() -> None:
    pair = Pair.make()
    piece = pair.pieces()[0]
    with pytest.raises(ProtocolError, match="exported 255 bytes, not 256"):
        pair.send.claim(piece, 255)
    pair.frame(piece)
    with pytest.raises(ProtocolError, match="exported it twice"):
        pair.send.claim(piece, 256)
    with pytest.raises(ProtocolError, match="overlaps"):
        pair.send.claim(replace(piece, token_start=1), 256 * 7 // 8)


@pytest.mark.parametrize(
    ("token_bytes", "tokens", "cuts"),
    [(1 << 18, 8, [1] * 8), (1 << 16, 9, [4, 4, 1]), (1 << 21, 2, [1, 1]), (64, 8, [8])],
)
def test_a_large_record_is_cut_by_tokens(token_bytes: int, tokens: int, cuts: list[int]) -> None:
    layout = KvLayout((LayerGroup(GroupKind.FULL, (0,), 16, token_bytes // 64, "bfloat16"),))
    send = SendSession(
        session=7, epoch=2, request=request(0, tokens), layout=layout, chunk_tokens=tokens
    )
    send.accept(0, 0)
    found = send.claim(Piece(0, 0, 0, 0, tokens, 0, 16), token_bytes * tokens)
    assert [c.token_end - c.token_start for c in found] == cuts
    assert (found[0].token_start, found[-1].token_end) == (0, tokens)


def test_messages_are_small_at_first_and_then_grow() -> None:
    part = 1 << 17
    layout = KvLayout((LayerGroup(GroupKind.FULL, (0,), 2, part // 8, "bfloat16"),))
    opening = replace(request(0, 60), credit_bytes=1 << 30)
    send = SendSession(session=7, epoch=2, request=opening, layout=layout, chunk_tokens=1)
    send.accept(0, 0)
    for at in range(60):
        piece = Piece(at, 0, 0, at, at + 1, 0, 2)
        send.claim(piece, part)
        send.put(piece, raw_bytes=part, digest=b"", codec=0, payload=bytes(part - HEADER_BYTES))
    sizes = [sum(f.wire_bytes for f in send.take(0, app_limited=False)) for _ in range(6)]
    assert sizes == [256 << 10] * 4 + [1 << 20] * 2


def test_acks_free_what_is_verified_and_old_ones_do_not() -> None:
    pair = Pair.make()
    pair.pass_on(pair.frame(pair.pieces()[0]))
    retained = pair.send.retained_bytes
    assert retained > 0
    ack = pair.receive.ack(1e6, (0,), 1)
    pair.send.receive(replace(ack, epoch=1))
    assert pair.send.retained_bytes == retained
    pair.send.receive(ack)
    assert (pair.send.retained_bytes, pair.send.outstanding_bytes) == (0, 0)
    assert pair.send.receive_bytes_per_s == 1e6
    with pytest.raises(ProtocolError, match="is not of"):
        pair.send.receive(replace(ack, session=9))
    with pytest.raises(ProtocolError, match="may not be sent to the prefill side"):
        pair.send.receive(replace(ack, type=FrameType.KV))


def test_flags_and_states_are_visible() -> None:
    pair = Pair.make()
    arrival = pair.deliver(pair.frame(pair.pieces()[0], flags=FrameFlag.APP_LIMITED))
    assert arrival is not None
    assert arrival.app_limited
    assert repr(pair.send) == "<SendSession 7 e=2 PREFILLING <Ledger [0,20) whole to 0 frames=1>>"
    assert "RECEIVING" in repr(pair.receive)
    pair.send.cancel()
    with pytest.raises(ProtocolError, match=r"CANCELLED .* is not PREFILLING"):
        pair.send.seal(PrefillReport())


def test_a_sealed_session_is_kept_until_the_seal_was_heard() -> None:
    pair = Pair.make()
    for piece in pair.pieces():
        pair.pass_on(pair.frame(piece))
    seal = pair.send.seal(PrefillReport())  # and the control stream breaks
    (resume,) = parse_all(pair.receive.resume((0,), 1).serialize())
    pair.send.receive(resume)
    assert (pair.send.state, pair.send.retained_bytes) == (SendState.SEALED, 0)
    pair.deliver(seal)
    pair.ack()
    assert pair.send.state is SendState.COMPLETE
