"""Which pieces of a session's KV are there: whole chunks, what is missing, and one root digest.

Sender and receiver keep the same ledger, so the seal can compare them. The root digest is taken in
wire order of the pieces, whatever the order in which they came.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prfaas.errors import ProtocolError
from prfaas.frames import crc32c
from prfaas.layout import KvLayout, chunk_spans

ROOT_BYTES = 16
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct("<IIIIIII")


def piece_digest(raw: bytes | memoryview | npt.NDArray[np.uint8]) -> bytes:
    """Digest of one piece's bytes in canonical layout, before any codec: its crc32c.

    It guards against faults, at a tenth of the CPU that a cryptographic digest takes; against
    attackers there is TLS.
    """
    return _CRC.pack(crc32c(raw))


def digest_of_crc(crc: int) -> bytes:
    """`piece_digest` of bytes whose crc32c is known."""
    return _CRC.pack(crc)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """One layer's KV of some tokens and heads of one chunk: what a KV frame carries, once or for
    each of a few neighbouring layers.

    Of a group that keeps state: the state of some heads after the chunk's last token; its tokens
    are all of the chunk. Field order is wire order.
    """

    chunk: int
    layer: int
    group: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int

    def __str__(self) -> str:
        return f"chunk {self.chunk} group {self.group} layer {self.layer} {self.area_text}"

    @property
    def area_text(self) -> str:
        return f"t[{self.token_start},{self.token_end}) h[{self.head_start},{self.head_end})"

    @property
    def area(self) -> int:
        """Token-heads covered."""
        return (self.token_end - self.token_start) * (self.head_end - self.head_start)

    def overlaps(self, other: Piece) -> bool:
        """Whether both cover some token of some head; same chunk, layer and group are given."""
        return (
            self.token_start < other.token_end
            and other.token_start < self.token_end
            and self.head_start < other.head_end
            and other.head_start < self.head_end
        )


@dataclass(slots=True)
class _Cell:
    """One (chunk, layer, group): the pieces claimed, each with its digest once it is there."""

    open_area: int
    pieces: dict[Piece, bytes | None] = field(default_factory=dict)


class Ledger:
    """Pieces of tokens [start, end) on the grid of `chunk_tokens`; pure bookkeeping.

    States are pieces of the chunks that end at a checkpoint (`KvLayout.checkpoints`). A piece is
    claimed when its frame is accepted and committed when its bytes are verified, so that two copies
    of a frame never write the same place at the same time.
    """

    def __init__(self, layout: KvLayout, start: int, end: int, chunk_tokens: int) -> None:
        self.layout = layout
        self.start = start
        self.end = end
        self.chunk_tokens = chunk_tokens
        self._spans = {span.index: span for span in chunk_spans(start, end, chunk_tokens)}
        self._order = sorted(
            (layer, gi) for gi, g in enumerate(layout.groups) for layer in g.layers
        )
        self._cells: dict[tuple[int, int, int], _Cell] = {}
        self._checkpoints = {
            (token - 1) // chunk_tokens: token
            for token in layout.checkpoints(start, end, chunk_tokens)
        }
        heads = sum(g.kv_heads * len(g.layers) for g in layout.groups if not g.keeps_state)
        state_heads = sum(g.kv_heads * len(g.layers) for g in layout.groups if g.keeps_state)
        self._chunk_open = {
            index: span.tokens * (heads + (state_heads if index in self._checkpoints else 0))
            for index, span in self._spans.items()
        }
        self._watermark_chunk = start // chunk_tokens
        self.watermark = start
        """Largest token such that every chunk before it is whole."""
        self.resumable = start
        """Largest token up to which what is here can be used: the watermark, or where there are
        states the last checkpoint up to it.
        """
        self.frames = 0
        self.raw_bytes = 0
        """Frames whose pieces are committed, and their bytes."""

    def __repr__(self) -> str:
        return f"<Ledger [{self.start},{self.end}) whole to {self.watermark} frames={self.frames}>"

    @property
    def whole(self) -> bool:
        return self.watermark == self.end

    def holds(self, chunk: int, layer: int, group: int) -> bool:
        """Whether all of this tensor is committed."""
        cell = self._cells.get((chunk, layer, group))
        return cell is not None and not cell.open_area

    def piece_bytes(self, piece: Piece) -> int:
        """Decoded size of a piece. Raises ProtocolError naming what is not in the layout."""
        span = self._spans.get(piece.chunk)
        if span is None:
            raise ProtocolError(f"{piece}: chunk is not in [{self.start},{self.end})")
        if piece.group >= len(self.layout.groups):
            raise ProtocolError(f"{piece}: there are {len(self.layout.groups)} groups")
        group = self.layout.groups[piece.group]
        if piece.layer not in group.layers:
            raise ProtocolError(f"{piece}: layer is not in the group")
        if not span.start <= piece.token_start < piece.token_end <= span.end:
            raise ProtocolError(f"{piece}: tokens are not within [{span.start},{span.end})")
        if not 0 <= piece.head_start < piece.head_end <= group.kv_heads:
            raise ProtocolError(f"{piece}: there are {group.kv_heads} heads")
        if not group.keeps_state:
            return group.token_bytes // group.kv_heads * piece.area
        if piece.chunk not in self._checkpoints:
            raise ProtocolError(f"{piece}: the chunk does not end at a checkpoint")
        if piece.token_end - piece.token_start != span.tokens:
            raise ProtocolError(f"{piece}: a state is of all tokens [{span.start},{span.end})")
        return group.state_bytes // group.kv_heads * (piece.head_end - piece.head_start)

    def claim(self, piece: Piece) -> bool:
        """Take a checked piece; False where this very piece was claimed before (a duplicate).

        Raises ProtocolError where it overlaps another: the sender contradicts itself.
        """
        key = (piece.chunk, piece.layer, piece.group)
        cell = self._cells.get(key)
        if cell is None:
            heads = self.layout.groups[piece.group].kv_heads
            cell = self._cells[key] = _Cell(self._spans[piece.chunk].tokens * heads)
        if piece in cell.pieces:
            return False
        for other in cell.pieces:
            if piece.overlaps(other):
                raise ProtocolError(f"{piece} overlaps {other.area_text}")
        cell.pieces[piece] = None
        return True

    def unclaim(self, piece: Piece) -> None:
        """A claimed piece did not verify: its frame will come again."""
        cell = self._cells[piece.chunk, piece.layer, piece.group]
        if cell.pieces[piece] is not None:
            raise ValueError(f"{piece} is committed")
        del cell.pieces[piece]

    def commit(self, piece: Piece, digest: bytes, nbytes: int) -> None:
        """A claimed piece's bytes are there and verified; moves the watermark."""
        self.commit_frame((piece,), digest, nbytes)

    def commit_frame(self, pieces: Sequence[Piece], digest: bytes, nbytes: int) -> None:
        """The same of all pieces of one frame: neighbouring layers at one place of one chunk, of
        `nbytes` together.
        """
        for piece in pieces:
            cell = self._cells[piece.chunk, piece.layer, piece.group]
            if cell.pieces[piece] is not None:
                raise ValueError(f"{piece} committed twice")
            cell.pieces[piece] = digest
            cell.open_area -= piece.area
            self._chunk_open[piece.chunk] -= piece.area
        self.frames += 1
        self.raw_bytes += nbytes
        while self._chunk_open.get(self._watermark_chunk) == 0:
            self.watermark = self._spans[self._watermark_chunk].end
            if not self._checkpoints or self._watermark_chunk in self._checkpoints:
                self.resumable = self.watermark
            self._watermark_chunk += 1

    def distrust(self) -> None:
        """What is here is not what was sent, and nobody knows which part: none of it counts."""
        self.watermark = self.resumable = self.start

    def missing(self) -> Iterator[str]:
        """What is not there yet, in wire order: one line for each (chunk, layer)."""
        for span in self._spans.values():
            if not self._chunk_open[span.index]:
                continue
            for layer, gi in self._order:
                keeps_state = self.layout.groups[gi].keeps_state
                if keeps_state and span.index not in self._checkpoints:
                    continue
                cell = self._cells.get((span.index, layer, gi))
                if cell is None or not any(d is not None for d in cell.pieces.values()):
                    yield f"chunk {span.index} group {gi} layer {layer}"
                elif cell.open_area:
                    yield f"chunk {span.index} group {gi} layer {layer} (part of it)"

    def describe_missing(self, most: int = 3) -> str:
        """The first `most` of `missing` and how many more there are."""
        lines: list[str] = []
        more = 0
        for line in self.missing():
            if len(lines) < most:
                lines.append(line)
            else:
                more += 1
        return ", ".join(lines) + (f" and {more} more" if more else "")

    def root_digest(self) -> bytes:
        """Digest over all committed pieces (place and digest of each) in wire order."""
        root = hashlib.blake2b(digest_size=ROOT_BYTES, person=b"prfaas-kv-seal")
        for key in sorted(self._cells):
            pieces = self._cells[key].pieces
            for piece in sorted(pieces):
                digest = pieces[piece]
                if digest is not None:
                    root.update(
                        _ENTRY.pack(
                            piece.chunk,
                            piece.layer,
                            piece.group,
                            piece.token_start,
                            piece.token_end,
                            piece.head_start,
                            piece.head_end,
                        )
                    )
                    root.update(digest)
        return root.digest()
