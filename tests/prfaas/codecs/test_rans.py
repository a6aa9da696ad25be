"""The entropy coder against a slow reference that reads the same tables, and against its bound."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from prfaas.codecs.native import CORRUPT, NO_GAIN, native

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

LEVEL = native.simd(99)
"""What this CPU has: 0 nothing, 1 AVX2, 2 AVX-512."""

ROOT = Path(__file__).parents[3]
LADDER = (ROOT / "prfaas/codecs/csrc/ladder.h").read_text()
LANES, TOTAL, LOWEST = 32, 4096, 65536


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


REACH = numbers(LADDER.split("ladder_reach[LADDER_TABLES] = {")[1].split("}")[0])
FREQ = [
    numbers(row)
    for row in re.findall(r"\{([\d,\s]+)\}", LADDER.split("ladder_freq[LADDER_TABLES]")[1])
]


def reference_decode(data: bytes, rows: int, cols: int) -> np.ndarray:
    """As `rans.c` describes it, one symbol after the other."""
    classes = data[:cols]
    escapes, words = np.frombuffer(data, "<u4", 2, cols).tolist()
    at = cols + 8
    escaped = np.frombuffer(data, "<i2", escapes, at).tolist()
    at += 2 * escapes
    shifts = [0 if c == 255 else c >> 5 for c in classes]
    eights = -(-rows // 8)
    low = []
    for shift in shifts:
        size = eights * shift
        bits = int.from_bytes(data[at : at + size], "little")
        low.append([bits >> shift * r & ((1 << shift) - 1) for r in range(rows)])
        assert not bits >> 8 * size
        at += size
    x = np.frombuffer(data, "<u4", LANES, at).tolist()
    stream = np.frombuffer(data, "<u2", words, at + 4 * LANES).tolist()
    q = np.zeros((cols, rows), dtype=np.int16)
    for c, cls in enumerate(classes):
        if cls == 255:
            continue
        shift, freq, reach = cls >> 5, FREQ[cls & 31], REACH[cls & 31]
        starts = np.cumsum([0, *freq]).tolist()
        for r in range(rows):
            v = x[r % LANES]
            slot = v % TOTAL
            s = int(np.searchsorted(starts, slot, side="right")) - 1
            v = freq[s] * (v // TOTAL) + slot - starts[s]
            if v < LOWEST:
                v = v << 16 | stream.pop(0)
            x[r % LANES] = v
            half = (1 << shift) >> 1
            value = ((s - reach) << shift) + low[c][r] - half
            q[c, r] = escaped.pop(0) if s == 2 * reach + 1 else value
    assert not stream
    assert x == [LOWEST] * LANES
    return q


def encoded(q: np.ndarray) -> bytes:
    assert native is not None
    cols, rows = q.shape
    out = np.empty(native.rans_bound(rows, cols), dtype=np.uint8)
    size = native.rans_encode(q, out, rows, cols)
    assert size > 0
    return out[:size].tobytes()


def decoded(data: bytes, rows: int, cols: int) -> np.ndarray | None:
    assert native is not None
    q = np.empty((cols, rows), dtype=np.int16)
    return None if native.rans_decode(data, q, rows, cols) == CORRUPT else q


@contextmanager
def using(level: int) -> Iterator[None]:
    """The entropy coder with no more than this."""
    assert native is not None
    assert native.simd(level) == level
    try:
        yield
    finally:
        native.simd(LEVEL)


def test_tables_are_whole() -> None:
    assert len(FREQ) == len(REACH) == 28
    for freq, reach in zip(FREQ, REACH, strict=True):
        assert len(freq) == 2 * reach + 2
        assert sum(freq) == TOTAL
        assert min(freq) >= 1


def test_the_committed_tables_are_what_the_script_makes(tmp_path: Path) -> None:
    out = tmp_path / "ladder.h"
    code = (
        "import sys, pathlib, scripts.gen_codec_tables as g; g.OUT = pathlib.Path(sys.argv[1]); "
        "g.main()"
    )
    command = [sys.executable, "-c", code, str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert out.read_text() == LADDER


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 40, 64, 129])
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 5.0, 40.0, 900.0, 8000.0])
def test_columns_come_back_and_a_slow_reader_agrees(rows: int, scale: float) -> None:
    rng = np.random.default_rng(rows)
    q = np.clip(np.round(rng.laplace(0, scale, (5, rows))), -32767, 32767).astype(np.int16)
    q[2] = 0
    q[3, rows // 2] = 31000
    data = encoded(q)
    found = decoded(data, rows, 5)
    assert found is not None
    assert (found == q).all()
    assert (reference_decode(data, rows, 5) == q).all()


@pytest.mark.parametrize("rows", [1, 8, 31, 32, 33, 63, 71, 96, 252, 256])
def test_every_cpu_makes_and_reads_the_same_bytes(rows: int) -> None:
    rng = np.random.default_rng(rows)
    scale = np.exp(rng.uniform(-4, 9, (60, 1)))
    q = np.clip(np.round(rng.laplace(0, scale, (60, rows))), -32767, 32767).astype(np.int16)
    q[::7] = 0
    q[5, rows // 2] = 32767
    made = set()
    for level in range(LEVEL + 1):
        with using(level):
            made.add(encoded(q))
    assert len(made) == 1
    (data,) = made
    for level in range(LEVEL + 1):
        with using(level):
            found = decoded(data, rows, 60)
            assert found is not None
            assert (found == q).all()
            for end in range(len(data) - 40, len(data)):
                assert decoded(data[:end], rows, 60) is None


def test_a_division_is_exact_for_every_frequency() -> None:
    """Long columns of each table, so that every symbol meets states of all sizes."""
    rng = np.random.default_rng(5)
    columns = []
    for reach, freq in zip(REACH, FREQ, strict=True):
        share = np.array(freq[:-1]) / sum(freq[:-1])
        columns.append(rng.choice(np.arange(-reach, reach + 1), 8192, p=share))
    q = np.array(columns).astype(np.int16)
    made = set()
    for level in range(LEVEL + 1):
        with using(level):
            made.add(encoded(q))
    assert len(made) == 1
    found = decoded(made.pop(), 8192, len(q))
    assert found is not None
    assert (found == q).all()


@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0, 3.0, 10.0, 50.0])
def test_it_is_near_the_entropy(scale: float) -> None:
    rng = np.random.default_rng(0)
    q = np.round(rng.normal(0, scale, (64, 1024))).astype(np.int16)
    counts = np.bincount(q.ravel().astype(np.int64) + 40000)
    share = counts[counts > 0] / q.size
    entropy = float(-(share * np.log2(share)).sum())
    assert len(encoded(q)) * 8 / q.size < 1.05 * entropy + 0.04


def test_the_bound_holds_for_the_worst_input() -> None:
    assert native is not None
    rng = np.random.default_rng(1)
    q = rng.integers(-32767, 32767, (40, 300)).astype(np.int16)
    q[:20] = np.where(rng.random((20, 300)) < 0.01, 32000, 0)
    q[20:30] = 0
    q[20:30, 0] = 32767
    found = decoded(encoded(q), 300, 40)
    assert found is not None
    assert (found == q).all()
    small = np.empty(native.rans_bound(300, 40) - 1, dtype=np.uint8)
    assert native.rans_encode(q, small, 300, 40) == NO_GAIN


def test_every_single_damage_is_found_or_harmless() -> None:
    rng = np.random.default_rng(2)
    q = np.round(rng.laplace(0, 3, (6, 40))).astype(np.int16)
    data = encoded(q)
    assert all(decoded(data[:n], 40, 6) is None for n in range(len(data)))
    assert decoded(data + b"\0", 40, 6) is None
    kept = 0
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        found = decoded(bytes(bad), 40, 6)
        kept += found is not None
    # The states have to end where they began, so only damage to raw bits can go unseen here.
    assert kept <= len(data) // 10


def test_sizes_that_do_not_agree_are_refused() -> None:
    assert native is not None
    q = np.zeros((4, 16), dtype=np.int16)
    out = np.empty(4096, dtype=np.uint8)
    for rows, cols in ((16, 5), (0, 4), (-16, -4), (1 << 40, 1 << 40), (16, 0)):
        with pytest.raises(ValueError, match="sizes"):
            native.rans_encode(q, out, rows, cols)
        with pytest.raises(ValueError, match="sizes"):
            native.rans_decode(out, q, rows, cols)
