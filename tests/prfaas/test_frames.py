"""Wire frames: what goes in comes out, and nothing malformed gets through or costs memory."""

from __future__ import annotations

import struct
from dataclasses import replace

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import CorruptKv, ProtocolError
from prfaas.frames import (
    HEADER_BYTES,
    Frame,
    FrameFlag,
    FrameLimits,
    FrameType,
    parse,
    parse_all,
)

KV = Frame(
    FrameType.KV,
    session=0x1234,
    epoch=7,
    flags=FrameFlag.CACHED,
    codec=1,
    chunk=3,
    layer_start=4,
    layer_end=5,
    token_start=768,
    token_end=1024,
    head_end=3,
    raw_bytes=10,
    sequence=9,
    payload=b"0123456789",
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
frames = st.builds(
    Frame,
    type=st.sampled_from([t for t in FrameType if t is not FrameType.KV]),
    session=u64,
    epoch=u32,
    codec=st.integers(0, 255),
    group=st.integers(0, 255),
    chunk=u32,
    layer_start=u16,
    layer_end=u16,
    token_start=u32,
    token_end=u32,
    head_start=u16,
    head_end=u16,
    raw_bytes=st.integers(0, 1 << 20),
    sequence=u32,
    payload=st.binary(max_size=200),
)


@given(st.lists(frames, max_size=4))
def test_any_frames_survive_one_message(sent: list[Frame]) -> None:
    message = b"".join(f.serialize() for f in sent)
    received = [replace(f, payload=bytes(f.payload)) for f in parse_all(message)]
    assert received == sent


def test_header_is_68_bytes_and_its_text_names_everything() -> None:
    assert HEADER_BYTES == 68
    assert str(KV) == "<KV s=1234 e=7 #9 c=3 g=0 L[4,5) t[768,1024) h[0,3) codec=1 10/10B>"


@pytest.mark.parametrize("bit", range(0, (HEADER_BYTES + 10) * 8, 7))
def test_any_flipped_bit_is_found(bit: int) -> None:
    data = bytearray(KV.serialize())
    data[bit // 8] ^= 1 << (bit % 8)
    if bit < HEADER_BYTES * 8:
        with pytest.raises((CorruptKv, ProtocolError)):
            parse(bytes(data))
        return
    frame, used = parse(bytes(data))
    assert frame is not None
    assert used == len(data)
    assert not frame.intact  # and the header says which frame to fetch again
    assert frame.sequence == 9


def test_a_flipped_bit_in_a_control_payload_is_refused() -> None:
    data = bytearray(Frame(FrameType.ACK, 1, payload=b"0123").serialize())
    data[-1] ^= 1
    with pytest.raises(CorruptKv, match="payload crc"):
        parse(bytes(data))


def test_a_crc_that_is_known_is_not_computed_again() -> None:
    known = replace(KV, payload_crc=google_crc32c.value(b"0123456789"))
    assert known.serialize() == KV.serialize()
    wrong, _ = parse(replace(KV, payload_crc=1).serialize())
    assert wrong is not None
    assert not wrong.intact


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_with_our_errors_only(data: bytes) -> None:
    with pytest.raises((CorruptKv, ProtocolError)):
        list(parse_all(data + b"x"))


def _forge(**fields: int) -> bytes:
    """A KV header with chosen size fields and right crcs."""
    data = bytearray(KV.serialize())
    if "raw_bytes" in fields:
        struct.pack_into("<Q", data, 40, fields["raw_bytes"])
    if "wire_bytes" in fields:
        struct.pack_into("<Q", data, 48, fields["wire_bytes"])
    if "version" in fields:
        data[2] = fields["version"]
    if "type" in fields:
        data[3] = fields["type"]
    struct.pack_into("<I", data, 64, google_crc32c.value(bytes(data[:64])))
    return bytes(data)


@pytest.mark.parametrize("field", ["raw_bytes", "wire_bytes"])
def test_a_claim_of_2_to_the_63_bytes_is_refused_by_its_header(field: str) -> None:
    with pytest.raises(ProtocolError, match="claims"):
        parse(_forge(**{field: 2**63}))


def test_limits_are_configurable_and_checked_both_ways() -> None:
    tight = FrameLimits(max_payload_bytes=9)
    with pytest.raises(ProtocolError, match="too large"):
        KV.check(tight)
    with pytest.raises(ProtocolError, match="claims"):
        parse(KV.serialize(), tight)


def test_other_versions_and_unknown_types_are_refused_optional_ones_skipped() -> None:
    with pytest.raises(ProtocolError, match="wire version 9"):
        parse(_forge(version=9))
    with pytest.raises(ProtocolError, match="unknown frame type 99"):
        parse(_forge(type=99))
    message = _forge(type=0x85) + KV.serialize()
    assert [f.chunk for f in parse_all(message)] == [3]


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9])
def test_truncated_frames_say_so(cut: int) -> None:
    with pytest.raises(ProtocolError, match="truncated"):
        parse(KV.serialize()[:cut])


@pytest.mark.parametrize("field", ["layer_end", "token_end", "head_end"])
def test_kv_frames_with_empty_ranges_are_refused(field: str) -> None:
    with pytest.raises(ProtocolError, match="empty range"):
        replace(KV, **{field: 0}).check()
