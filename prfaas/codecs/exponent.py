"""Lossless at line speed: exponents through prefix codes per class of channels, the rest as it is.

    u8 item bytes | u8 parts | for each part: u32 rows, u32 columns, u32 size (0: as it is) | bytes

K and V of each layer are parts of their own: their exponents have nothing in common. The C file
`exponent.c` has the format of a part.
"""

from __future__ import annotations

import struct
from typing import ClassVar

import numpy as np

from prfaas.codecs.base import Bytes, Quality, Shape, Tile, item_bytes_of
from prfaas.codecs.native import Native
from prfaas.errors import CorruptKv

_HEAD = struct.Struct("<BB")
_PART = struct.Struct("<III")
_COLS = 64
"""Where nothing is known of the items."""
_MOST_COLS = 8192
_MOST_ROWS = 65535
_MOST_PARTS = 255


class ExponentCodec:
    """All items of two or four bytes; best on bfloat16."""

    id: ClassVar[int] = 2
    name = "exponent"
    quality = Quality.EXACT
    model_identity = ""
    spans = ()

    def __init__(self, native: Native) -> None:
        self._native = native

    def encode(self, raw: Bytes, shape: Shape) -> bytes | None:
        item = item_bytes_of(shape)
        parts = _parts(raw.nbytes, shape)
        if item not in (2, 4) or not parts:
            return None
        out = [_HEAD.pack(item, len(parts))]
        total, at = len(out[0]), 0
        for rows, cols in parts:
            size = rows * cols * item
            part = raw[at : at + size]
            packed = np.empty(size, dtype=np.uint8)
            found = self._native.exponent_encode(part, packed, rows, cols, item)
            data = packed[:found].tobytes() if found > 0 else part.tobytes()
            out += (_PART.pack(rows, cols, max(0, found)), data)
            total += _PART.size + len(data)
            at += size
        return b"".join(out) if total < raw.nbytes else None

    def decode_into(self, payload: memoryview, out: Bytes, shape: Shape) -> None:
        if len(payload) < _HEAD.size:
            raise CorruptKv("exponent payload is truncated")
        item, parts = _HEAD.unpack_from(payload)
        if item != item_bytes_of(shape) or item not in (2, 4):
            raise CorruptKv(f"exponent payload has items of {item} bytes")
        at, filled = _HEAD.size, 0
        for _ in range(parts):
            if len(payload) - at < _PART.size:
                raise CorruptKv("exponent payload is truncated")
            rows, cols, size = _PART.unpack_from(payload, at)
            at += _PART.size
            nbytes = rows * cols * item
            if not nbytes or nbytes > out.nbytes - filled:
                raise CorruptKv(f"exponent part of {rows} times {cols} items is out of place")
            data = payload[at : at + (size or nbytes)]
            part = out[filled : filled + nbytes]
            if len(data) != (size or nbytes):
                raise CorruptKv("exponent payload is truncated")
            if not size:
                part[:] = np.frombuffer(data, dtype=np.uint8)
            elif self._native.exponent_decode(data, part, rows, cols, item):
                raise CorruptKv("exponent part is damaged")
            at += len(data)
            filled += nbytes
        if at != len(payload) or filled != out.nbytes:
            raise CorruptKv(f"exponent payload fills {filled} of {out.nbytes} bytes")


def _parts(nbytes: int, shape: Shape) -> list[tuple[int, int]]:
    """(rows, columns) of each part, in order; none where this codec has no use for it."""
    if isinstance(shape, Tile) and nbytes == shape.nbytes:
        if shape.keeps_state:
            rows, cols, count = shape.heads * shape.state_dim, shape.head_dim, 1
        else:
            rows, cols, count = shape.tokens, shape.heads * shape.head_dim, 2
        parts = [(rows, cols)] * (count * len(shape.layers))
    else:
        items = nbytes // item_bytes_of(shape)
        if items % _COLS or nbytes % item_bytes_of(shape):
            return []
        parts = [(items // _COLS, _COLS)]
    rows, cols = parts[0]
    if len(parts) > _MOST_PARTS or rows > _MOST_ROWS or cols > _MOST_COLS or not rows:
        return []
    return parts
