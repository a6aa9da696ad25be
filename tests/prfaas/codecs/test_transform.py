"""Unpacking, rotation, products and int8 against numpy; sinks, spans and the gate."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prfaas.codecs import Calibration, Quality, Tile, default_codecs, encode
from prfaas.codecs.calibration import Header, Measured, Rung
from prfaas.codecs.gate import BOUNDS, misses
from prfaas.codecs.native import NO_GAIN, native
from prfaas.errors import ConfigError
from prfaas.testing.codec_contract import DIM, FULL, HEADS, LAYERS, floats, values

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

from prfaas.codecs.int8 import Int8Codec
from prfaas.codecs.transform import make_codec, pack

GOOD = Measured(2400, 1e-6, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)
WIDTH = HEADS * DIM


def plain(*rungs: Rung, inv_freq: np.ndarray | None = None) -> Calibration:
    """Bases of unit vectors, unit scales, no mean."""
    basis = np.eye(2 * WIDTH, dtype=np.float32)
    metric = np.zeros((LAYERS, 2, HEADS, DIM, DIM), dtype=np.float32)
    metric[:] = np.eye(DIM)
    return Calibration(
        Header(1, "m", tuple(range(LAYERS)), HEADS, DIM, ((0, 2), (2, 4)), rungs),
        np.zeros(0, np.float32) if inv_freq is None else inv_freq,
        np.zeros((LAYERS, 2, WIDTH), np.float32),
        np.ones((LAYERS, 2, WIDTH), np.float32),
        metric,
        (basis,) * 4,
    )


@pytest.mark.parametrize(("rows", "width", "cols"), [(1, 16, 16), (7, 33, 20), (50, 64, 7),
                                                     (97, 100, 100)])  # fmt: skip
def test_products_are_those_of_numpy(rows: int, width: int, cols: int) -> None:
    assert native is not None
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    basis = rng.normal(size=(width, 2 * cols))
    q = np.empty((cols, rows), dtype=np.int16)
    assert native.forward(x, pack(basis), q, rows, width, cols, 3.0, 0.5) == 0
    wanted = 3 * x.astype(np.float64) @ basis[:, :cols]
    assert np.abs(wanted.T - q).max() < 0.51
    back = rng.normal(size=(2 * cols, width))
    y = np.empty((rows, width), dtype=np.float32)
    native.inverse(q, pack(back), y, rows, cols, 2 * cols, width, 0.25)
    np.testing.assert_allclose(y, 0.25 * q.T @ back[:cols], rtol=1e-4, atol=1e-3)
    huge = np.full_like(x, 1e9)
    assert native.forward(huge, pack(np.abs(basis)), q, rows, width, cols, 1.0, 0.5) == NO_GAIN
    assert native.forward(x * np.float32("nan"), pack(basis), q, rows, width, cols, 1.0, 0.5) == (
        NO_GAIN
    )


@pytest.mark.parametrize(("kind", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float16")])
def test_rows_are_unpacked_rotated_and_packed_again(kind: int, dtype: str) -> None:
    assert native is not None
    shape = Tile.of(FULL[dtype], (0,), (10, 30))
    raw = values(shape)[: shape.nbytes // 2]
    angles = np.arange(10, 30)[:, None] * 10.0 ** -np.arange(DIM // 2)
    turns = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
    mean = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    x = np.zeros((20, 2 * WIDTH), dtype=np.float32)
    arguments = (20, HEADS, DIM, kind, 2 * WIDTH, WIDTH)
    assert native.load_rows(raw, turns, mean, x, *arguments) == 0
    v = floats(raw, dtype).reshape(20, HEADS, 2, DIM // 2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = v[:, :, 0], v[:, :, 1]
    wanted = np.stack((low * cos + high * sin, high * cos - low * sin), 2).reshape(20, WIDTH)
    np.testing.assert_allclose(x[:, WIDTH:], wanted - mean, atol=1e-5 * np.abs(wanted).max())
    assert (x[:, :WIDTH] == 0).all()
    out = np.empty_like(raw)
    native.store_rows(out, turns, mean, x, *arguments)
    a, b = floats(raw, dtype), floats(out, dtype)
    unit = {0: 1e-5, 1: 2**-7, 2: 2**-10}[kind]
    assert (np.abs(a - b) <= unit * np.abs(a) + 1e-4 * np.abs(a).max() * (kind == 0) + 1e-5).all()


@pytest.mark.parametrize("rows", [1, 8, 31, 33, 70, 128])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_without_a_basis_the_bits_are_those_of_single_precision(rows: int, heads: int) -> None:
    """No product is added to without rounding in between: so any CPU, and a GPU, gets the same."""
    assert native is not None
    rng, dim = np.random.default_rng(rows), 16
    width = heads * dim
    raw = (rng.normal(0, 3, rows * width).astype(np.float32).view("<u4") >> 16).astype("<u2")
    angles = rng.uniform(0, 7, (rows, dim // 2))
    turns = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
    mean, scale = (rng.uniform(0.5, 9, width).astype(np.float32) for _ in range(2))
    x = np.empty((rows, width), dtype=np.float32)
    q = np.empty((width, rows), dtype=np.int16)
    raw_bytes = raw.view(np.uint8)
    assert native.load_rows(raw_bytes, turns, mean, x, rows, heads, dim, 1, width, 0) == 0
    assert native.quantise(x, scale, q, rows, width, 0.5) == 0
    v = floats(raw_bytes, "bfloat16").reshape(rows, heads, 2, dim // 2)
    cos, sin = turns[:, None, : dim // 2], turns[:, None, dim // 2 :]
    low, high = v[:, :, 0], v[:, :, 1]
    turned = np.stack((low * cos + high * sin, high * cos - low * sin), 2).reshape(rows, width)
    wanted_x = turned - mean
    assert (x == wanted_x).all()
    scaled = wanted_x * scale
    wanted = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int16)
    assert (q == wanted.T).all()

    out = np.empty_like(raw_bytes)
    native.restore(out, q, scale, turns, mean, rows, heads, dim, 1)
    back = (q.T.astype(np.float32) * scale + mean).reshape(rows, heads, 2, dim // 2)
    low, high = back[:, :, 0], back[:, :, 1]
    again = np.stack((low * cos - high * sin, high * cos + low * sin), 2).reshape(rows, width)
    bits = again.view("<u4")
    assert (out.view("<u2").reshape(rows, width) == (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).all()


def test_what_is_too_large_to_quantise_is_refused() -> None:
    assert native is not None
    q = np.empty((40, 40), dtype=np.int16)
    one = np.ones(40, dtype=np.float32)
    for value, wanted in (
        (29999.0, 0), (-29999.0, 0), (30001.0, NO_GAIN), (-1e30, NO_GAIN), (np.inf, NO_GAIN),
        (np.nan, NO_GAIN),
    ):  # fmt: skip
        x = np.zeros((40, 40), dtype=np.float32)
        x[39, 37] = value
        assert native.quantise(x, one, q, 40, 40, 0.5) == wanted
        assert wanted or q[37, 39] == value
        assert (np.delete(q.ravel(), 37 * 40 + 39) == 0).all()


def test_fourteen_bits_are_unpacked_with_their_sign() -> None:
    assert native is not None
    wanted = np.concatenate((np.arange(-8192, 8192), [5, -7, 0, -1])).astype(np.int16)
    low = (wanted & 0xFF).astype(np.uint8)
    high = (wanted.astype(np.int64) >> 8 & 63).reshape(-1, 4) << np.array([0, 6, 12, 18])
    three = high.sum(1).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    packed = np.concatenate((low, three.ravel()))
    q = np.empty_like(wanted)
    assert native.unpack(packed, q) == 0
    assert (q == wanted).all()
    for bad in (packed[:-1], np.append(packed, packed[:1])):
        with pytest.raises(ValueError, match="sizes"):
            native.unpack(bad, q)


def test_float16_is_packed_as_numpy_does() -> None:
    assert native is not None
    x = np.array(
        [[0, 1, -1, 65504, 65519, 1e-7, 6e-8, 6.1e-5, 0.1, -0.3, 2049, 2051, 1e-9, 3, 5, 7]]
    )
    x = x.astype(np.float32)
    out = np.empty(32, dtype=np.uint8)
    none = np.zeros(0, np.float32)
    native.store_rows(out, none, np.zeros(16, np.float32), x, 1, 1, 16, 2, 16, 0)
    np.testing.assert_allclose(out.view("<f2"), x[0].astype(np.float16), rtol=0, atol=6e-8)


def test_int8_has_a_scale_for_each_channel_of_k_and_each_token_of_v() -> None:
    assert native is not None
    shape = Tile.of(FULL["bfloat16"], (0,), (64, 192))
    x = np.random.default_rng(0).normal(size=(2, 128, HEADS, DIM)).astype(np.float32)
    x[0, :, 0, 3] *= 500  # one channel of K
    x[1, 17] *= 500  # one token of V
    raw = (x.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(-1)
    payload = Int8Codec(native).encode(raw, shape)
    assert payload is not None
    out = np.empty_like(raw)
    Int8Codec(native).decode_into(memoryview(payload), out, shape)
    a, b = (floats(v, "bfloat16").reshape(x.shape) for v in (raw, out))
    k_step = np.abs(a[0]).reshape(2, 64, HEADS, DIM).max(1).repeat(64, 0).reshape(128, HEADS, DIM)
    v_step = np.abs(a[1]).max(-1, keepdims=True)
    for part, top in ((0, k_step), (1, v_step)):
        assert (np.abs(a[part] - b[part]) <= top / 127 * 0.52 + np.abs(a[part]) / 128).all()


def test_sinks_are_raw_whatever_the_chunk_they_are_in() -> None:
    assert native is not None
    rung = Rung("tight-basis", Quality.TIGHT, 4.0, ((1, 1), (1, 1)))
    codec = make_codec(native, plain(rung), rung)
    for start, tokens, sinks in ((0, 64, 4), (2, 64, 2), (4, 64, 0)):
        shape = Tile.of(FULL["bfloat16"], (0, 1), (start, start + tokens))
        raw = values(shape)
        payload = codec.encode(raw, shape)
        assert payload is not None
        out = np.empty_like(raw)
        codec.decode_into(memoryview(payload), out, shape)
        same = (raw == out).reshape(2, 2, tokens, -1).all((0, 1, 3))
        assert same.tolist()[:sinks] == [True] * sinks
        assert not same[sinks:].any()


def test_k_comes_back_at_its_own_positions() -> None:
    assert native is not None
    inv_freq = (100.0 ** -(np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)
    rung = Rung("near-channels", Quality.NEAR, 0.01)
    codec = make_codec(native, plain(rung, inv_freq=inv_freq), rung)
    shape = Tile.of(FULL["bfloat16"], (1,), (5000, 5064))
    raw = values(shape)
    payload = codec.encode(raw, shape)
    assert payload is not None
    out = np.empty_like(raw)
    codec.decode_into(memoryview(payload), out, shape)
    a, b = floats(raw, "bfloat16"), floats(out, "bfloat16")
    assert np.abs(a - b).max() < 0.02 + np.abs(a).max() / 128


def test_a_span_is_all_or_nothing() -> None:
    assert native is not None
    rung = Rung("near-basis", Quality.NEAR, 0.1, ((32, 32), (32, 32)))
    codec = make_codec(native, plain(rung), rung)
    assert codec.spans == ((0, 1), (2, 3))
    for layers in ((0,), (1, 2), (0, 1, 2), (3,)):
        shape = Tile.of(FULL["bfloat16"], layers, (64, 128))
        assert encode(codec, values(shape), shape)[0] == 0


def test_only_what_was_measured_to_keep_its_class_is_offered() -> None:
    def offered(measured: Measured | None) -> set[str]:
        rung = Rung("near-channels", Quality.NEAR, 0.1, measured=measured)
        return {n.partition("@")[0] for n in default_codecs(calibration=plain(rung)).names}

    def int8(*rungs: Rung) -> bool:
        return "int8" in default_codecs(calibration=plain(*rungs)).names

    assert "near-channels" in offered(GOOD)
    assert "near-channels" not in offered(None)
    assert int8(Rung("int8", Quality.NEAR, 1.0, measured=GOOD))
    assert not int8(Rung("int8", Quality.NEAR, 1.0))
    assert not int8(Rung("near-channels", Quality.NEAR, 0.1, measured=GOOD))
    assert "int8" not in default_codecs().names
    for worse in (
        {"kl": 2.1e-4}, {"kl_p99": 0.01}, {"top1": 0.99}, {"nmse_max": 0.03}, {"positions": 1999},
        {"kl": float("nan")}, {"free_running_kl": 2.1e-4},
    ):  # fmt: skip
        bad = replace(GOOD, **worse)
        assert len(misses(Quality.NEAR, bad)) == 1
        assert "near-channels" not in offered(bad)
        assert not int8(Rung("int8", Quality.NEAR, 1.0, measured=bad))


def test_classes_get_looser_in_order() -> None:
    order = [BOUNDS[q] for q in Quality if q in BOUNDS]
    for tighter, looser in itertools.pairwise(order):
        assert tighter.kl < looser.kl
        assert tighter.nmse_max < looser.nmse_max


def test_different_calibrations_have_no_codec_in_common() -> None:
    rung = Rung("near-channels", Quality.NEAR, 0.1, measured=GOOD)
    one = default_codecs(calibration=plain(rung))
    other = default_codecs(calibration=plain(replace(rung, step=0.11)))
    assert one.negotiate(one.names, Quality.NEAR).name.startswith("near-channels@")
    assert one.negotiate(other.names, Quality.NEAR).name == "exponent"
    again = plain(replace(rung, measured=replace(GOOD, kl=1e-7)))
    assert default_codecs(calibration=again).names == one.names


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    rung = Rung("near-basis", Quality.NEAR, 0.1, ((32, 32), (32, 7)), GOOD)
    made = plain(rung, inv_freq=np.ones(DIM // 2, np.float32))
    file = tmp_path / "m.npz"
    made.save(file)
    found = Calibration.load(file)
    assert found.header == made.header
    assert found.digest == made.digest
    good = file.read_bytes()
    for bad in (b"", good[:100], good.replace(b"PK", b"QK"), b"\x93NUMPY" + good):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"m\.npz is not a calibration"):
            Calibration.load(file)
    with pytest.raises(ConfigError, match="not a calibration"):
        Calibration.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mean": np.zeros((1, 2, WIDTH), np.float32)}, "mean"),
        ({"scale": np.zeros((LAYERS, 2, WIDTH), np.float32)}, "positive"),
        ({"inv_freq": np.ones(3, np.float32)}, "inv_freq"),
        ({"basis": (np.eye(8, dtype=np.float32),) * 4}, "bases"),
        ({"mean": np.full((LAYERS, 2, WIDTH), np.nan, np.float32)}, "finite"),
    ],
)
def test_a_calibration_that_contradicts_itself_is_refused(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(plain(Rung("near-channels", Quality.NEAR, 0.1)), **change).check()
