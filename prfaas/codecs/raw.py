"""The codec that changes nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prfaas.codecs.base import Bytes, Quality, Shape
from prfaas.errors import CorruptKv


class RawCodec:
    """The bytes as they are."""

    id: ClassVar[int] = 0
    name = "raw"
    quality = Quality.EXACT
    model_identity = ""
    spans = ()

    def encode(self, raw: Bytes, shape: Shape) -> bytes | None:
        return raw.tobytes()

    def decode_into(self, payload: memoryview, out: Bytes, shape: Shape) -> None:
        if len(payload) != out.nbytes:
            raise CorruptKv(f"raw payload has {len(payload)} bytes, not {out.nbytes}")
        out[:] = np.frombuffer(payload, dtype=np.uint8)


RAW = RawCodec()
