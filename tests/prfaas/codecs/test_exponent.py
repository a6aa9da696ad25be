"""The lossless codec against a slow reference of its format."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.codecs import Tile
from prfaas.codecs.native import native
from prfaas.testing.codec_contract import FULL, RECURRENT, values

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

from prfaas.codecs.exponent import ExponentCodec

CODEC = ExponentCodec(native)
CLASSES, STORED, CODED = 4, 0, 1


def codes(lengths: dict[int, int]) -> dict[tuple[int, int], int]:
    """(length, bits as they come) to symbol, of a canonical code."""
    found, code, last = {}, 0, 0
    for symbol, length in sorted(lengths.items(), key=lambda item: (item[1], item[0])):
        code <<= length - last
        last = length
        found[length, int(f"{code:0{length}b}"[::-1], 2)] = symbol
        code += 1
    return found


def reference_part(data: bytes, rows: int, cols: int, item: int) -> bytes:
    """A part, as `exponent.c` describes it, bit by bit."""
    classes, modes, at = data[:cols], data[cols : cols + CLASSES], cols + CLASSES
    tables = []
    for mode in modes:
        lengths = {}
        if mode == CODED:
            low, high = data[at : at + 2]
            packed = data[at + 2 : at + 3 + (high - low) // 2]
            at += 2 + len(packed)
            nibbles = [n for byte in packed for n in (byte & 15, byte >> 4)]
            lengths = {low + i: n for i, n in enumerate(nibbles) if n}
        tables.append(codes(lengths))
    sizes = np.frombuffer(data, "<u4", CLASSES, at).tolist()
    at += 4 * CLASSES
    top = np.zeros((rows, cols), dtype=np.uint64)
    for k in range(CLASSES):
        stream = data[at : at + sizes[k]]
        at += sizes[k]
        columns = [c for c in range(cols) if classes[c] == k]
        bits, symbols = int.from_bytes(stream, "little"), []
        for i in range(rows * len(columns)):
            if modes[k] == STORED:
                symbols.append(stream[i])
            elif modes[k] != CODED:
                symbols.append(stream[0])
            else:
                n = next(n for n in range(1, 12) if (n, bits & ((1 << n) - 1)) in tables[k])
                symbols.append(tables[k][n, bits & ((1 << n) - 1)])
                bits >>= n
        top[:, columns] = np.array(symbols, dtype=np.uint64).reshape(rows, len(columns))
    rest = np.frombuffer(data, np.uint8, rows * cols * (item - 1), at).astype(np.uint64)
    rest = rest.reshape(rows * cols, item - 1)
    word = top.reshape(-1) << np.uint64(8 * (item - 1))
    for i in range(item - 1):
        word |= rest[:, i] << np.uint64(8 * i)
    turned = (word >> np.uint64(1)) | ((word & np.uint64(1)) << np.uint64(8 * item - 1))
    return turned.astype(f"<u{item}").tobytes()


def reference_decode(payload: bytes) -> bytes:
    item, parts = payload[:2]
    at, out = 2, b""
    for _ in range(parts):
        rows, cols, size = np.frombuffer(payload, "<u4", 3, at).tolist()
        at += 12
        length = size or rows * cols * item
        data = payload[at : at + length]
        at += length
        out += reference_part(data, rows, cols, item) if size else data
    assert at == len(payload)
    return out


@pytest.mark.parametrize(
    "shape",
    [
        Tile.of(FULL["bfloat16"], (0,), (0, 64)),
        Tile.of(FULL["float16"], (0, 1), (0, 33)),
        Tile.of(FULL["float32"], (2,), (0, 40)),
        Tile.of(RECURRENT, (1,), (0, 64)),
    ],
)
def test_a_slow_reader_reads_the_same(shape: Tile) -> None:
    raw = values(shape)
    payload = CODEC.encode(raw, shape)
    if payload is None:
        pytest.skip("too small to gain anything")
    assert reference_decode(payload) == raw.tobytes()


def test_constant_and_skewed_columns() -> None:
    shape = Tile.of(FULL["bfloat16"], (0,), (0, 256))
    for fill in (0x0000, 0x3F80, 0xBF81):
        raw = np.full(shape.nbytes // 2, fill, dtype="<u2").view(np.uint8)
        payload = CODEC.encode(raw, shape)
        assert payload is not None
        assert len(payload) < 0.6 * raw.nbytes
        assert reference_decode(payload) == raw.tobytes()
    # Frequencies like Fibonacci numbers want the longest codes.
    counts = [1, 1]
    while sum(counts) < 4000:
        counts.append(counts[-1] + counts[-2])
    exponents = np.repeat(np.arange(len(counts), dtype=np.uint16) + 100, counts)
    rng = np.random.default_rng(0)
    words = rng.choice(exponents, shape.nbytes // 2).astype("<u2") << 7
    raw = words.view(np.uint8)
    payload = CODEC.encode(raw, shape)
    assert payload is not None
    assert reference_decode(payload) == raw.tobytes()
    out = np.empty_like(raw)
    CODEC.decode_into(memoryview(payload), out, shape)
    assert (out == raw).all()


def test_channels_of_different_scale_cost_less_than_one_code_would() -> None:
    rng = np.random.default_rng(3)
    shape = Tile.of(FULL["bfloat16"], (0,), (0, 1024))
    scale = np.exp2(rng.integers(-12, 12, 32))
    x = (rng.normal(size=(2 * 1024, 32)) * scale).astype(np.float32)
    raw = (x.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(-1)
    payload = CODEC.encode(raw, shape)
    assert payload is not None
    top = (raw.view("<u2") >> 7).astype(np.uint8)
    share = np.bincount(top) / top.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert len(payload) * 8 / top.size < 8 + entropy - 0.5
