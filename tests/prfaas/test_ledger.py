"""The ledger knows what is whole, what is missing and what contradicts itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Ledger, Piece, piece_digest
from prfaas.testing.kv_pieces import split_pieces

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1, 2), 4, 8, "bfloat16"),))
TWO_GROUPS = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1, 3), 3, 4, "float32"),
    )
)


def fill(ledger: Ledger, pieces: list[Piece]) -> None:
    for piece in pieces:
        nbytes = ledger.piece_bytes(piece)
        assert ledger.claim(piece)
        ledger.commit(piece, piece_digest(repr(piece).encode()), nbytes)


@settings(max_examples=60)
@given(st.data())
def test_watermark_is_the_end_of_the_longest_run_of_whole_chunks(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from([LAYOUT, TWO_GROUPS]))
    start = data.draw(st.integers(0, 20))
    end = start + data.draw(st.integers(1, 30))
    grid = data.draw(st.integers(1, 12))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    pieces = split_pieces(layout, start, end, grid, rng)
    rng.shuffle(pieces)
    ledger = Ledger(layout, start, end, grid)
    left = set(pieces)
    for piece in pieces:
        assert not ledger.whole
        fill(ledger, [piece])
        left.remove(piece)
        first_open = min((p.chunk for p in left), default=None)
        expected = end if first_open is None else max(start, first_open * grid)
        assert ledger.watermark == expected
    assert ledger.whole
    assert ledger.raw_bytes == layout.session_bytes(start, end)
    assert ledger.frames == len(pieces)
    assert list(ledger.missing()) == []


@settings(max_examples=30)
@given(st.integers(0, 1000))
def test_root_digest_does_not_depend_on_the_order_of_arrival(seed: int) -> None:
    rng = random.Random(seed)
    pieces = split_pieces(TWO_GROUPS, 3, 21, 8, rng)
    one, other = Ledger(TWO_GROUPS, 3, 21, 8), Ledger(TWO_GROUPS, 3, 21, 8)
    fill(one, pieces)
    shuffled = list(pieces)
    rng.shuffle(shuffled)
    fill(other, shuffled)
    assert one.root_digest() == other.root_digest()

    changed = Ledger(TWO_GROUPS, 3, 21, 8)
    fill(changed, pieces[1:])
    assert changed.root_digest() != one.root_digest()
    changed.claim(pieces[0])
    changed.commit(pieces[0], piece_digest(b"other bytes"), changed.piece_bytes(pieces[0]))
    assert changed.root_digest() != one.root_digest()


def test_a_piece_claimed_twice_is_a_duplicate_and_an_overlap_an_error() -> None:
    ledger = Ledger(LAYOUT, 0, 16, 8)
    piece = Piece(0, 1, 0, 0, 6, 0, 4)
    assert ledger.claim(piece)
    assert not ledger.claim(piece)
    with pytest.raises(ProtocolError, match=r"t\[5,8\) h\[0,2\) overlaps t\[0,6\) h\[0,4\)"):
        ledger.claim(Piece(0, 1, 0, 5, 8, 0, 2))
    assert ledger.claim(Piece(0, 1, 0, 6, 8, 0, 2))
    assert ledger.claim(Piece(0, 1, 0, 6, 8, 2, 4))
    ledger.commit(piece, b"", 1)
    with pytest.raises(ValueError, match="committed twice"):
        ledger.commit(piece, b"", 1)


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (Piece(3, 0, 0, 24, 32, 0, 4), "chunk is not in"),
        (Piece(0, 0, 0, 0, 8, 0, 4), "chunk is not in"),
        (Piece(1, 0, 1, 8, 16, 0, 4), "1 groups"),
        (Piece(1, 3, 0, 8, 16, 0, 4), "layer is not in the group"),
        (Piece(1, 0, 0, 8, 17, 0, 4), r"tokens are not within \[10,16\)"),
        (Piece(1, 0, 0, 8, 16, 0, 4), r"tokens are not within \[10,16\)"),
        (Piece(1, 0, 0, 12, 12, 0, 4), "tokens are not within"),
        (Piece(1, 0, 0, 10, 16, 0, 5), "4 heads"),
        (Piece(1, 0, 0, 10, 16, 2, 2), "4 heads"),
    ],
)
def test_a_piece_outside_the_layout_is_named(piece: Piece, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Ledger(LAYOUT, 10, 24, 8).piece_bytes(piece)


def test_missing_names_chunk_group_and_layer_and_says_how_many_more() -> None:
    ledger = Ledger(TWO_GROUPS, 0, 16, 8)
    fill(ledger, [Piece(0, 0, 0, 0, 8, 0, 2), Piece(0, 1, 1, 0, 8, 0, 2)])
    assert list(ledger.missing())[:3] == [
        "chunk 0 group 1 layer 1 (part of it)",
        "chunk 0 group 0 layer 2",
        "chunk 0 group 1 layer 3",
    ]
    assert ledger.describe_missing(1) == "chunk 0 group 1 layer 1 (part of it) and 6 more"
    assert repr(ledger) == "<Ledger [0,16) whole to 0 frames=2>"


def test_a_claim_alone_does_not_make_a_chunk_whole() -> None:
    ledger = Ledger(LAYOUT, 0, 8, 8)
    pieces = [Piece(0, layer, 0, 0, 8, 0, 4) for layer in range(3)]
    fill(ledger, pieces[:2])
    ledger.claim(pieces[2])
    assert ledger.watermark == 0
    assert ledger.describe_missing() == "chunk 0 group 0 layer 2"


def test_a_tensor_is_held_once_all_its_pieces_are_committed() -> None:
    ledger = Ledger(LAYOUT, 0, 8, 8)
    first, second = (Piece(0, 1, 0, 0, 8, heads, heads + 2) for heads in (0, 2))
    assert not ledger.holds(0, 1, 0)
    fill(ledger, [first])
    assert ledger.claim(second)
    assert not ledger.holds(0, 1, 0)
    ledger.commit(second, b"", ledger.piece_bytes(second))
    assert ledger.holds(0, 1, 0)
    assert not ledger.holds(0, 0, 0)


def test_nothing_of_what_is_distrusted_counts() -> None:
    ledger = Ledger(LAYOUT, 3, 16, 8)
    fill(ledger, split_pieces(LAYOUT, 3, 16, 8, random.Random(0)))
    assert (ledger.watermark, ledger.resumable) == (16, 16)
    ledger.distrust()
    assert (ledger.watermark, ledger.resumable, ledger.whole) == (3, 3, False)
