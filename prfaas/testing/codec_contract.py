"""What every KV codec has to do, as tests: subclass `CodecContract` and say which codec it is."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from prfaas.codecs import RAW, Bytes, Codec, Quality, Tile, encode
from prfaas.errors import CorruptKv
from prfaas.layout import GroupKind, LayerGroup

HEADS, DIM, LAYERS = 2, 16, 4

FULL = {
    dtype: LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), HEADS, DIM, dtype)
    for dtype in ("bfloat16", "float16", "float32")
}
RECURRENT = LayerGroup(GroupKind.RECURRENT, (1, 3), HEADS, DIM, "float32", state_dim=8)


def values(shape: Tile, seed: int = 0) -> Bytes:
    """Bytes as a layer might have them: each channel with a scale and a mean of its own."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 1, (shape.heads, shape.head_dim)))
    rows = shape.nbytes // shape.item_bytes // scale.size
    x = (rng.normal(0.3, 1, (rows, *scale.shape)) * scale).astype(np.float32)
    if shape.dtype == "bfloat16":
        return (x.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(-1)
    return x.astype("<f2" if shape.dtype == "float16" else "<f4").view(np.uint8).reshape(-1)


def floats(raw: Bytes, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The values of canonical bytes."""
    if dtype == "bfloat16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


class CodecContract:
    """Round trip, determinism, size, threads, hostile input, and what no codec may touch."""

    tile_layers: tuple[int, ...] = (0,)
    """Layers of a tile that the codec is for."""
    worst_nmse = 0.0
    """Of what comes back, over the variance; 0: the very bytes."""

    def make(self) -> Codec:
        raise NotImplementedError

    def back(self, codec: Codec, number: int, payload: bytes, shape: Tile) -> Bytes:
        """Decode what `encode` gave."""
        out = np.full(shape.nbytes, 0xEE, dtype=np.uint8)
        (codec if number == codec.id else RAW).decode_into(memoryview(payload), out, shape)
        return out

    def tile(self, dtype: str = "bfloat16", start: int = 0, tokens: int = 70) -> Tile:
        return Tile.of(FULL[dtype], self.tile_layers, (start, start + tokens))

    @pytest.mark.parametrize("dtype", list(FULL))
    @pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 4), (0, 5), (2, 3), (64, 1), (0, 70),
                                                   (128, 64), (7, 257)])  # fmt: skip
    def test_every_tile_comes_back(self, dtype: str, start: int, tokens: int) -> None:
        codec, shape = self.make(), self.tile(dtype, start, tokens)
        raw = values(shape)
        number, payload = encode(codec, raw, shape)
        assert number in (codec.id, RAW.id)
        assert len(payload) <= raw.nbytes
        self.compare(raw, self.back(codec, number, payload, shape), shape)

    def compare(self, raw: Bytes, found: Bytes, shape: Tile) -> None:
        if not self.worst_nmse:
            assert (raw == found).all()
            return
        rows = (len(shape.layers), 2, shape.tokens, -1)
        a, b = (floats(x, shape.dtype).reshape(rows) for x in (raw, found))
        n = shape.sinks
        assert (a[:, :, :n] == b[:, :, :n]).all(), "a sink was changed"
        error = np.square(a - b).sum((2, 3))
        assert (error <= self.worst_nmse * np.square(a).sum((2, 3)) + 1e-12).all()

    def test_it_is_for_something(self) -> None:
        codec, shape = self.make(), self.tile(tokens=256)
        number, payload = encode(codec, values(shape), shape)
        assert number == codec.id
        assert len(payload) < 0.8 * shape.nbytes

    def test_the_same_bytes_give_the_same_bytes_whoever_encodes_them(self) -> None:
        shape = self.tile(tokens=130)
        raw = values(shape)
        first = self.make().encode(raw, shape)
        codec = self.make()
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: codec.encode(raw, shape), range(12))) == {first}
            assert first is not None
            outs = pool.map(lambda _: bytes(self.back(codec, codec.id, first, shape)), range(12))
            assert len(set(outs)) == 1

    @pytest.mark.parametrize("heads", [(0, 2), (1, 2)])
    def test_a_recurrent_state_comes_back_to_the_bit(self, heads: tuple[int, int]) -> None:
        codec = self.make()
        shape = Tile.of(RECURRENT, (1,), (0, 64), heads)
        raw = values(shape)
        number, payload = encode(codec, raw, shape)
        assert number == RAW.id or codec.quality is Quality.EXACT
        assert (self.back(codec, number, payload, shape) == raw).all()

    def test_part_of_the_heads_comes_back(self) -> None:
        codec = self.make()
        shape = Tile.of(FULL["bfloat16"], self.tile_layers, (64, 128), (1, 2))
        raw = values(shape)
        number, payload = encode(codec, raw, shape)
        self.compare(raw, self.back(codec, number, payload, shape), shape)

    def test_values_that_are_not_finite_are_not_approximated(self) -> None:
        codec, shape = self.make(), self.tile(start=64)
        for bits in (0x7F80, 0xFF80, 0x7FC1):
            raw = values(shape)
            raw.view("<u2")[100] = bits
            number, payload = encode(codec, raw, shape)
            assert number == RAW.id or codec.quality is Quality.EXACT
            assert (self.back(codec, number, payload, shape) == raw).all()

    def test_extreme_values_stay_within_the_bound_or_raw(self) -> None:
        codec, shape = self.make(), self.tile(start=64)
        raw = values(shape)
        raw.view("<u2")[::37] = 0x7F00
        number, payload = encode(codec, raw, shape)
        found = self.back(codec, number, payload, shape)
        assert np.isfinite(floats(found, "bfloat16")).all()

    def test_damaged_payloads_are_corrupt_or_decode_and_take_no_memory(self) -> None:
        codec, shape = self.make(), self.tile(tokens=96)
        good = codec.encode(values(shape), shape)
        assert good is not None
        rng = Random(7)
        tracemalloc.start()
        for _ in range(400):
            bad = bytearray(good)
            for _ in range(rng.choice((1, 1, 2, 8))):
                bad[rng.randrange(len(bad) if rng.random() < 0.5 else 64)] = rng.randrange(256)
            if rng.random() < 0.3:
                del bad[rng.randrange(len(bad)) :]
            elif rng.random() < 0.1:
                bad += bytes(rng.randrange(32))
            out = np.empty(shape.nbytes + 64, dtype=np.uint8)
            out[shape.nbytes :] = 0xA5
            try:
                codec.decode_into(memoryview(bad), out[: shape.nbytes], shape)
            except CorruptKv:
                pass
            assert (out[shape.nbytes :] == 0xA5).all(), "it wrote behind the tile"
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * shape.nbytes

    def test_random_and_empty_payloads_are_corrupt(self) -> None:
        codec, shape = self.make(), self.tile(tokens=32)
        rng = np.random.default_rng(3)
        for size in (0, 1, 2, 7, 64, 1000, shape.nbytes - 1, shape.nbytes + 1, 4 * shape.nbytes):
            out = np.empty(shape.nbytes, dtype=np.uint8)
            with pytest.raises(CorruptKv):
                codec.decode_into(memoryview(rng.bytes(size)), out, shape)

    def test_a_payload_for_another_tile_is_corrupt(self) -> None:
        codec, shape = self.make(), self.tile(start=64, tokens=64)
        payload = codec.encode(values(shape), shape)
        assert payload is not None
        other = self.tile(start=64, tokens=65)
        with pytest.raises(CorruptKv):
            codec.decode_into(memoryview(payload), np.empty(other.nbytes, dtype=np.uint8), other)
