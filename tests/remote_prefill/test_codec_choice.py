"""What encoding took decides for later chunks; states never get a lossy codec."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prfaas.codecs import RAW, PlanesZstdCodec, Quality, Tile
from prfaas.errors import CorruptKv
from prfaas.frames import crc32c
from prfaas.layout import GroupKind, LayerGroup
from prfaas.ledger import Piece, digest_of_crc, piece_digest
from prfaas.testing.clock import ManualClock
from remote_prefill.codec_choice import LEAST_BYTES, STALE_S, CodecChoice, EncodePaces
from remote_prefill.encoding import encode_cut

PLANES = PlanesZstdCodec()
MBIT = 125e3


class Halving:
    """A lossy codec for tests: keeps every other byte."""

    id, name, quality, spans, model_identity = 9, "int8", Quality.NEAR, (), ""

    def encode(self, raw: Any, shape: Any) -> bytes | None:
        whole = isinstance(shape, Tile) and not shape.keeps_state
        return bytes(raw[1::2].tobytes()) if whole else None

    def decode_into(self, payload: memoryview, out: Any, shape: Any) -> None:
        raise CorruptKv("not in this test")


LOSSY = Halving()


def paces(clock: ManualClock) -> EncodePaces:
    return EncodePaces(clock, 1, lambda *counted: None)


def test_paces_are_those_of_the_last_megabytes() -> None:
    book = paces(ManualClock())
    book.note("raw", LEAST_BYTES - 1, 100, 1.0)
    assert book.paces() == {}  # too little to tell
    for _ in range(200):
        book.note("exponent", 1 << 20, 1 << 19, 1e-3)
    for _ in range(60):
        book.note("exponent", 1 << 20, 1 << 18, 1e-2)
    found = book.paces()["exponent"]
    assert found.bytes_per_s == pytest.approx((1 << 20) / 1e-2, rel=0.01)
    assert found.ratio == pytest.approx(4, rel=0.01)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    clock = ManualClock()
    book = paces(clock)
    book.note("exponent", 1 << 20, 1 << 19, 10.0)
    assert "exponent" in book.paces()
    clock.advance(STALE_S + 1)
    assert book.paces() == {}
    book.note("exponent", 1 << 20, 1 << 19, 1e-3)
    assert book.paces()["exponent"].bytes_per_s == pytest.approx((1 << 20) / 1e-3)


def test_each_chunk_is_judged_once_by_the_link_and_the_pace() -> None:
    clock, goodput = ManualClock(), [10 * MBIT]
    book = paces(clock)
    choice = CodecChoice((LOSSY, PLANES, RAW), book, lambda: goodput[0])
    assert choice.of_chunk(0) == (LOSSY, PLANES)
    goodput[0] = 1e10
    assert choice.of_chunk(0) == (LOSSY, PLANES)
    assert choice.of_chunk(1) == (RAW,)
    goodput[0] = 100 * MBIT
    book.note("int8", 1 << 20, 1 << 19, 1.0)  # this machine takes a second for a megabyte
    assert choice.of_chunk(2) == (PLANES,)


def test_of_what_was_encoded_all_is_counted() -> None:
    counted: list[tuple[str, int, int]] = []
    book = EncodePaces(ManualClock(), 1, lambda *each: counted.append(each))
    CodecChoice((RAW,), book, lambda: 0.0).note(RAW, 100, 90, 0.1)
    assert counted == [("raw", 100, 90)]


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.RECURRENT])
def test_a_state_is_sent_exactly_and_a_lossy_piece_is_known_by_its_payload(kind: Any) -> None:
    keeps_state = kind is GroupKind.RECURRENT
    group = LayerGroup(kind, (0,), 1, 8, "float32", state_dim=16 if keeps_state else 0)
    piece = Piece(0, 0, 0, 0, 8, 0, 1)
    raw = np.zeros(512, dtype=np.uint8)
    record: Any = SimpleNamespace(raw=raw, piece=piece, cached=False, codec="")
    done = encode_cut((LOSSY, PLANES), record, piece, group)
    if keeps_state:
        assert (done.codec, done.digest) == (PLANES, piece_digest(raw))
    else:
        assert (done.codec, done.digest) == (LOSSY, digest_of_crc(crc32c(done.payload)))
        assert done.digest != piece_digest(raw)
    assert done.payload_crc == crc32c(done.payload)
    assert done.seconds > 0
