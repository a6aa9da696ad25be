"""Every codec keeps the contract; the calibrated ones with a calibration made up here."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.codecs import Calibration, Codec, PlanesZstdCodec, Quality
from prfaas.codecs.calibration import Header, Measured, Rung
from prfaas.codecs.native import native
from prfaas.testing.codec_contract import DIM, HEADS, LAYERS, CodecContract

if native is not None:
    from prfaas.codecs.exponent import ExponentCodec
    from prfaas.codecs.int8 import Int8Codec
    from prfaas.codecs.transform import make_codec

needs_native = pytest.mark.skipif(native is None, reason="the C extension was not built")

GOOD = Measured(2400, 1e-6, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)


def calibration(*rungs: Rung) -> Calibration:
    """Of the contract's layers, in two spans, with random bases."""
    rng = np.random.default_rng(5)
    width = 2 * HEADS * DIM

    def orthonormal() -> np.ndarray:
        found = np.linalg.qr(rng.normal(size=(width, width)))[0]
        return found.astype(np.float16).astype(np.float32)

    metric = np.zeros((LAYERS, 2, HEADS, DIM, DIM), dtype=np.float32)
    metric[:] = np.eye(DIM) + 0.1
    return Calibration(
        Header(1, "m", tuple(range(LAYERS)), HEADS, DIM, ((0, 2), (2, 4)), rungs),
        inv_freq=(10000.0 ** -(np.arange(DIM // 2) / (DIM // 2))).astype(np.float32),
        mean=rng.normal(size=(LAYERS, 2, HEADS * DIM)).astype(np.float32),
        scale=np.ones((LAYERS, 2, HEADS * DIM), dtype=np.float32),
        metric=metric,
        basis=tuple(orthonormal() for _ in range(4)),
    )


class TestPlanesZstd(CodecContract):
    def make(self) -> Codec:
        return PlanesZstdCodec()

    def test_a_payload_for_another_tile_is_corrupt(self) -> None:
        super().test_a_payload_for_another_tile_is_corrupt()


@needs_native
class TestExponent(CodecContract):
    def make(self) -> Codec:
        assert native is not None
        return ExponentCodec(native)


@needs_native
class TestInt8(CodecContract):
    worst_nmse = 1e-3

    def make(self) -> Codec:
        assert native is not None
        return Int8Codec(native)


@needs_native
class TestNearChannels(CodecContract):
    worst_nmse = 2e-3

    def make(self) -> Codec:
        assert native is not None
        rung = Rung("near-channels", Quality.NEAR, 0.1)
        return make_codec(native, calibration(rung), rung)


@needs_native
class TestNearBasis(CodecContract):
    tile_layers = (2, 3)
    worst_nmse = 2e-3

    def make(self) -> Codec:
        assert native is not None
        full = 2 * HEADS * DIM
        rung = Rung("near-basis", Quality.NEAR, 0.1, ((full, full),) * 2)
        return make_codec(native, calibration(rung), rung)


@needs_native
class TestTightBasis(CodecContract):
    tile_layers = (0, 1)
    worst_nmse = 1.5

    def make(self) -> Codec:
        assert native is not None
        rung = Rung("tight-basis", Quality.TIGHT, 1.0, ((40, 17), (64, 1)))
        return make_codec(native, calibration(rung), rung)
