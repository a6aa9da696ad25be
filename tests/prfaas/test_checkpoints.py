"""States travel at checkpoints: which those are, where they go, and what a failure leaves."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.codecs import default_codecs, encode
from prfaas.errors import CorruptKv, EngineUnavailable, IncompatibleLayout, ProtocolError
from prfaas.frames import HEADER_BYTES, parse_all
from prfaas.layout import Fingerprint, GroupKind, KvLayout, LayerGroup, LayoutError
from prfaas.ledger import Ledger, Piece, piece_digest
from prfaas.placement import StagingMap, cut_piece, part_of
from prfaas.receive_session import ReceiveSession, ReceiveState
from prfaas.rpc import convert
from prfaas.send_session import FIRST_MESSAGE_BYTES, SendSession, least_credit
from prfaas.session_messages import Feature, Handshake, PrefillReport, SessionOpen
from prfaas.testing.kv_pieces import split_pieces

KV = LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16")
STATE = LayerGroup(GroupKind.RECURRENT, (1, 3), 2, 2, "float32", state_dim=3)
LAYOUT = KvLayout((KV, STATE))
"""64 bytes of KV for each token, 96 of states: a checkpoint needs 15 tokens or more."""
CODECS = default_codecs()

layouts = st.builds(
    lambda layers, heads, dim, rows: KvLayout(
        (
            LayerGroup(GroupKind.FULL, tuple(range(layers)), 1, 2, "bfloat16"),
            LayerGroup(GroupKind.RECURRENT, (layers,), heads, dim, "float32", rows),
        )
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)
starts, lengths, grids = st.integers(0, 100), st.integers(1, 300), st.integers(1, 40)


# --- the rule ---


@given(layouts, starts, lengths, grids)
def test_states_are_a_tenth_of_the_kv_before_the_end(
    layout: KvLayout, start: int, length: int, grid: int
) -> None:
    end = start + length
    points = layout.checkpoints(start, end, grid)
    assert points[-1] == end
    assert points == sorted(set(points))
    last = start
    for point in points[:-1]:
        assert point % grid == 0
        assert 10 * layout.state_bytes <= layout.token_bytes * (point - last)
        # And at no earlier end of a chunk would they have been.
        before = point - grid
        assert before <= last or 10 * layout.state_bytes > layout.token_bytes * (before - last)
        last = point


@given(layouts, starts, lengths, grids, st.data())
def test_a_session_cut_at_a_checkpoint_has_the_others_where_they_were(
    layout: KvLayout, start: int, length: int, grid: int, data: st.DataObject
) -> None:
    end = start + length
    points = layout.checkpoints(start, end, grid)
    cut = data.draw(st.sampled_from(points))
    assert layout.checkpoints(start, cut, grid) == [p for p in points if p <= cut]
    assert layout.checkpoints(cut, end, grid) == [p for p in points if p > cut]
    whole = list(layout.extents(start, end, grid))
    first = list(layout.extents(start, cut, grid))
    assert whole[: len(first)] == first
    rest = [replace(e, offset=e.offset - sum(f.nbytes for f in first)) for e in whole[len(first) :]]
    assert list(layout.extents(cut, end, grid)) == rest


@given(layouts, starts, lengths, grids)
def test_extents_are_in_wire_order_and_within_what_any_grid_needs(
    layout: KvLayout, start: int, length: int, grid: int
) -> None:
    end, at, order = start + length, 0, []
    for extent in layout.extents(start, end, grid):
        assert extent.offset == at
        at += extent.nbytes
        order.append((extent.span.index, extent.layer, extent.group))
    assert order == sorted(order)
    assert at == layout.extent_bytes(start, end, grid)
    assert at <= layout.session_bytes(start, end)


def test_a_layout_without_states_has_no_checkpoints() -> None:
    plain = KvLayout((KV,))
    assert plain.checkpoints(0, 100, 8) == []
    assert plain.session_bytes(3, 20) == plain.extent_bytes(3, 20, 8) == 17 * plain.token_bytes
    assert LAYOUT.checkpoints(7, 7, 8) == []
    assert LAYOUT.extent_bytes(7, 7, 8) == LAYOUT.session_bytes(7, 7) == 0


# --- layout and fingerprint ---


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dtype": "bfloat16"}, "float32, not 'bfloat16'"),
        ({"state_dim": 0}, "state_dim"),
        ({"state_dim": 1 << 16}, "state_dim"),
        ({"kind": "full"}, "a full group has no state_dim"),
        ({"kind": "conv"}, "'conv' is not implemented"),
        ({"state_dim": 4096, "head_dim": 4096}, "the state of a head"),
    ],
)
def test_bad_groups_of_states_say_what_is_wrong(change: dict[str, object], names: str) -> None:
    data = LAYOUT.to_dict()
    data["groups"][1] |= change
    with pytest.raises(LayoutError, match=names):
        KvLayout.from_dict(data)


def test_the_layout_crosses_json_and_protobuf() -> None:
    assert KvLayout.from_dict(LAYOUT.to_dict()) == LAYOUT
    mine = handshake(LAYOUT)
    assert convert.handshake_from_request(convert.handshake_request(mine)) == mine


def handshake(layout: KvLayout, features: Feature = Feature.RECURRENT) -> Handshake:
    print_ = Fingerprint(1, "model", "config", "tokenizer", (), layout)
    return Handshake("d", "m", 1, 0, features, print_, ("raw",))


def test_a_peer_that_does_not_speak_of_states_is_refused_in_a_sentence() -> None:
    mine = handshake(LAYOUT)
    mine.require_compatible(handshake(LAYOUT))
    old = replace(handshake(LAYOUT, Feature.NONE), name="fra-1")
    with pytest.raises(IncompatibleLayout) as caught:
        mine.require_compatible(old)
    assert caught.value.field == "features"
    assert caught.value.message == (
        "the model here has layers of kind 'recurrent', and 'fra-1' does not speak feature "
        "'recurrent'"
    )
    handshake(KvLayout((KV,))).require_compatible(handshake(KvLayout((KV,)), Feature.NONE))


def test_another_shape_of_state_is_refused_by_name() -> None:
    other = KvLayout((KV, replace(STATE, state_dim=5)))
    with pytest.raises(IncompatibleLayout) as caught:
        handshake(LAYOUT).require_compatible(handshake(other))
    assert caught.value.field == "groups[1].state_dim"


# --- ledger ---


@settings(max_examples=60)
@given(st.integers(0, 20), st.integers(1, 80), st.integers(1, 12), st.integers(0, 1000))
def test_the_ledger_can_be_resumed_at_the_last_checkpoint_before_which_all_is_there(
    start: int, length: int, grid: int, seed: int
) -> None:
    end, rng = start + length, random.Random(seed)
    pieces = split_pieces(LAYOUT, start, end, grid, rng)
    points = LAYOUT.checkpoints(start, end, grid)
    ledger, left = Ledger(LAYOUT, start, end, grid), set(pieces)
    rng.shuffle(pieces)
    for piece in pieces:
        assert not ledger.whole
        nbytes = ledger.piece_bytes(piece)
        assert ledger.claim(piece)
        ledger.commit(piece, piece_digest(b""), nbytes)
        left.remove(piece)
        first_open = min((p.chunk for p in left), default=None)
        whole = end if first_open is None else max(start, first_open * grid)
        assert ledger.watermark == whole
        assert ledger.resumable == max((p for p in points if p <= whole), default=start)
    assert ledger.whole
    assert ledger.raw_bytes == LAYOUT.extent_bytes(start, end, grid)
    assert list(ledger.missing()) == []


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (Piece(0, 1, 1, 0, 8, 0, 2), "does not end at a checkpoint"),
        (Piece(1, 1, 1, 9, 16, 0, 2), r"a state is of all tokens \[8,16\)"),
        (Piece(1, 1, 1, 8, 16, 0, 3), "2 heads"),
        (Piece(1, 0, 1, 8, 16, 0, 2), "layer is not in the group"),
    ],
)
def test_a_state_out_of_place_is_named(piece: Piece, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Ledger(LAYOUT, 0, 40, 8).piece_bytes(piece)


def test_a_missing_state_is_named() -> None:
    ledger = Ledger(LAYOUT, 0, 12, 8)
    assert list(ledger.missing()) == [
        "chunk 0 group 0 layer 0",
        "chunk 0 group 0 layer 2",
        "chunk 1 group 0 layer 0",
        "chunk 1 group 1 layer 1",
        "chunk 1 group 0 layer 2",
        "chunk 1 group 1 layer 3",
    ]


# --- placement ---


def tensors(start: int, end: int, seed: int) -> dict[tuple[int, int, int], np.ndarray]:
    """Random KV by (group, layer, 0), and a state by (group, layer, token after which it is)."""
    rng = np.random.default_rng(seed)
    kv = {
        (0, layer, 0): rng.integers(0, 256, (2, end - start, 2, 8), dtype=np.uint8)
        for layer in KV.layers
    }
    return kv | {
        (1, layer, token): rng.integers(0, 256, (2, 24), dtype=np.uint8)
        for layer in STATE.layers
        for token in range(start + 1, end + 1)
    }


def raw_of(piece: Piece, start: int, found: dict[tuple[int, int, int], np.ndarray]) -> np.ndarray:
    heads = slice(piece.head_start, piece.head_end)
    if piece.group == 1:
        rows = found[1, piece.layer, piece.token_end][heads]
    else:
        tokens = slice(piece.token_start - start, piece.token_end - start)
        rows = found[0, piece.layer, 0][:, tokens, heads]
    return np.ascontiguousarray(rows).reshape(-1)


@settings(max_examples=60)
@given(
    st.integers(0, 20), st.integers(1, 60), st.integers(1, 12), st.integers(1, 12),
    st.integers(0, 1000),
)  # fmt: skip
def test_states_land_where_the_staging_extents_say_and_nowhere_else(
    start: int, length: int, grid: int, sender_grid: int, seed: int
) -> None:
    end, found = start + length, tensors(start, start + length, seed)
    buffer = np.zeros(LAYOUT.extent_bytes(start, end, grid) + 7, dtype=np.uint8)
    staging = StagingMap(LAYOUT, start, end, grid, buffer)
    for piece in split_pieces(LAYOUT, start, end, sender_grid, random.Random(seed)):
        raw = raw_of(piece, start, found)
        place = staging.in_place(piece)
        if place is None:
            staging.scatter(piece, raw)
        else:
            place[:] = raw
    sent = set(LAYOUT.checkpoints(start, end, sender_grid))
    assert end in sent
    for extent in LAYOUT.extents(start, end, grid):
        span = extent.span
        if extent.group == 0:
            want = found[0, extent.layer, 0][:, span.start - start : span.end - start]
        elif span.end in sent:
            want = found[1, extent.layer, span.end]
        else:
            want = np.zeros((2, 24), dtype=np.uint8)
        assert (staging.tensor(extent) == want).all()
    assert not buffer[-7:].any()


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 200), st.booleans())
def test_cuts_cover_a_piece_and_carry_its_bytes(
    heads: int, tokens: int, most: int, keeps_state: bool
) -> None:
    piece = Piece(0, 0, 0, 0, tokens, 0, heads)
    rng = np.random.default_rng(heads * 1000 + tokens)
    shape = (heads, 12) if keeps_state else (2, tokens, heads, 2)
    raw = rng.integers(0, 256, shape, dtype=np.uint8)
    parts = cut_piece(piece, most, raw.nbytes, keeps_state=keeps_state)
    got = [part_of(raw.reshape(-1), piece, part, keeps_state=keeps_state) for part in parts]
    unit = 12 if keeps_state else 4 * heads
    assert all(each.nbytes <= max(most, unit) for each in got)
    if keeps_state:
        assert [(p.token_start, p.token_end) for p in parts] == [(0, tokens)] * len(parts)
        assert np.concatenate(got).tobytes() == raw.tobytes()
    else:
        joined = np.concatenate([g.reshape(2, -1, heads, 2) for g in got], axis=1)
        assert (joined == raw).all()
    assert parts[0].token_start == parts[0].head_start == 0
    assert (parts[-1].token_end, parts[-1].head_end) == (tokens, heads)


# --- sessions ---


def opening(tokens: int, send_from: int = 0) -> SessionOpen:
    return SessionOpen(
        "t", "m", bytes(4 * tokens), send_from, "", True, "exact", CODECS.names, 10, 5, "e",
        link=b"link", credit_bytes=1 << 22,
    )  # fmt: skip


def pair(layout: KvLayout, tokens: int, send_from: int = 0) -> tuple[SendSession, ReceiveSession]:
    request = opening(tokens, send_from)
    send = SendSession(session=7, epoch=1, request=request, layout=layout, chunk_tokens=8)
    receive = ReceiveSession(
        session=7, epoch=1, request=request, layout=layout, codecs=CODECS, chunk_tokens=8
    )
    receive.receive(send.accept(0, 0))
    return send, receive


def export(send: SendSession, piece: Piece, raw: np.ndarray) -> None:
    """As the engine exports a tensor and the agent encodes it."""
    keeps_state = send.ledger.layout.groups[piece.group].keeps_state
    for cut in send.claim(piece, raw.nbytes):
        part = part_of(raw, piece, cut, keeps_state=keeps_state)
        codec, payload = encode(CODECS.negotiate(["planes-zstd"]), part, 4)
        send.put(
            cut, raw_bytes=part.nbytes, digest=piece_digest(part), codec=codec, payload=payload
        )


def move(send: SendSession, receive: ReceiveSession, sink: StagingMap) -> None:
    """Everything that is queued, through bytes, into place."""
    while frames := send.take(0, app_limited=False):
        for frame in parse_all(b"".join(frame.serialize() for frame in frames)):
            arrival = receive.receive(frame)
            assert arrival is not None
            raw = np.empty(frame.raw_bytes, dtype=np.uint8)
            CODECS.by_id(frame.codec).decode_into(memoryview(frame.payload), raw, 4)
            sink.scatter(arrival.piece, raw)
            receive.decoded(arrival, piece_digest(raw))


def whole_pieces(layout: KvLayout, start: int, end: int) -> list[Piece]:
    return [
        Piece(
            e.span.index, e.layer, e.group, e.span.start, e.span.end,
            0, layout.groups[e.group].kv_heads,
        )
        for e in layout.extents(start, end, 8)
    ]  # fmt: skip


def test_states_cross_the_wire_with_the_kv_and_the_seal_counts_them() -> None:
    found = tensors(0, 40, 1)
    send, receive = pair(LAYOUT, 40)
    buffer = np.zeros(LAYOUT.session_bytes(0, 40), dtype=np.uint8)
    staging = StagingMap(LAYOUT, 0, 40, 8, buffer)
    for piece in whole_pieces(LAYOUT, 0, 40):
        export(send, piece, raw_of(piece, 0, found))
    receive.receive(send.seal(PrefillReport()))
    move(send, receive, staging)
    assert receive.state is ReceiveState.COMPLETE
    assert receive.ledger.raw_bytes == LAYOUT.extent_bytes(0, 40, 8)
    for extent in LAYOUT.extents(0, 40, 8):
        if extent.group == 1:
            assert (staging.tensor(extent) == found[1, extent.layer, extent.span.end]).all()


def test_a_state_that_the_engine_did_not_export_is_an_error_at_the_seal() -> None:
    found = tensors(0, 12, 1)
    send, _ = pair(LAYOUT, 12)
    for piece in whole_pieces(LAYOUT, 0, 12)[:-1]:
        export(send, piece, raw_of(piece, 0, found))
    with pytest.raises(CorruptKv, match="did not export chunk 1 group 1 layer 3"):
        send.seal(PrefillReport())


@pytest.mark.parametrize("exported", range(17))
def test_what_a_failure_leaves_ends_at_a_checkpoint_and_the_next_try_goes_on_there(
    exported: int,
) -> None:
    found, pieces = tensors(0, 40, 2), whole_pieces(LAYOUT, 0, 40)
    buffer = np.zeros(LAYOUT.session_bytes(0, 40), dtype=np.uint8)
    staging = StagingMap(LAYOUT, 0, 40, 8, buffer)
    send, receive = pair(LAYOUT, 40)
    for piece in pieces[:exported]:
        export(send, piece, raw_of(piece, 0, found))
    error = send.fail(EngineUnavailable("gone"))
    with contextlib.suppress(EngineUnavailable):
        receive.receive(error)
        move(send, receive, staging)
    assert receive.state is ReceiveState.FAILED
    kept = staging.whole_end(receive.ledger.resumable)
    points = [0, *LAYOUT.checkpoints(0, 40, 8)]
    assert kept == max(p for p in points if exported >= sum(1 for e in LAYOUT.extents(0, p, 8)))
    if kept == 40:
        return
    send, receive = pair(LAYOUT, 40, send_from=kept)
    for piece in whole_pieces(LAYOUT, kept, 40):
        export(send, piece, raw_of(piece, 0, found))
    receive.receive(send.seal(PrefillReport()))
    move(send, receive, staging)
    assert receive.state is ReceiveState.COMPLETE
    for extent in LAYOUT.extents(0, 40, 8):
        key = (1, extent.layer, extent.span.end) if extent.group else (0, extent.layer, 0)
        span = slice(extent.span.start, extent.span.end)
        want = found[key] if extent.group else found[key][:, span]
        assert (staging.tensor(extent) == want).all()


def test_a_large_state_is_cut_between_heads() -> None:
    big = LayerGroup(GroupKind.RECURRENT, (1,), 6, 256, "float32", state_dim=128)
    layout = KvLayout((LayerGroup(GroupKind.FULL, (0,), 1, 2, "bfloat16"), big))
    send, receive = pair(layout, 4)
    cuts = send.claim(Piece(0, 1, 1, 0, 4, 0, 6), big.state_bytes)
    assert [(c.head_start, c.head_end) for c in cuts] == [(0, 2), (2, 4), (4, 6)]
    assert all(receive.ledger.piece_bytes(c) == FIRST_MESSAGE_BYTES for c in cuts)
    huge = LayerGroup(GroupKind.RECURRENT, (1,), 2, 1024, "float32", state_dim=4096)
    assert least_credit(KvLayout((KV, replace(huge, layers=(1,))))) == HEADER_BYTES + (16 << 20)
