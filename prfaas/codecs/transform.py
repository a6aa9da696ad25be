"""Calibrated lossy codecs: rotate K back, take the mean off, change basis, quantise, code entropy.

    the sinks' K and V as they are | coefficients of K, then of V, as `rans.c` has them

With a basis, the layers of a span go together: neighbouring layers say much the same. The metric is
that of the queries for K and of the output projection for V, so one step for all coefficients puts
the error where it matters least, and entropy coding spends bits only where they are needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from prfaas.codecs.base import Bytes, Codec, Shape, Tile
from prfaas.codecs.calibration import Calibration, Floats, Rung
from prfaas.codecs.gate import why_not
from prfaas.codecs.native import Native
from prfaas.codecs.sinks import join_sinks, sink_bytes, split_sinks
from prfaas.errors import CorruptKv

PANEL = 16
DEAD = 0.46
"""Below a half: a coefficient is rounded towards zero a little more often, which saves more bits
than it costs error."""
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
_MOST_VALUES = 1 << 26
_MOST_TURNS = 16
_NO_TURNS = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Basis:
    """Packed matrices of one span and one of K and V."""

    into: Floats
    back: Floats
    columns: int


class Scratch(threading.local):
    """Memory of one thread, used again for each tile: fresh pages would cost as much as coding."""

    def __init__(self) -> None:
        self._kept: dict[str, Bytes] = {}

    def get(self, name: str, nbytes: int) -> Bytes:
        """So many bytes of no meaning, until the same name is asked for again."""
        kept = self._kept.get(name)
        if kept is None or kept.nbytes < nbytes:
            kept = self._kept[name] = np.empty(nbytes, dtype=np.uint8)
        return kept[:nbytes]

    def floats(self, rows: int, columns: int) -> Floats:
        return self.get("x", 4 * rows * columns).view(np.float32).reshape(rows, columns)

    def coefficients(self, columns: int, rows: int) -> npt.NDArray[np.int16]:
        return self.get("q", 2 * rows * columns).view(np.int16).reshape(columns, rows)


class BasisStore:
    """Packed bases of a calibration, made when first used and shared by its codecs."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.scratch = Scratch()
        self._made: dict[tuple[int, int], Basis] = {}
        self._turns: OrderedDict[tuple[int, int], Floats] = OrderedDict()
        self._lock = threading.Lock()

    def basis(self, span: int, part: int) -> Basis:
        """Of span number `span`, K (0) or V (1)."""
        with self._lock:
            found = self._made.get((span, part))
            if found is None:
                found = self._made[span, part] = self._make(span, part)
            return found

    def turns(self, start: int, end: int) -> Floats:
        """Cosines and sines of positions [start, end), [tokens, head_dim]; empty without rope.

        Those used last are kept: all layers of a chunk have the same.
        """
        inv_freq = self.calibration.inv_freq
        if not inv_freq.size:
            return _NO_TURNS
        with self._lock:
            found = self._turns.get((start, end))
            if found is not None:
                self._turns.move_to_end((start, end))
                return found
        # As engines do: the product in single precision, whatever its rounding.
        angles = np.arange(start, end, dtype=np.float32)[:, None] * inv_freq
        angles64 = angles.astype(np.float64)
        made = np.concatenate((np.cos(angles64), np.sin(angles64)), axis=1).astype(np.float32)
        with self._lock:
            self._turns[start, end] = made
            while len(self._turns) > _MOST_TURNS:
                self._turns.popitem(last=False)
        return made

    def _make(self, span: int, part: int) -> Basis:
        low, high = self.calibration.header.spans[span]
        basis = self.calibration.basis[2 * span + part].astype(np.float64)
        metric = self.calibration.metric[low:high, part].astype(np.float64)
        blocks = metric.reshape(-1, *metric.shape[-2:])
        dim, columns = blocks.shape[1], basis.shape[1]
        rows = basis.reshape(len(blocks), dim, columns)
        into = np.einsum("bij,bjc->bic", blocks, rows).reshape(-1, columns)
        back = np.linalg.solve(blocks, rows).reshape(-1, columns).T
        return Basis(pack(into), pack(back), columns)


class TransformCodec:
    """One rung of a calibration."""

    id: ClassVar[int]
    codec: ClassVar[str]

    def __init__(self, native: Native, store: BasisStore, rung: Rung, digest: str) -> None:
        self.name = f"{self.codec}@{digest}"
        self.quality = rung.quality
        self.model_identity = store.calibration.header.model_identity
        self._native = native
        self._store = store
        self._rung = rung
        c = store.calibration
        self._spans = {
            c.header.layers[low:high]: index for index, (low, high) in enumerate(c.header.spans)
        }
        self._at = {layer: at for at, layer in enumerate(c.header.layers)}
        self.spans = tuple(s for s in self._spans if len(s) > 1) if rung.columns else ()
        self._scale = np.ascontiguousarray(c.scale / rung.step, dtype=np.float32)
        self._step = np.ascontiguousarray(rung.step / c.scale, dtype=np.float32)

    def encode(self, raw: Bytes, shape: Shape) -> bytes | None:
        if not isinstance(shape, Tile) or not self._fits(shape) or raw.nbytes != shape.nbytes:
            return None
        rows = shape.tokens - shape.sinks
        sinks, rest = split_sinks(raw, shape)
        q = self._quantised(rest, shape, rows)
        return None if q is None else self._coded(sinks, q, shape)

    def _coded(self, sinks: bytes, q: npt.NDArray[np.int16], shape: Tile) -> bytes | None:
        rows = q.shape[1]
        out = self._store.scratch.get("out", self._native.rans_bound(rows, len(q)))
        size = self._native.rans_encode(q, out, rows, len(q))
        payload = sinks + out[:size].tobytes()
        return payload if size > 0 and len(payload) < shape.nbytes else None

    def decode_into(self, payload: memoryview, out: Bytes, shape: Shape) -> None:
        if not isinstance(shape, Tile) or not self._fits(shape) or out.nbytes != shape.nbytes:
            raise CorruptKv(f"{self.name} does not encode such tensors")
        rows = shape.tokens - shape.sinks
        at = sink_bytes(shape)
        if len(payload) < at:
            raise CorruptKv(f"{self.name} payload is truncated")
        parts = self._columns(shape)
        q = self._store.scratch.coefficients(sum(parts), rows)
        if self._native.rans_decode(payload[at:], q, rows, len(q)):
            raise CorruptKv(f"{self.name} payload is damaged")
        self._put_together(payload[:at], q, parts, shape, out)

    def _put_together(
        self,
        sinks: memoryview,
        q: npt.NDArray[np.int16],
        parts: tuple[int, int],
        shape: Tile,
        out: Bytes,
    ) -> None:
        if not shape.sinks:
            self._restore(q, parts, shape, out.reshape(len(shape.layers), 2, -1))
            return
        rest = np.empty(
            (len(shape.layers), 2, (out.nbytes - len(sinks)) // 2 // len(shape.layers)), np.uint8
        )
        self._restore(q, parts, shape, rest)
        join_sinks(sinks, rest, out, shape)

    def _fits(self, shape: Tile) -> bool:
        header = self._store.calibration.header
        sizes = (shape.kv_heads, shape.head_dim) == (header.kv_heads, header.head_dim)
        if shape.keeps_state or not sizes or not shape.whole or shape.tokens <= shape.sinks:
            return False
        if shape.nbytes > _MOST_VALUES:
            return False
        if self._rung.columns:
            return shape.layers in self._spans
        return all(layer in self._at for layer in shape.layers)

    def _columns(self, shape: Tile) -> tuple[int, int]:
        """Coefficients of a token of K and of V."""
        if self._rung.columns:
            return self._rung.columns[self._spans[shape.layers]]
        width = len(shape.layers) * shape.kv_heads * shape.head_dim
        return width, width

    def _quantised(self, rest: Bytes, shape: Tile, rows: int) -> npt.NDArray[np.int16] | None:
        heads, dim = shape.kv_heads, shape.head_dim
        width, layers = heads * dim, len(shape.layers)
        columns = self._columns(shape)
        q = self._store.scratch.coefficients(sum(columns), rows)
        x = self._store.scratch.floats(rows, layers * width)
        mean = self._store.calibration.mean
        halves = rest.reshape(layers, 2, -1)
        kind = _KINDS[shape.dtype]
        for part in (0, 1):
            turns = self._turns(shape) if part == 0 else _NO_TURNS
            for i, layer in enumerate(shape.layers):
                if self._native.load_rows(
                    halves[i, part], turns, mean[self._at[layer], part], x,
                    rows, heads, dim, kind, layers * width, i * width,
                ):  # fmt: skip
                    return None
            into = q[: columns[0]] if part == 0 else q[columns[0] :]
            if self._coefficients(x, into, shape, part):
                return None
        return q

    def _coefficients(self, x: Floats, q: npt.NDArray[np.int16], shape: Tile, part: int) -> int:
        rows, width = x.shape
        if not self._rung.columns:
            at = [self._at[layer] for layer in shape.layers]
            scale = np.ascontiguousarray(self._scale[at, part]).reshape(-1)
            return self._native.quantise(x, scale, q, rows, width, 0.5)
        basis = self._store.basis(self._spans[shape.layers], part)
        return self._native.forward(
            x, basis.into, q, rows, width, len(q), 1 / self._rung.step, DEAD
        )

    def _restore(
        self, q: npt.NDArray[np.int16], columns: tuple[int, int], shape: Tile, rest: Bytes
    ) -> None:
        """To `rest`: [layer][k|v][bytes of all tokens but the sinks]."""
        heads, dim, rows = shape.kv_heads, shape.head_dim, q.shape[1]
        width, layers = heads * dim, len(shape.layers)
        mean, kind = self._store.calibration.mean, _KINDS[shape.dtype]
        for part in (0, 1):
            coefficients = q[: columns[0]] if part == 0 else q[columns[0] :]
            turns = self._turns(shape) if part == 0 else _NO_TURNS
            if not self._rung.columns:
                for i, layer in enumerate(shape.layers):
                    at = self._at[layer]
                    self._native.restore(
                        rest[i, part], coefficients[i * width : (i + 1) * width],
                        self._step[at, part], turns, mean[at, part], rows, heads, dim, kind,
                    )  # fmt: skip
                continue
            x = self._store.scratch.floats(rows, layers * width)
            basis = self._store.basis(self._spans[shape.layers], part)
            self._native.inverse(
                coefficients, basis.back, x,
                rows, columns[part], basis.columns, layers * width, self._rung.step,
            )  # fmt: skip
            for i, layer in enumerate(shape.layers):
                self._native.store_rows(
                    rest[i, part], turns, mean[self._at[layer], part], x,
                    rows, heads, dim, kind, layers * width, i * width,
                )  # fmt: skip

    def _turns(self, shape: Tile) -> Floats:
        """Of the tile's tokens but the sinks."""
        return self._store.turns(shape.token_start + shape.sinks, shape.token_end)


class NearChannels(TransformCodec):
    """Channel by channel, no basis: fast.

    Prepared it is the sinks, then all coefficients in 14 bits each, as `unpack` reads them.
    """

    id: ClassVar[int] = 4
    codec = "near-channels"

    def prepared_bytes(self, shape: Tile) -> int:
        values = (
            (shape.tokens - shape.sinks) * sum(self._columns(shape)) if self._fits(shape) else 0
        )
        return 0 if not values or values % 4 else sink_bytes(shape) + values + values // 4 * 3

    def finish(self, prepared: Bytes, shape: Tile) -> bytes | None:
        sinks, q = self._parts(prepared, shape)
        return self._coded(sinks.tobytes(), q, shape)

    def plain(self, prepared: Bytes, shape: Tile) -> Bytes:
        sinks, q = self._parts(prepared, shape)
        out = np.empty(shape.nbytes, dtype=np.uint8)
        self._put_together(sinks, q, self._columns(shape), shape, out)
        return out

    def _parts(self, prepared: Bytes, shape: Tile) -> tuple[memoryview, npt.NDArray[np.int16]]:
        at, columns = sink_bytes(shape), sum(self._columns(shape))
        q = self._store.scratch.coefficients(columns, shape.tokens - shape.sinks)
        self._native.unpack(prepared[at:], q)
        return prepared[:at].data, q


class NearBasis(TransformCodec):
    """In the basis, as good as `near-channels` in fewer bytes."""

    id: ClassVar[int] = 5
    codec = "near-basis"


class CompactBasis(TransformCodec):
    """In the basis, coarser."""

    id: ClassVar[int] = 6
    codec = "compact-basis"


class TightBasis(TransformCodec):
    """In the basis, as coarse as it gets."""

    id: ClassVar[int] = 7
    codec = "tight-basis"


RUNGS: dict[str, type[TransformCodec]] = {
    kind.codec: kind for kind in (NearChannels, NearBasis, CompactBasis, TightBasis)
}


def make_codec(native: Native, calibration: Calibration, rung: Rung) -> TransformCodec:
    """The codec of a rung, whatever was measured of it. Raises ValueError for an unknown one."""
    kind = RUNGS.get(rung.codec)
    if kind is None:
        raise ValueError(f"codec {rung.codec!r} is not one of {sorted(RUNGS)}")
    return kind(native, BasisStore(calibration), rung, calibration.digest)


def calibrated_codecs(native: Native, calibration: Calibration) -> list[Codec]:
    """The rungs of a calibration that were measured to keep within their class."""
    store, digest = BasisStore(calibration), calibration.digest
    return [
        RUNGS[rung.codec](native, store, rung, digest)
        for rung in calibration.header.rungs
        if rung.codec in RUNGS and not why_not(rung)
    ]


def pack(matrix: npt.NDArray[np.floating[Any]]) -> Floats:
    """[rows, columns] in panels of 16 columns, [panel][row][16], padded with zeros."""
    rows, columns = matrix.shape
    panels = -(-columns // PANEL)
    padded = np.zeros((rows, panels * PANEL))
    padded[:, :columns] = matrix
    return np.ascontiguousarray(
        padded.reshape(rows, panels, PANEL).transpose(1, 0, 2), dtype=np.float32
    )
