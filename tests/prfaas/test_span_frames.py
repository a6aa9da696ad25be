"""Frames of several layers in the session machines: claimed, sealed, lost, asked for, refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.codecs import CodecSet, Quality
from prfaas.errors import CorruptKv, ProtocolError
from prfaas.frames import Frame, parse_all
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece
from prfaas.receive_session import Arrival, ReceiveSession, ReceiveState
from prfaas.send_session import SPAN_BYTES, SendSession, SendState
from prfaas.session_messages import PrefillReport, SessionOpen

GROUP = LayerGroup(GroupKind.FULL, (0, 2, 3, 5), 2, 4, "bfloat16")
LAYOUT = KvLayout((GROUP, LayerGroup(GroupKind.FULL, (1, 4), 1, 8, "bfloat16")))
SPAN = (0, 2, 3)
GRID, TOKENS = 8, 16


class Together:
    """A codec that takes layers 0, 2 and 3 of the first group together."""

    id, name, quality, spans, model_identity = 6, "compact-basis@x", Quality.COMPACT, (SPAN,), ""

    def encode(self, raw: Any, shape: Any) -> bytes | None:
        raise AssertionError("not in this test")

    def decode_into(self, payload: memoryview, out: Any, shape: Any) -> None:
        raise AssertionError("not in this test")


class Pair:
    """Both machines; payloads are of no meaning here."""

    def __init__(self, *, on_demand: bool = False) -> None:
        codecs = CodecSet((Together(),))
        opening = SessionOpen(
            transfer_id="t", model="m", tokens=bytes(4 * TOKENS), send_from=0, salt="",
            use_cache=True, quality="compact", codecs=codecs.names, deadline_s=10, lease_s=5,
            engine_epoch="e", link=b"l", credit_bytes=1 << 20, on_demand=on_demand,
        )  # fmt: skip
        self.p = SendSession(session=7, epoch=1, request=opening, layout=LAYOUT, chunk_tokens=GRID)
        self.d = ReceiveSession(
            session=7, epoch=1, request=opening, layout=LAYOUT, codecs=codecs, chunk_tokens=GRID
        )
        self.d.receive(self.p.accept(0, 0))

    def put(self, chunk: int, group: int, *layers: int) -> None:
        start, heads = GRID * chunk, LAYOUT.groups[group].kv_heads
        pieces = [Piece(chunk, n, group, start, start + GRID, 0, heads) for n in layers]
        sizes = [self.p.ledger.piece_bytes(piece) for piece in pieces]
        for piece, size in zip(pieces, sizes, strict=True):
            assert self.p.claim(piece, size, len(layers)) == (piece,)
        codec = 6 if len(layers) > 1 else 0
        payload = bytes(range(100)) if codec else bytes(sum(sizes))
        self.p.put(
            *pieces, raw_bytes=sum(sizes), digest=b"", codec=codec, payload=payload
        )  # fmt: skip

    def put_chunk(self, chunk: int) -> None:
        for group, layers in ((0, SPAN), (1, (1,)), (1, (4,)), (0, (5,))):
            self.put(chunk, group, *layers)

    def deliver(self, frame: Frame) -> Arrival:
        (parsed,) = parse_all(frame.serialize())
        arrival = self.d.receive(parsed)
        assert arrival is not None
        return arrival

    def ack(self, lanes: tuple[int, ...] = (0,), opened: int = 1) -> None:
        self.p.receive(self.d.ack(0.0, lanes, opened))

    def carry(self) -> list[tuple[int, ...]]:
        """All that P may send arrives and verifies; the layers of each frame."""
        came = []
        while frames := self.p.take(0, app_limited=False):
            for frame in frames:
                arrival = self.deliver(frame)
                self.d.decoded(arrival, b"")
                came.append(tuple(piece.layer for piece in arrival.pieces))
            self.ack()
        return came

    def finish(self) -> None:
        self.d.receive(self.p.seal(PrefillReport(0, TOKENS, 0.0, 0.0, 0.0)))
        self.ack()
        assert (self.d.state, self.p.state) == (ReceiveState.COMPLETE, SendState.COMPLETE)


def test_a_frame_of_a_span_fills_all_its_layers_and_counts_once() -> None:
    pair = Pair()
    for chunk in (0, 1):
        pair.put_chunk(chunk)
        assert pair.carry() == [SPAN, (1,), (4,), (5,)]
        assert pair.d.ledger.watermark == GRID * (chunk + 1)
    assert pair.d.ledger.frames == pair.p.ledger.frames == 8
    assert pair.d.carried[6].raw_bytes == 2 * 3 * GRID * GROUP.token_bytes
    pair.finish()


def test_a_span_that_came_broken_or_was_lost_comes_again() -> None:
    pair = Pair()
    pair.put_chunk(0)
    frames = pair.p.take(0, app_limited=False)
    arrival = pair.deliver(frames[0])
    pair.d.broken(arrival, CorruptKv("crc"))
    assert not pair.d.ledger.watermark
    pair.ack(lanes=(), opened=1)  # the lane is gone, and the rest with it
    assert pair.carry() == [SPAN, (1,), (4,), (5,)]
    assert pair.d.ledger.watermark == GRID
    pair.put_chunk(1)
    pair.carry()
    pair.finish()


def test_on_demand_a_span_comes_for_any_of_its_layers_and_once() -> None:
    pair = Pair(on_demand=True)
    pair.put_chunk(0)
    assert pair.carry() == []
    assert pair.d.want(range(1), range(2, 3))
    pair.ack()
    assert pair.carry() == [SPAN]
    assert not pair.d.want(range(1), range(1)), "it is here already"
    assert pair.d.want(range(1), range(5, 6))
    pair.ack()
    assert pair.carry() == [(5,)]
    assert pair.d.want(range(2), range(4))  # before it is made
    pair.ack()
    assert pair.carry() == [(1,)]
    pair.put_chunk(1)
    assert pair.carry() == [SPAN, (1,)]
    pair.d.want()
    pair.ack()
    assert pair.carry() == [(4,), (4,), (5,)]
    assert pair.p.retained_bytes == 0
    pair.finish()


def test_a_failure_frees_each_span_that_nobody_asked_for_once() -> None:
    pair = Pair(on_demand=True)
    pair.put_chunk(0)
    assert pair.p.retained_bytes > 0
    pair.p.fail(CorruptKv("boom"))
    assert pair.p.retained_bytes == 0
    assert pair.p.ended


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_end": 3}, "takes one layer in a frame, or"),
        ({"layer_end": 5}, "takes one layer in a frame, or"),
        ({"layer_end": 6}, "takes one layer in a frame, or"),
        ({"layer_end": 65535}, "takes one layer in a frame, or"),
        ({"layer_start": 1}, "takes one layer in a frame, or"),
        ({"group": 1}, "takes one layer in a frame, or"),
        ({"group": 9}, "takes one layer in a frame, or"),
        ({"codec": 0}, "takes one layer in a frame, or"),
        ({"raw_bytes": GRID * GROUP.token_bytes}, "the layout has 768"),
        ({"payload": bytes(769)}, "longer than its 768 raw bytes"),
        ({"token_end": 9}, "tokens are not within"),
    ],
)
def test_layers_that_the_codec_does_not_take_together_fail_the_session(
    changes: dict[str, Any], says: str
) -> None:
    pair = Pair()
    pair.put(0, 0, *SPAN)
    (frame,) = pair.p.take(0, app_limited=False)
    with pytest.raises(ProtocolError, match=says):
        pair.d.receive(replace(frame, **changes))
    assert pair.d.state is ReceiveState.FAILED


def test_a_layer_that_is_there_already_may_not_come_in_a_span() -> None:
    pair = Pair()
    pair.put(0, 0, *SPAN)
    (frame,) = pair.p.take(0, app_limited=False)
    alone = replace(
        frame, layer_start=2, layer_end=3, codec=0, sequence=1, payload=bytes(256), raw_bytes=256,
        payload_crc=None,
    )  # fmt: skip
    pair.deliver(alone)
    with pytest.raises(ProtocolError, match="its place is taken"):
        pair.d.receive(frame)


def test_layers_of_a_span_are_cut_alike_whatever_came_before() -> None:
    layout = KvLayout((LayerGroup(GroupKind.FULL, tuple(range(4)), 8, 128, "bfloat16"),))
    tokens = 1024
    request = replace(Pair().p.request, tokens=bytes(4 * tokens))
    send = SendSession(session=7, epoch=1, request=request, layout=layout, chunk_tokens=tokens)
    send.accept(0, 0)
    nbytes = layout.groups[0].token_bytes * tokens
    cuts = [send.claim(Piece(0, n, 0, 0, tokens, 0, 8), nbytes, 4) for n in range(4)]
    places = [[replace(cut, layer=0) for cut in of_layer] for of_layer in cuts]
    assert places[0] == places[1] == places[2] == places[3]
    assert sum(map(send.ledger.piece_bytes, (of_layer[0] for of_layer in cuts))) == SPAN_BYTES
