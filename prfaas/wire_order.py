"""Numbers for the tensors of a session, by which one side asks the other for some of them."""

from __future__ import annotations

from prfaas.layout import KvLayout
from prfaas.ledger import Piece


class WireOrder:
    """The tensors of tokens [start, end) in wire order, numbered from 0: the extents of staging."""

    def __init__(self, layout: KvLayout, start: int, end: int, chunk_tokens: int) -> None:
        self.places = [
            (e.span.index, e.layer, e.group) for e in layout.extents(start, end, chunk_tokens)
        ]
        """(chunk, layer, group) by number."""
        self._numbers = {place: number for number, place in enumerate(self.places)}

    def __len__(self) -> int:
        return len(self.places)

    def number(self, piece: Piece) -> int:
        """Of the tensor that a piece of the session is part of."""
        return self._numbers[piece.chunk, piece.layer, piece.group]

    def within(self, chunks: range | None, layers: range | None) -> list[int]:
        """Numbers of the tensors of these chunks and model layers; None: of all."""
        return [
            number
            for number, (chunk, layer, _) in enumerate(self.places)
            if (chunks is None or chunk in chunks) and (layers is None or layer in layers)
        ]
