"""Eight bits a value, for bfloat16 KV: nearly as fast as a copy, with no basis, step or table.

the sinks' K and V as they are | for each layer: K and V as `int8.c` has them
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prfaas.codecs.base import Bytes, Quality, Shape, Tile
from prfaas.codecs.native import Native
from prfaas.codecs.sinks import join_sinks, sink_bytes, split_sinks
from prfaas.errors import CorruptKv


class Int8Codec:
    """K with a scale for each channel over 64 tokens, V with one for each token and head."""

    id: ClassVar[int] = 3
    name = "int8"
    quality = Quality.NEAR
    spans = ()

    def __init__(self, native: Native, model_identity: str = "") -> None:
        """`model_identity`: of the model it was measured on. Its bytes are the same for all, what
        they do to answers is not.
        """
        self._native = native
        self.model_identity = model_identity

    def encode(self, raw: Bytes, shape: Shape) -> bytes | None:
        if not isinstance(shape, Tile) or not _fits(shape) or raw.nbytes != shape.nbytes:
            return None
        rows = shape.tokens - shape.sinks
        if rows < 1:
            return None
        sinks, rest = split_sinks(raw, shape)
        sizes = rows, shape.heads, shape.head_dim
        size = self._native.int8_size(*sizes)
        out = np.empty((len(shape.layers), size), dtype=np.uint8)
        for layer, part in enumerate(rest):
            if self._native.int8_encode(part, out[layer], *sizes):
                return None
        payload = sinks + out.tobytes()
        return payload if len(payload) < raw.nbytes else None

    def decode_into(self, payload: memoryview, out: Bytes, shape: Shape) -> None:
        if not isinstance(shape, Tile) or not _fits(shape) or out.nbytes != shape.nbytes:
            raise CorruptKv("int8 is for bfloat16 KV only")
        rows = shape.tokens - shape.sinks
        if rows < 1:
            raise CorruptKv("int8 leaves sinks as they are")
        sizes = rows, shape.heads, shape.head_dim
        size = self._native.int8_size(*sizes)
        at = sink_bytes(shape)
        if len(payload) != at + size * len(shape.layers):
            raise CorruptKv(f"int8 payload has {len(payload)} bytes")
        rest = np.empty((len(shape.layers), 2 * rows * shape.heads * shape.head_dim * 2), np.uint8)
        for layer in range(len(shape.layers)):
            part = payload[at + layer * size : at + (layer + 1) * size]
            self._native.int8_decode(part, rest[layer], *sizes)
        join_sinks(payload[:at], rest, out, shape)

    def prepared_bytes(self, shape: Tile) -> int:
        """All there is to do: what was prepared is the payload."""
        rows = shape.tokens - shape.sinks
        if not _fits(shape) or rows < 1:
            return 0
        size = self._native.int8_size(rows, shape.heads, shape.head_dim)
        return sink_bytes(shape) + size * len(shape.layers)

    def finish(self, prepared: Bytes, shape: Tile) -> bytes | None:
        return prepared.tobytes() if prepared.nbytes < shape.nbytes else None

    def plain(self, prepared: Bytes, shape: Tile) -> Bytes:
        out = np.empty(shape.nbytes, dtype=np.uint8)
        self.decode_into(prepared.data, out, shape)
        return out


def _fits(shape: Tile) -> bool:
    return not shape.keeps_state and shape.dtype == "bfloat16" and shape.head_dim <= 4096
