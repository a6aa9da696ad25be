"""Pieces of any grid and head range land where the staging extents say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece
from prfaas.placement import StagingMap, token_rows
from prfaas.testing.kv_pieces import split_pieces

LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 3, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 2, 2, "float32"),
    )
)


def canonical(start: int, end: int, seed: int) -> dict[tuple[int, int], np.ndarray]:
    """Random KV by (group, layer): [k|v][token][head][bytes of a head]."""
    rng = np.random.default_rng(seed)
    return {
        (gi, layer): rng.integers(
            0, 256, (2, end - start, g.kv_heads, g.head_dim * g.item_bytes), dtype=np.uint8
        )
        for gi, g in enumerate(LAYOUT.groups)
        for layer in g.layers
    }


def cut(kv: dict[tuple[int, int], np.ndarray], start: int, piece: Piece) -> np.ndarray:
    rows = kv[piece.group, piece.layer][
        :,
        piece.token_start - start : piece.token_end - start,
        piece.head_start : piece.head_end,
    ]
    return np.ascontiguousarray(rows).reshape(-1)


@settings(max_examples=60)
@given(
    start=st.integers(0, 20),
    tokens=st.integers(1, 30),
    grid=st.integers(1, 12),
    sender_grid=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_any_cut_on_any_grid_fills_the_staging_with_the_same_bytes(
    start: int, tokens: int, grid: int, sender_grid: int, seed: int
) -> None:
    end = start + tokens
    kv = canonical(start, end, seed)
    buffer = np.zeros(LAYOUT.session_bytes(start, end), dtype=np.uint8)
    staging = StagingMap(LAYOUT, start, end, grid, buffer)
    for piece in split_pieces(LAYOUT, start, end, sender_grid, random.Random(seed)):
        raw = cut(kv, start, piece)
        place = staging.in_place(piece)
        if place is None:
            staging.scatter(piece, raw)
        else:
            place[:] = raw
    for extent in LAYOUT.extents(start, end, grid):
        expected = kv[extent.group, extent.layer][
            :, extent.span.start - start : extent.span.end - start
        ]
        assert (staging.tensor(extent) == expected).all()
        assert bytes(buffer[extent.offset : extent.offset + extent.nbytes]) == expected.tobytes()


def test_only_a_whole_extent_is_decoded_in_place() -> None:
    buffer = np.zeros(LAYOUT.session_bytes(5, 20), dtype=np.uint8)
    staging = StagingMap(LAYOUT, 5, 20, 8, buffer)
    first = staging.in_place(Piece(0, 0, 0, 5, 8, 0, 3))
    assert first is not None
    assert np.shares_memory(first, buffer[: first.nbytes])
    assert first.nbytes == LAYOUT.groups[0].token_bytes * 3
    assert staging.in_place(Piece(0, 0, 0, 5, 7, 0, 3)) is None
    assert staging.in_place(Piece(0, 0, 0, 5, 8, 0, 2)) is None
    assert staging.in_place(Piece(0, 0, 0, 6, 8, 0, 3)) is None


def test_whole_end_keeps_the_extents_of_the_map() -> None:
    staging = StagingMap(LAYOUT, 5, 20, 8, np.zeros(LAYOUT.session_bytes(5, 20), dtype=np.uint8))
    assert [staging.whole_end(t) for t in (5, 7, 8, 15, 16, 19, 20)] == [5, 5, 8, 8, 16, 16, 20]


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold"):
        StagingMap(LAYOUT, 0, 4, 2, np.zeros(LAYOUT.session_bytes(0, 4) - 1, dtype=np.uint8))


def test_token_rows_cuts_k_and_v_alike() -> None:
    raw = np.arange(2 * 4 * 3, dtype=np.uint8)
    part = token_rows(raw, 4, 1, 3)
    assert list(part) == [*range(3, 9), *range(15, 21)]
    assert token_rows(raw, 4, 0, 4) is raw
