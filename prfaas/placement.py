"""Where each piece of KV goes in a staging buffer, whatever grid or head range it came in.

The buffer holds `KvLayout.extents(start, end, chunk_tokens)`. Sender and staging may use different
chunk grids and the sender may split heads over ranks: a piece that is exactly one extent is decoded
in place, any other is scattered row by row. A state after a token that is no checkpoint here has no
place and is dropped.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from prfaas.layout import Extent, KvLayout
from prfaas.ledger import Piece

Bytes = npt.NDArray[np.uint8]


class StagingMap:
    """A view of one session's staging bytes by place; borrows `buffer`, owns nothing."""

    def __init__(
        self, layout: KvLayout, start: int, end: int, chunk_tokens: int, buffer: Bytes
    ) -> None:
        if buffer.nbytes < layout.extent_bytes(start, end, chunk_tokens):
            raise ValueError(f"{buffer.nbytes} bytes do not hold tokens [{start},{end})")
        self.layout = layout
        self.start = start
        self.end = end
        self.chunk_tokens = chunk_tokens
        self._buffer = buffer
        self._extents = {
            (e.span.index, e.group, e.layer): e for e in layout.extents(start, end, chunk_tokens)
        }

    def whole_end(self, token_end: int) -> int:
        """`token_end` rounded down so that its extents are those of this map.

        With states it has to be a checkpoint of a sender on this map's grid.
        """
        if token_end >= self.end:
            return self.end
        return max(self.start, token_end // self.chunk_tokens * self.chunk_tokens)

    def in_place(self, piece: Piece) -> Bytes | None:
        """The contiguous bytes of a piece that is exactly one extent, else None."""
        group = self.layout.groups[piece.group]
        if group.keeps_state:
            extent = self._state_extent(piece)
        else:
            at = piece.token_start // self.chunk_tokens
            extent = self._extents.get((at, piece.group, piece.layer))
            if extent is None or (piece.token_start, piece.token_end) != (
                extent.span.start,
                extent.span.end,
            ):
                return None
        if extent is None or piece.head_end - piece.head_start != group.kv_heads:
            return None
        return self._buffer[extent.offset : extent.offset + extent.nbytes]

    def scatter(self, piece: Piece, raw: Bytes) -> None:
        """Copy a decoded piece, [k|v][token][head][dim] or a state's [head][state dim][dim], to its
        places.
        """
        if self.layout.groups[piece.group].keeps_state:
            if (place := self._state_extent(piece)) is not None:
                heads = self.tensor(place)[piece.head_start : piece.head_end]
                heads[:] = raw.reshape(heads.shape)
            return
        source = self._rows(piece, raw)
        at = piece.token_start
        while at < piece.token_end:
            extent = self._extents[at // self.chunk_tokens, piece.group, piece.layer]
            stop = min(piece.token_end, extent.span.end)
            rows = self.tensor(extent)
            rows[
                :,
                at - extent.span.start : stop - extent.span.start,
                piece.head_start : piece.head_end,
            ] = source[:, at - piece.token_start : stop - piece.token_start]
            at = stop

    def tensor(self, extent: Extent) -> Bytes:
        """One extent as [k|v][token][head][bytes of one head], of a state as [head][bytes of one
        head]; a view.
        """
        group = self.layout.groups[extent.group]
        flat = self._buffer[extent.offset : extent.offset + extent.nbytes]
        if group.keeps_state:
            return flat.reshape(group.kv_heads, -1)
        return flat.reshape(2, extent.span.tokens, group.kv_heads, -1)

    def _state_extent(self, piece: Piece) -> Extent | None:
        """The place of a state, by the token it is after, whatever its chunk at the sender."""
        at = (piece.token_end - 1) // self.chunk_tokens
        extent = self._extents.get((at, piece.group, piece.layer))
        return extent if extent is not None and extent.span.end == piece.token_end else None

    def _rows(self, piece: Piece, raw: Bytes) -> Bytes:
        tokens = piece.token_end - piece.token_start
        return raw.reshape(2, tokens, piece.head_end - piece.head_start, -1)


def token_rows(raw: Bytes, tokens: int, start: int, stop: int) -> Bytes:
    """Tokens [start, stop) of a piece of `tokens` tokens, as a canonical piece of its own.

    A view where that is all of them, else a copy: K rows and V rows lie apart.
    """
    if (start, stop) == (0, tokens):
        return raw
    return np.ascontiguousarray(raw.reshape(2, tokens, -1)[:, start:stop]).reshape(-1)


def cut_piece(piece: Piece, most_bytes: int, nbytes: int, *, keeps_state: bool) -> list[Piece]:
    """A piece of `nbytes` cut so that no part has more than `most_bytes`, where that can be: KV
    between tokens, a state between heads.
    """
    low, high = (
        (piece.head_start, piece.head_end) if keeps_state else (piece.token_start, piece.token_end)
    )
    step = max(1, most_bytes * (high - low) // nbytes)
    ranges = [(at, min(at + step, high)) for at in range(low, high, step)]
    if keeps_state:
        return [replace(piece, head_start=a, head_end=b) for a, b in ranges]
    return [replace(piece, token_start=a, token_end=b) for a, b in ranges]


def part_of(raw: Bytes, piece: Piece, part: Piece, *, keeps_state: bool) -> Bytes:
    """The bytes of one of `cut_piece`'s parts out of the piece's; a copy where KV is cut."""
    if keeps_state:
        head = raw.nbytes // (piece.head_end - piece.head_start)
        start, stop = part.head_start - piece.head_start, part.head_end - piece.head_start
        return raw[start * head : stop * head]
    tokens = piece.token_end - piece.token_start
    start, stop = part.token_start - piece.token_start, part.token_end - piece.token_start
    return token_rows(raw, tokens, start, stop)
