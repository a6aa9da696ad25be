"""Pull on demand and push on compute are two orders of one machine."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.codecs import default_codecs
from prfaas.errors import CorruptKv, EngineUnavailable, ProtocolError
from prfaas.frames import Frame, parse_all
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece, piece_digest
from prfaas.memory_kv import whole_tensors
from prfaas.placement import StagingMap
from prfaas.receive_session import Arrival, ReceiveSession, ReceiveState
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import PrefillReport, SessionAck, SessionOpen
from prfaas.testing.kv_contracts import Carried, KvStreamContract, Question, summary

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1, 2), 2, 4, "bfloat16"),))
TOKENS, GRID = 20, 8
TENSORS = 9
KV = np.random.default_rng(0).integers(0, 256, LAYOUT.session_bytes(0, TOKENS), dtype=np.uint8)


class TestInMemory(KvStreamContract):
    async def carry(self, questions: list[Question] | None) -> Carried:
        pair = Pair(on_demand=questions is not None)
        pair.export()
        pair.deliver(pair.p.seal(PrefillReport()))
        came = []
        for chunks, layers in questions or [(None, None)]:
            pair.d.want(chunks, layers)
            pair.ack()
            came += [(piece.chunk, piece.layer) for piece in pair.carry()]
        assert pair.complete()
        return Carried(
            pair.buffer.tobytes(),
            KV.tobytes(),
            summary(pair.p.ledger),
            summary(pair.d.ledger),
            tuple(came),
        )


class Pair:
    """Both machines, joined by memory; the engine exports in wire order."""

    def __init__(
        self, *, on_demand: bool = True, credit: int = 1 << 20, held: bool = False
    ) -> None:
        request = SessionOpen(
            transfer_id="t", model="m", tokens=bytes(4 * TOKENS), send_from=0, salt="",
            use_cache=True, quality="exact", codecs=("raw",), deadline_s=9, lease_s=9,
            engine_epoch="e", link=b"l", credit_bytes=credit, on_demand=on_demand,
            hold_until_sealed=held,
        )  # fmt: skip
        self.p = SendSession(session=7, epoch=1, request=request, layout=LAYOUT, chunk_tokens=GRID)
        self.d = ReceiveSession(
            session=7,
            epoch=1,
            request=request,
            layout=LAYOUT,
            codecs=default_codecs(),
            chunk_tokens=GRID,
        )
        self.source = StagingMap(LAYOUT, 0, TOKENS, GRID, KV)
        self.left = whole_tensors(self.source, 0)
        self.buffer = np.zeros_like(KV)
        self.sink = StagingMap(LAYOUT, 0, TOKENS, GRID, self.buffer)
        self.deliver(self.p.accept(0, 0))

    def export(self, count: int = TENSORS) -> None:
        for piece in self.left[:count]:
            raw = self.source.in_place(piece)
            assert raw is not None
            assert self.p.claim(piece, raw.nbytes) == (piece,)
            self.p.put(
                piece,
                raw_bytes=raw.nbytes,
                digest=piece_digest(raw),
                codec=0,
                payload=raw.tobytes(),
            )
        del self.left[:count]

    def deliver(self, frame: Frame) -> Arrival | None:
        (parsed,) = parse_all(frame.serialize())
        return self.d.receive(parsed)

    def ack(self) -> None:
        (frame,) = parse_all(self.d.ack(0.0, (0,), 1).serialize())
        self.p.receive(frame)

    def carry(self) -> list[Piece]:
        """All that P may send now arrives; its places."""
        came = []
        while frames := self.p.take(0, app_limited=False):
            for frame in frames:
                arrival = self.deliver(frame)
                assert arrival is not None
                self.decode(arrival)
                came.append(arrival.piece)
            self.ack()
        return came

    def decode(self, arrival: Arrival) -> None:
        place = self.sink.in_place(arrival.piece)
        assert place is not None
        place[:] = np.frombuffer(arrival.frame.payload, dtype=np.uint8)
        self.d.decoded(arrival, piece_digest(place))

    def complete(self) -> bool:
        self.ack()
        return (self.p.state, self.d.state) == (SendState.COMPLETE, ReceiveState.COMPLETE)


def test_nothing_leaves_before_it_is_asked_for_and_then_that_alone() -> None:
    pair = Pair()
    pair.export(6)
    pair.ack()
    assert (pair.p.queued, pair.p.sendable, pair.carry()) == (0, False, [])
    assert pair.d.want(layers=range(1, 2))
    assert not pair.d.want(layers=range(1, 2))
    pair.ack()
    assert [(p.chunk, p.layer) for p in pair.carry()] == [(0, 1), (1, 1)]
    assert pair.d.expecting  # chunk 2 is not computed yet
    pair.export()
    assert [(p.chunk, p.layer) for p in pair.carry()] == [(2, 1)]
    assert not pair.d.expecting


def test_frames_are_numbered_as_they_leave_so_acks_stay_short() -> None:
    pair = Pair()
    pair.export()
    for chunk in (2, 0):
        pair.d.want(range(chunk, chunk + 1))
        pair.ack()
        pair.carry()
    assert pair.p.frames == 6
    ack = pair.d._ack({}, 0.0, (0,), 1)
    assert (ack.next_sequence, ack.verified, ack.wanted) == (6, (), ())


def test_what_is_asked_for_is_said_until_it_is_here() -> None:
    pair = Pair()
    pair.d.want(range(1))
    pair.d.ack(0.0, (0,), 1)  # lost with its stream
    (resume,) = parse_all(pair.d.resume((0,), 1).serialize())
    pair.p.receive(resume)
    pair.export()
    assert len(pair.carry()) == 3


def test_a_broken_frame_stays_asked_for() -> None:
    pair = Pair()
    pair.export()
    pair.d.want(range(1, 2), range(1))
    pair.ack()
    (frame,) = pair.p.take(0, app_limited=False)
    arrival = pair.deliver(frame)
    assert arrival is not None
    pair.d.broken(arrival, CorruptKv("flipped"))
    assert pair.d.expecting
    pair.ack()
    assert len(pair.carry()) == 1
    assert not pair.d.expecting


def test_credit_holds_what_was_asked_for() -> None:
    pair = Pair(credit=0)
    pair.export()
    pair.d.want()
    pair.ack()
    assert pair.p.starved
    pair.d.grant(1 << 20)
    pair.ack()
    assert len(pair.carry()) == TENSORS


def test_held_frames_wait_for_the_seal_too() -> None:
    pair = Pair(held=True)
    pair.export()
    pair.d.want(range(1))
    pair.ack()
    assert pair.carry() == []
    pair.deliver(pair.p.seal(PrefillReport()))
    assert len(pair.carry()) == 3


def test_the_seal_may_be_there_long_before_the_last_wish() -> None:
    pair = Pair()
    pair.export()
    pair.deliver(pair.p.seal(PrefillReport()))
    pair.ack()
    assert (pair.p.state, pair.d.state) == (SendState.SEALED, ReceiveState.SEALED)
    assert not pair.d.expecting
    assert pair.p.retained_bytes == KV.nbytes
    pair.d.want()
    pair.ack()
    pair.carry()
    assert pair.complete()
    assert pair.p.retained_bytes == 0


def test_an_error_gives_what_was_asked_for_and_drops_the_rest() -> None:
    pair = Pair()
    pair.export(6)
    pair.d.want(range(1))
    pair.ack()
    assert pair.deliver(pair.p.fail(EngineUnavailable("gone"))) is None
    assert pair.d.state is ReceiveState.FAILING
    assert pair.p.retained_bytes == sum(LAYOUT.session_bytes(0, 8) // 3 for _ in range(3))
    with pytest.raises(EngineUnavailable):
        pair.carry()
    assert (pair.d.ledger.watermark, pair.p.retained_bytes) == (8, 0)
    assert pair.p.state is SendState.FAILED


def test_a_cancel_frees_what_nobody_asked_for() -> None:
    pair = Pair()
    pair.export()
    pair.p.receive(pair.d.cancel())
    assert (pair.p.state, pair.p.retained_bytes) == (SendState.CANCELLED, 0)


def test_wishes_for_what_there_is_not_are_refused() -> None:
    pair, push = Pair(), Pair(on_demand=False)
    with pytest.raises(ProtocolError, match="asks for what there is not"):
        pair.p.acked(SessionAck(wanted=((8, 10),)))
    with pytest.raises(ProtocolError, match="asks for what there is not"):
        push.p.acked(SessionAck(wanted=((0, 1),)))
    assert not push.d.want()
    assert push.d.expecting
