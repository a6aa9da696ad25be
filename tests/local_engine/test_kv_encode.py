"""What is prepared where KV lies is, byte for byte, what the agent's codecs would have made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from local_engine.kv_encode import ChannelsEncoder, Int8Encoder, KvEncoder, encoders_for
from prfaas.codecs import Bytes, Calibration, Preparable, Quality, Tile
from prfaas.codecs.calibration import Header, Rung
from prfaas.codecs.native import native
from prfaas.testing.codec_contract import DIM, FULL, HEADS, LAYERS, RECURRENT, values

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

from prfaas.codecs.int8 import Int8Codec
from prfaas.codecs.transform import make_codec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RUNG = Rung("near-channels", Quality.NEAR, 0.03)


def calibration(rope: bool = True) -> Calibration:
    rng, width = np.random.default_rng(3), HEADS * DIM
    freq = (100.0 ** -(np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)
    metric = np.broadcast_to(np.eye(DIM, dtype=np.float32), (LAYERS, 2, HEADS, DIM, DIM)).copy()
    return Calibration(
        Header(1, "m", tuple(range(LAYERS)), HEADS, DIM, ((0, LAYERS),), (RUNG,)),
        freq if rope else np.zeros(0, np.float32),
        rng.normal(0, 1, (LAYERS, 2, width)).astype(np.float32),
        rng.uniform(0.3, 3, (LAYERS, 2, width)).astype(np.float32),
        metric,
        (np.eye(LAYERS * width, dtype=np.float32),) * 2,
    )


def pairs(rope: bool = True) -> list[tuple[KvEncoder, Int8Codec]]:
    assert native is not None
    made = calibration(rope)
    return [
        (Int8Encoder(), Int8Codec(native)),
        (ChannelsEncoder(made, torch.device("cpu")), make_codec(native, made, RUNG)),  # type: ignore[list-item]
    ]


def tensor(raw: Bytes, tile: Tile) -> torch.Tensor:
    flat = torch.from_numpy(raw.copy()).view(DTYPES[tile.dtype])
    return flat.view(2, tile.tokens, tile.heads, tile.head_dim)


def prepared(encoder: KvEncoder, raw: Bytes, tile: Tile) -> tuple[Bytes, int]:
    out = encoder.prepare(tensor(raw, tile), tile).numpy()
    assert out.nbytes == encoder.prepared_bytes(tile) + 1
    return out[:-1], int(out[-1])


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("dtype", list(FULL))
@pytest.mark.parametrize(
    ("start", "tokens"),
    [(0, 5), (2, 3), (64, 1), (0, 64), (0, 68), (0, 70), (128, 64), (7, 257), (9000, 128)],
)
def test_the_bytes_are_those_of_the_codec(rope: bool, dtype: str, start: int, tokens: int) -> None:
    tile = Tile.of(FULL[dtype], (2,), (start, start + tokens))
    raw = values(tile, seed=tokens)
    for encoder, codec in pairs(rope):
        assert encoder.name == codec.name
        assert isinstance(codec, Preparable)
        assert encoder.prepared_bytes(tile) == codec.prepared_bytes(tile)
        if not encoder.prepared_bytes(tile):
            assert codec.encode(raw, tile) is None
            continue
        made, good = prepared(encoder, raw, tile)
        assert good
        wanted = codec.encode(raw, tile)
        assert codec.finish(made, tile) == wanted
        if wanted is not None:
            out = np.empty(tile.nbytes, np.uint8)
            codec.decode_into(memoryview(wanted), out, tile)
            assert (codec.plain(made, tile) == out).all()


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1])
@pytest.mark.parametrize("at", [0, 700, -1])
def test_what_cannot_be_encoded_says_so(bits: int, at: int) -> None:
    tile = Tile.of(FULL["bfloat16"], (0,), (64, 128 + 6))
    raw = values(tile)
    raw.view("<u2")[at] = bits
    for encoder, codec in pairs():
        assert codec.encode(raw, tile) is None
        assert prepared(encoder, raw, tile)[1] == 0


@pytest.mark.parametrize(
    ("steps", "packed"),
    [(8000, True), (-8000, True), (8500, False), (-29000, False), (31000, False), (1e30, False)],
)
def test_values_beyond_what_is_packed_are_left_to_the_agent(steps: float, packed: bool) -> None:
    tile = Tile.of(FULL["float32"], (0,), (64, 128))
    raw, made, column = values(tile), calibration(), 13
    v = raw.view("<f4").reshape(2, 64, -1)
    v[1, 5, column] = made.mean[0, 1, column] + steps * 0.03 / made.scale[0, 1, column]
    ((_, _), (encoder, codec)) = pairs()
    assert (codec.encode(raw, tile) is None) == (abs(steps) > 30000)
    assert prepared(encoder, raw, tile)[1] == packed


def test_subnormal_and_zero_values_are_treated_alike() -> None:
    tile = Tile.of(FULL["bfloat16"], (0,), (64, 192))
    raw = np.zeros(tile.nbytes, np.uint8)
    raw.view("<u2")[::3] = 0x0003
    raw.view("<u2")[1::5] = 0x8000
    for encoder, codec in pairs():
        made, good = prepared(encoder, raw, tile)
        assert good
        assert codec.finish(made, tile) == codec.encode(raw, tile)


def test_a_tile_that_is_not_for_it_is_left_alone() -> None:
    several = Tile.of(FULL["bfloat16"], (0, 1), (64, 128))
    part = Tile.of(FULL["bfloat16"], (0,), (64, 128), (1, 2))
    sinks = Tile.of(FULL["bfloat16"], (0,), (0, 4))
    state = Tile.of(RECURRENT, (1,), (0, 64))
    (int8, _), (channels, _) = pairs()
    for tile in (several, sinks, state):
        assert (int8.prepared_bytes(tile), channels.prepared_bytes(tile)) == (0, 0)
    assert channels.prepared_bytes(part) == 0
    stranger = replace(FULL["bfloat16"], layers=tuple(range(9)))
    assert channels.prepared_bytes(Tile.of(stranger, (8,), (64, 128))) == 0


def test_host_memory_has_its_encoders_at_the_agent() -> None:
    made = calibration()
    assert encoders_for(torch.device("cpu"), made) == ()
    assert [e.name for e in encoders_for(torch.device("meta"), None)] == ["int8"]
