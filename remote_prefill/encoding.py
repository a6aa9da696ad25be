"""Records into what frames carry: each layer alone, or the layers that a codec takes together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prfaas.codecs import Codec, Preparable, Tile, digest_of, encode_first
from prfaas.frames import FrameFlag, crc32c
from prfaas.interfaces import KvRecord
from prfaas.layout import LayerGroup
from prfaas.ledger import Piece
from prfaas.placement import part_of
from prfaas.send_session import MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Encoded:
    """A piece as it will go on the wire, or the same place in several layers."""

    pieces: tuple[Piece, ...]
    raw_bytes: int
    digest: bytes
    codec: Codec
    payload: bytes
    payload_crc: int
    flags: FrameFlag
    seconds: float
    """It took of a codec thread."""


Batch = list[tuple[KvRecord, tuple[Piece, ...], tuple[Codec, ...]]]
"""Records to be encoded one after another, each with the pieces it is cut into and the codecs to
try.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A piece copied out of its record until the other layers of its span are there: an engine's
    ring may be smaller than a span.
    """

    piece: Piece
    raw: npt.NDArray[np.uint8]
    cached: bool
    codecs: tuple[Codec, ...]
    span: tuple[int, ...]


class SpanGather:
    """Holds pieces by their place until all layers of a span are there; at most the raw bytes of
    its session, which are reserved.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Piece, tuple[int, ...]], list[Held]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> list[Held] | None:
        """All layers at this place once this one was the last, in order."""
        place = replace(held.piece, layer=held.span[0]), held.span
        here = self._held.setdefault(place, [])
        here.append(held)
        if len(here) < len(held.span):
            return None
        del self._held[place]
        return sorted(here, key=lambda each: each.piece)

    def rest(self) -> list[list[Held]]:
        """What has stayed incomplete, and is no longer held: layers that came cut otherwise."""
        held, self._held = self._held, {}
        return [sorted(here, key=lambda each: each.piece) for here in held.values()]


def prepared_bytes(codec: Codec, group: LayerGroup, piece: Piece) -> int:
    """Size of a piece that was prepared for a codec; 0: it cannot be."""
    return codec.prepared_bytes(Tile.of_piece(group, piece)) if isinstance(codec, Preparable) else 0


def encode_batch(batch: Batch, groups: Sequence[LayerGroup]) -> list[Encoded]:
    """In a codec thread: each piece alone."""
    return [
        encode_cut(codecs, view, cut, groups[cut.group])
        for view, cuts, codecs in batch
        for cut in cuts
    ]


def encode_cut(codecs: Sequence[Codec], view: KvRecord, cut: Piece, group: LayerGroup) -> Encoded:
    """The part `cut` out of a record, by the first of `codecs` that can."""
    start_s = time.perf_counter()
    if view.codec:
        return _finish(codecs, view, group, start_s)
    rows = part_of(view.raw, view.piece, cut, keeps_state=group.keeps_state)
    return _encode_one(codecs, cut, rows, view.cached, group, start_s)


def _finish(codecs: Sequence[Codec], view: KvRecord, group: LayerGroup, start_s: float) -> Encoded:
    """What was prepared for the first of `codecs`; by the others where that gains nothing."""
    codec, tile = codecs[0], Tile.of_piece(group, view.piece)
    assert isinstance(codec, Preparable)
    payload = codec.finish(view.raw, tile)
    if payload is None:
        plain = codec.plain(view.raw, tile)
        return _encode_one(codecs[1:], view.piece, plain, view.cached, group, start_s)
    crc = crc32c(payload)
    digest, seconds = digest_of(codec, view.raw, crc), time.perf_counter() - start_s
    flags = _flags(view.cached)
    return Encoded((view.piece,), tile.nbytes, digest, codec, payload, crc, flags, seconds)


def copy_out(view: KvRecord, cut: Piece, codecs: tuple[Codec, ...], span: tuple[int, ...]) -> Held:
    """The part `cut` of a record that goes with the same place in the other layers of `span`."""
    rows = part_of(view.raw, view.piece, cut, keeps_state=False)
    return Held(cut, rows.copy() if cut == view.piece else rows, view.cached, codecs, span)


def encode_span(held: Sequence[Held], group: LayerGroup) -> list[Encoded]:
    """In a codec thread: the layers of a span in one frame; one by one, without loss, where they
    are not all there, the codec does not take them, or the frame would be more than a message.
    """
    first = held[0]
    codec, start_s = first.codecs[0], time.perf_counter()
    pieces = tuple(each.piece for each in held)
    if tuple(piece.layer for piece in pieces) == first.span:
        raw = np.concatenate([each.raw for each in held])
        payload = codec.encode(raw, Tile.of_pieces(group, pieces))
        if payload is not None and len(payload) <= MESSAGE_BYTES:
            crc = crc32c(payload)
            digest = digest_of(codec, raw, crc)
            flags = _flags(all(each.cached for each in held))
            seconds = time.perf_counter() - start_s
            return [Encoded(pieces, raw.nbytes, digest, codec, payload, crc, flags, seconds)]
    return [
        _encode_one(each.codecs[1:], each.piece, each.raw, each.cached, group, time.perf_counter())
        for each in held
    ]


def _encode_one(
    codecs: Sequence[Codec],
    piece: Piece,
    raw: npt.NDArray[np.uint8],
    cached: bool,
    group: LayerGroup,
    start_s: float,
) -> Encoded:
    codec, payload = encode_first(codecs, raw, Tile.of_piece(group, piece))
    crc = crc32c(payload)
    digest = digest_of(codec, raw, crc)
    seconds = time.perf_counter() - start_s
    return Encoded((piece,), raw.nbytes, digest, codec, payload, crc, _flags(cached), seconds)


def _flags(cached: bool) -> FrameFlag:
    return FrameFlag.CACHED if cached else FrameFlag.NONE
