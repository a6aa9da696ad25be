"""The C extension as Python sees it, and whether this installation has it."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

Buffer = Any
"""Anything with contiguous memory: bytes, memoryview, array."""

NO_GAIN = -1
CORRUPT = -2


class Native(Protocol):
    """`prfaas.codecs._native`. Sizes that do not agree with the buffers are a ValueError; results
    are a length or 0, NO_GAIN or CORRUPT. All release the GIL; the C files describe the formats.
    """

    def simd(self, most: int, /) -> int:
        """Have the entropy coder use no more than 0: any CPU, 1: AVX2, 2: AVX-512; what it uses
        then. For tests: every level makes the same bytes.
        """
        ...

    def exponent_encode(self, src: Buffer, dst: Buffer, rows: int, cols: int, item: int, /) -> int:
        """Rows of `cols` items of 2 or 4 bytes; `dst` at most as long."""
        ...

    def exponent_decode(
        self, src: Buffer, dst: Buffer, rows: int, cols: int, item: int, /
    ) -> int: ...

    def int8_size(self, rows: int, heads: int, dim: int, /) -> int:
        """Encoded size of K and V of `rows` tokens."""
        ...

    def int8_encode(self, src: Buffer, dst: Buffer, rows: int, heads: int, dim: int, /) -> int:
        """bfloat16 [k|v][rows][heads][dim]."""
        ...

    def int8_decode(self, src: Buffer, dst: Buffer, rows: int, heads: int, dim: int, /) -> int: ...

    def rans_bound(self, rows: int, cols: int, /) -> int:
        """Room that `rans_encode` wants."""
        ...

    def rans_encode(self, q: Buffer, dst: Buffer, rows: int, cols: int, /) -> int:
        """int16 [cols][rows]."""
        ...

    def rans_decode(self, src: Buffer, q: Buffer, rows: int, cols: int, /) -> int: ...

    def load_rows(
        self, src: Buffer, turns: Buffer, mean: Buffer, x: Buffer,
        rows: int, heads: int, dim: int, kind: int, stride: int, offset: int, /,
    ) -> int:  # fmt: skip
        """Items [rows][heads][dim] of dtype `kind` (0 float32, 1 bfloat16, 2 float16) to columns
        from `offset` of float32 x [rows][stride]: rotated back by `turns`, float32
        [rows][cosines | sines] or empty, less `mean`.
        """
        ...

    def store_rows(
        self, dst: Buffer, turns: Buffer, mean: Buffer, x: Buffer,
        rows: int, heads: int, dim: int, kind: int, stride: int, offset: int, /,
    ) -> int:  # fmt: skip
        """Inverse of `load_rows`."""
        ...

    def forward(
        self, x: Buffer, basis: Buffer, q: Buffer,
        rows: int, width: int, cols: int, scale: float, dead: float, /,
    ) -> int:  # fmt: skip
        """int16 q [cols][rows] = round(scale * x [rows][width] @ basis), the first `cols` columns
        of a packed basis.
        """
        ...

    def inverse(
        self, q: Buffer, basis: Buffer, x: Buffer,
        rows: int, cols: int, depth: int, width: int, step: float, /,
    ) -> int:  # fmt: skip
        """x = step * q.T @ the first `cols` of `depth` rows of a packed basis."""
        ...

    def quantise(
        self, x: Buffer, scale: Buffer, q: Buffer, rows: int, cols: int, dead: float, /
    ) -> int:
        """int16 q [cols][rows] = round(x [rows][cols] * scale)."""
        ...

    def unpack(self, src: Buffer, q: Buffer, /) -> int:
        """int16 q, a multiple of four, of 14 bits each: the low bytes of all | the others, four in
        three bytes, the first one lowest.
        """
        ...

    def restore(
        self, dst: Buffer, q: Buffer, step: Buffer, turns: Buffer, mean: Buffer,
        rows: int, heads: int, dim: int, kind: int, /,
    ) -> int:  # fmt: skip
        """Inverse of `load_rows` and `quantise`: items of coefficients [heads * dim][rows]."""
        ...


def _load() -> Native | None:
    try:
        loaded: Native = importlib.import_module("prfaas.codecs._native")
    except ImportError:
        return None
    return loaded


native = _load()
"""None where the package was built without a C compiler."""
