"""What a codec is: bytes of KV in, fewer bytes out, no I/O; a number on the wire names each one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prfaas.layout import ITEM_BYTES, GroupKind, LayerGroup
from prfaas.ledger import Piece
from prfaas.quality import Quality

__all__ = [
    "SINK_TOKENS",
    "Bytes",
    "Codec",
    "Preparable",
    "Quality",
    "Shape",
    "Tile",
    "base_name",
    "item_bytes_of",
    "span_of",
]

Bytes = npt.NDArray[np.uint8]

SINK_TOKENS = 4
"""The first tokens of a prompt, which everything attends to: raw in every lossy codec."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What is encoded together: some tokens and heads of some layers of one group.

    Its bytes are [layer][k|v][token][head][dim], of a group that keeps state
    [layer][head][state dim][dim]. `kv_heads`: of the group, of which [head_start, head_end) are
    here.
    """

    kind: GroupKind
    dtype: str
    layers: tuple[int, ...]
    token_start: int
    token_end: int
    head_start: int
    head_end: int
    kv_heads: int
    head_dim: int
    state_dim: int = 0

    @classmethod
    def of(
        cls, group: LayerGroup, layers: tuple[int, ...], tokens: tuple[int, int],
        heads: tuple[int, int] | None = None,
    ) -> Tile:  # fmt: skip
        """Some layers of a group; `heads`: all where not given."""
        low, high = heads or (0, group.kv_heads)
        return cls(
            group.kind, group.dtype, layers, *tokens, low, high,
            group.kv_heads, group.head_dim, group.state_dim,
        )  # fmt: skip

    @classmethod
    def of_piece(cls, group: LayerGroup, piece: Piece) -> Tile:
        """What a frame carries of one layer."""
        return cls.of_pieces(group, (piece,))

    @classmethod
    def of_pieces(cls, group: LayerGroup, pieces: Sequence[Piece]) -> Tile:
        """What a frame carries: one place in some layers."""
        first = pieces[0]
        tokens, heads = (first.token_start, first.token_end), (first.head_start, first.head_end)
        return cls.of(group, tuple(piece.layer for piece in pieces), tokens, heads)

    @property
    def keeps_state(self) -> bool:
        return self.kind is GroupKind.RECURRENT

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_start

    @property
    def heads(self) -> int:
        return self.head_end - self.head_start

    @property
    def whole(self) -> bool:
        """Whether it has all heads of the group."""
        return (self.head_start, self.head_end) == (0, self.kv_heads)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        rows = self.heads * self.state_dim if self.keeps_state else 2 * self.tokens * self.heads
        return len(self.layers) * rows * self.head_dim * self.item_bytes

    @property
    def sinks(self) -> int:
        """How many of its tokens, the first ones, are sinks."""
        return max(0, min(self.token_end, SINK_TOKENS) - self.token_start)


Shape = Tile | int
"""A tile, or bytes per item of bytes of which nothing else is known: lossy codecs leave those."""


class Codec(Protocol):
    """Encodes and decodes one frame's payload; thread-safe, long work releases the GIL."""

    id: ClassVar[int]

    @property
    def name(self) -> str:
        """As the handshake has it: of a calibrated codec with the digest of what it uses."""
        ...

    @property
    def quality(self) -> Quality:
        """The class it stays within; `exact` gives back the very bytes."""
        ...

    @property
    def model_identity(self) -> str:
        """The model it is calibrated for or was measured on; empty: any."""
        ...

    @property
    def spans(self) -> tuple[tuple[int, ...], ...]:
        """Model layers of which it wants the tiles in one, so that a frame leaves when the last is
        computed; all others go alone.
        """
        ...

    def encode(self, raw: Bytes, shape: Shape) -> bytes | None:
        """The encoded bytes, or None where the result would not be smaller than `raw`, or where it
        may not touch what is of this shape.
        """
        ...

    def decode_into(self, payload: memoryview, out: Bytes, shape: Shape) -> None:
        """Fill all of contiguous `out`. Raises CorruptKv; `out` then holds rubbish."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """A codec of which an engine may do the first part where KV lies, on its accelerator: what can
    be done to all values at once. What is left to do is `finish`.
    """

    def prepared_bytes(self, shape: Tile) -> int:
        """Size of a tile that was prepared; 0: it cannot be."""
        ...

    def finish(self, prepared: Bytes, shape: Tile) -> bytes | None:
        """What `encode` would give; None where that is not smaller than the tile."""
        ...

    def plain(self, prepared: Bytes, shape: Tile) -> Bytes:
        """The tile's bytes, as exact as they still are."""
        ...


def base_name(name: str) -> str:
    """A codec's name without its calibration's digest."""
    return name.partition("@")[0]


def span_of(codec: Codec, group: LayerGroup, layer: int) -> tuple[int, ...]:
    """Layers of the group that share a frame with this one; itself alone where it goes alone."""
    for span in codec.spans:
        if layer in span and span == tuple(x for x in group.layers if span[0] <= x <= span[-1]):
            return span
    return (layer,)


def item_bytes_of(shape: Shape) -> int:
    """Bytes per item of a shape."""
    return shape.item_bytes if isinstance(shape, Tile) else shape
