"""Numbers of tensors are the order of the wire."""

from __future__ import annotations

from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece
from prfaas.wire_order import WireOrder

LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 1, 4, "float32"),
    )
)


def test_tensors_are_numbered_by_chunk_and_then_by_layer() -> None:
    order = WireOrder(LAYOUT, 3, 20, 8)
    assert len(order) == 9
    assert order.places[:4] == [(0, 0, 0), (0, 1, 1), (0, 2, 0), (1, 0, 0)]
    assert order.number(Piece(1, 1, 1, 9, 10, 0, 1)) == 4
    for number, extent in enumerate(LAYOUT.extents(3, 20, 8)):
        assert order.places[number] == (extent.span.index, extent.layer, extent.group)


def test_chunks_and_layers_pick_their_tensors() -> None:
    order = WireOrder(LAYOUT, 0, 20, 8)
    assert order.within(None, None) == list(range(9))
    assert order.within(range(1, 2), None) == [3, 4, 5]
    assert order.within(None, range(1)) == [0, 3, 6]
    assert order.within(range(1, 3), range(1, 3)) == [4, 5, 7, 8]
    assert order.within(range(9, 11), None) == []
