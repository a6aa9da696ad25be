"""Codecs give back what they took, stay within their bounds, and refuse hostile input cheaply."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prfaas.codecs import (
    RAW,
    CodecSet,
    PlanesZstdCodec,
    Quality,
    RawCodec,
    default_codecs,
    encode,
    merge_planes,
    split_planes,
)
from prfaas.errors import CorruptKv, IncompatibleLayout

PLANES = PlanesZstdCodec()


def kv_like(tokens: int, seed: int = 0) -> np.ndarray:
    """bf16 bytes of normal numbers, as KV is."""
    values = np.random.default_rng(seed).standard_normal(tokens * 64, dtype=np.float32)
    return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)


def decode(codec_id: int, payload: bytes, nbytes: int, item_bytes: int) -> np.ndarray:
    out = np.full(nbytes, 0xEE, dtype=np.uint8)
    default_codecs().by_id(codec_id).decode_into(memoryview(payload), out, item_bytes)
    return out


@given(st.binary(max_size=400), st.sampled_from([1, 2, 4]), st.sampled_from([RAW, PLANES]))
def test_what_goes_in_comes_out_and_is_never_longer(data: bytes, item: int, codec: object) -> None:
    raw = np.frombuffer(data[: len(data) // item * item], dtype=np.uint8)
    codec_id, payload = encode(codec, raw, item)  # type: ignore[arg-type]
    assert len(payload) <= raw.nbytes
    assert bytes(decode(codec_id, payload, raw.nbytes, item)) == raw.tobytes()


@pytest.mark.parametrize("item", [2, 4])
def test_planes_are_the_items_bytes(item: int) -> None:
    raw = np.arange(24, dtype=np.uint8)
    planes = split_planes(raw, item)
    assert [list(p) for p in planes] == [list(range(i, 24, item)) for i in range(item)]
    out = np.empty(24, dtype=np.uint8)
    merge_planes(planes, out)
    assert (out == raw).all()


@pytest.mark.parametrize("item", [2, 4])
def test_kv_shrinks_as_much_as_with_all_the_matches_zstd_finds(item: int) -> None:
    raw = (
        kv_like(2000)
        if item == 2
        else np.frombuffer(
            np.random.default_rng(0).standard_normal(50_000, dtype=np.float32).tobytes(), np.uint8
        )
    )
    packed = PLANES.encode(raw, item)
    assert packed is not None
    plain = zstandard.ZstdCompressor(level=1)
    planes = split_planes(raw, item)
    assert len(packed) < 1.02 * sum(min(p.nbytes, len(plain.compress(p.data))) for p in planes)


def test_bf16_kv_gets_a_third_smaller() -> None:
    raw = kv_like(1024)
    codec_id, payload = encode(PLANES, raw, 2)
    assert codec_id == PLANES.id
    assert raw.nbytes / len(payload) > 1.4


def test_noise_falls_back_to_raw() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    codec_id, payload = encode(PLANES, raw, 2)
    assert codec_id == RAW.id
    assert payload == raw.tobytes()


def test_one_codec_serves_many_threads() -> None:
    inputs = [kv_like(256, seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(lambda raw: encode(PLANES, raw, 2), inputs))
        outputs = list(pool.map(lambda p: decode(p[0], p[1], inputs[0].nbytes, 2), packed))
    assert all((a == b).all() for a, b in zip(inputs, outputs, strict=True))


@given(st.binary(max_size=200), st.integers(0, 4096).map(lambda n: n * 2))
def test_random_bytes_decode_or_are_corrupt(data: bytes, nbytes: int) -> None:
    for codec in (RAW, PLANES):
        out = np.empty(nbytes, dtype=np.uint8)
        try:
            codec.decode_into(memoryview(data), out, 2)
        except CorruptKv:
            pass


@given(st.data())
def test_a_damaged_payload_never_raises_anything_but_corrupt(data: st.DataObject) -> None:
    raw = kv_like(8)
    payload = bytearray(PLANES.encode(raw, 2) or b"")
    assert payload
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    out = np.empty(raw.nbytes, dtype=np.uint8)
    try:
        PLANES.decode_into(memoryview(payload), out, 2)
    except CorruptKv:
        pass


def plane(data: bytes, *, stored: bool = False) -> bytes:
    return struct.pack("<I", len(data) | (stored << 31)) + data


BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))
SIZED = zstandard.ZstdCompressor().compress(bytes(8))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "truncated"),
        (b"\xff\xff\xff\xff", "truncated"),
        (plane(b"x" * 8, stored=True), "truncated"),
        (plane(b"x" * 7, stored=True) * 2, "7 bytes, not 8"),
        (plane(b"x" * 8, stored=True) * 3, "12 bytes too many"),
        (plane(BOMB) * 2, "claims 268435456 bytes, not 8"),
        (plane(UNSIZED) * 2, "bytes, not 8"),
        (plane(SIZED + b"tail") * 2, "zstd plane"),
        (plane(SIZED[:-2]) * 2, "zstd plane"),
        (plane(b"not zstd") * 2, "zstd plane"),
    ],
)
def test_hostile_planes_are_refused_before_memory_is_taken(payload: bytes, says: str) -> None:
    out = np.empty(16, dtype=np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptKv, match=says):
            PLANES.decode_into(memoryview(payload), out, 2)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_raw_of_the_wrong_size_is_corrupt() -> None:
    with pytest.raises(CorruptKv, match="3 bytes, not 4"):
        RawCodec().decode_into(memoryview(b"abc"), np.empty(4, dtype=np.uint8), 1)


def test_negotiation_takes_the_best_common_codec_and_names_both_sides() -> None:
    codecs = CodecSet((RAW, PLANES))
    assert codecs.names == ("planes-zstd", "raw")
    assert codecs.negotiate(["raw", "planes-zstd", "rans"]).name == "planes-zstd"
    assert CodecSet([RAW]).negotiate(codecs.names).name == "raw"
    with pytest.raises(IncompatibleLayout, match=r"rans") as caught:
        codecs.negotiate(["rans"])
    assert caught.value.field == "codecs"
    with pytest.raises(CorruptKv, match=r"codec 9 is not one of \[0, 1\]"):
        codecs.by_id(9)


def test_a_lossy_codec_is_taken_only_where_its_class_is_asked_for() -> None:
    codecs = default_codecs()
    assert codecs.negotiate(codecs.names).quality is Quality.EXACT
    for quality in Quality:
        found = codecs.common(codecs.names, quality)
        assert {codec.quality for codec in found} <= set(quality.allowed)
        assert [codec.id for codec in found] == sorted((c.id for c in found), reverse=True)
