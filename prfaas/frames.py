"""Wire frames v1: parse, serialize, check, print; no I/O.

A gRPC message is one or more whole frames, one after another. A frame is a 68-byte header and a
payload. Every size is checked before memory is taken. Header and payload each have a crc, so a
flipped bit anywhere is found; one in a KV payload leaves the header to say which frame to fetch
again.

Layout of the header, little endian (docs/protocol.md has the table):

    magic "PF" | version u8 | type u8 | flags u16 | codec u8 | group u8
    session u64 | epoch u32 | chunk u32 | layer_start u16 | layer_end u16
    token_start u32 | token_end u32 | head_start u16 | head_end u16
    raw_bytes u64 | wire_bytes u64 | sequence u32 | payload_crc u32
    header_crc u32 (over everything before it)
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import google_crc32c
import numpy as np
import numpy.typing as npt

from prfaas.errors import CorruptKv, ProtocolError

WIRE_MAJOR = 1
WIRE_MINOR = 0
_HEADER = struct.Struct("<2sBBHBBQIIHHIIHHQQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
MAGIC = b"PF"
OPTIONAL_TYPE_BIT = 0x80
"""Unknown frame types with this bit are skipped; unknown types without it are refused."""


class FrameType(enum.IntEnum):
    """What a frame is. Up: OPEN, ACK, CANCEL, RESUME. Down: ACCEPT, SEAL, ERROR, and KV on lanes,
    which begin with ATTACH in both directions.
    """

    OPEN = 1
    ACCEPT = 2
    KV = 3
    SEAL = 4
    ERROR = 5
    ACK = 6
    CANCEL = 7
    ATTACH = 8
    RESUME = 9


class FrameFlag(enum.IntFlag):
    """Hints on KV frames."""

    NONE = 0
    APP_LIMITED = 1
    """The link had capacity to spare when this frame left: its timing says nothing about it."""
    CACHED = 2
    """Read from the sender's prefix cache."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Sizes above which a frame is refused before memory is taken."""

    max_payload_bytes: int = 64 << 20
    max_control_bytes: int = 16 << 20


DEFAULT_FRAME_LIMITS = FrameLimits()

_KNOWN_TYPES = {int(kind): kind for kind in FrameType}
_FLAGS = {bits: FrameFlag(bits) for bits in range(4)}
"""Looked up, not made: an enum's constructor takes as long as the rest of a header."""


def crc32c(data: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """Castagnoli crc of contiguous bytes, without a copy."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    # The extension takes no memoryview, but it takes an array over one.
    return int(google_crc32c.value(np.frombuffer(data, dtype=np.uint8)))


@dataclass(frozen=True, slots=True)
class Frame:
    """One wire unit; `payload` is what is on the wire (encoded), `raw_bytes` its decoded size.

    `sequence` numbers the KV frames of a session from 0. `payload_crc`: as the header says it, or
    as it was computed before; None: serialize computes it.
    """

    type: FrameType
    session: int
    epoch: int = 0
    flags: FrameFlag = FrameFlag.NONE
    codec: int = 0
    group: int = 0
    chunk: int = 0
    layer_start: int = 0
    layer_end: int = 0
    token_start: int = 0
    token_end: int = 0
    head_start: int = 0
    head_end: int = 0
    raw_bytes: int = 0
    sequence: int = 0
    payload: bytes | memoryview = b""
    payload_crc: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        text = f"<{self.type.name} s={self.session:x} e={self.epoch}"
        if self.type is FrameType.KV:
            text += (
                f" #{self.sequence} c={self.chunk} g={self.group}"
                f" L[{self.layer_start},{self.layer_end})"
                f" t[{self.token_start},{self.token_end}) h[{self.head_start},{self.head_end})"
                f" codec={self.codec} {len(self.payload)}/{self.raw_bytes}B"
            )
        else:
            text += f" {len(self.payload)}B"
        return text + ">"

    def header(self) -> bytes:
        """The header alone, crc of the payload included."""
        crc = crc32c(self.payload) if self.payload_crc is None else self.payload_crc
        head = _HEADER.pack(
            MAGIC,
            WIRE_MAJOR,
            self.type,
            self.flags,
            self.codec,
            self.group,
            self.session,
            self.epoch,
            self.chunk,
            self.layer_start,
            self.layer_end,
            self.token_start,
            self.token_end,
            self.head_start,
            self.head_end,
            self.raw_bytes,
            len(self.payload),
            self.sequence,
            crc,
        )
        return head + _CRC.pack(google_crc32c.value(head))

    def serialize(self) -> bytes:
        """Header and payload as one `bytes` (gRPC takes nothing else)."""
        return b"".join((self.header(), self.payload))

    @property
    def wire_bytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + len(self.payload)

    @property
    def intact(self) -> bool:
        """Whether the payload has the crc that the header says."""
        return self.payload_crc is None or crc32c(self.payload) == self.payload_crc

    def check(self, limits: FrameLimits = DEFAULT_FRAME_LIMITS) -> None:
        """Raise ProtocolError where fields contradict each other; run before send and after
        receive.
        """
        if self.type is not FrameType.KV:
            if len(self.payload) > limits.max_control_bytes:
                raise ProtocolError(f"{self}: control payload too large")
            return
        if (
            len(self.payload) > limits.max_payload_bytes
            or self.raw_bytes > limits.max_payload_bytes
        ):
            raise ProtocolError(f"{self}: payload too large")
        if self.layer_start >= self.layer_end:
            raise ProtocolError(f"{self}: empty range of layers")
        if self.token_start >= self.token_end:
            raise ProtocolError(f"{self}: empty range of tokens")
        if self.head_start >= self.head_end:
            raise ProtocolError(f"{self}: empty range of heads")


def parse(
    data: bytes | memoryview, limits: FrameLimits = DEFAULT_FRAME_LIMITS, at: int = 0
) -> tuple[Frame | None, int]:
    """The frame at `at` in `data` and where it ends; the frame is None for a skippable unknown
    type.

    Raises ProtocolError (not a frame, unknown version or type, sizes over `limits`, truncated) or
    CorruptKv (crc). The payload is a view into `data`, not a copy, and that of a KV frame is not
    checked here: `intact` does, in the thread that decodes.
    """
    view = memoryview(data)
    left = len(view) - at
    if left < HEADER_BYTES:
        raise ProtocolError(f"truncated frame header: {left} of {HEADER_BYTES} bytes")
    header = bytes(view[at : at + _HEADER.size])
    if header[:2] != MAGIC:
        raise ProtocolError(f"not a frame: starts with {header[:2]!r}")
    (header_crc,) = _CRC.unpack_from(view, at + _HEADER.size)
    if google_crc32c.value(header) != header_crc:
        raise CorruptKv("frame header crc mismatch")
    (
        _,
        version,
        type_,
        flags,
        codec,
        group,
        session,
        epoch,
        chunk,
        layer_start,
        layer_end,
        token_start,
        token_end,
        head_start,
        head_end,
        raw_bytes,
        wire_bytes,
        sequence,
        payload_crc,
    ) = _HEADER.unpack(header)
    if version != WIRE_MAJOR:
        raise ProtocolError(
            f"wire version {version} is not supported (this side speaks {WIRE_MAJOR})"
        )
    limit = limits.max_payload_bytes if type_ == FrameType.KV else limits.max_control_bytes
    if wire_bytes > limit or raw_bytes > limits.max_payload_bytes:
        raise ProtocolError(
            f"frame claims {wire_bytes} wire and {raw_bytes} raw bytes; limit {limit}"
        )
    if left - HEADER_BYTES < wire_bytes:
        raise ProtocolError(f"truncated frame payload: {left - HEADER_BYTES} of {wire_bytes}")
    start = at + HEADER_BYTES
    end = start + wire_bytes
    known = _KNOWN_TYPES.get(type_)
    if known is None:
        if type_ & OPTIONAL_TYPE_BIT:
            return None, end
        raise ProtocolError(f"unknown frame type {type_}")
    frame = Frame(
        known,
        session,
        epoch,
        _FLAGS.get(flags) or FrameFlag(flags),
        codec,
        group,
        chunk,
        layer_start,
        layer_end,
        token_start,
        token_end,
        head_start,
        head_end,
        raw_bytes,
        sequence,
        view[start:end],
        payload_crc,
    )
    if known is not FrameType.KV and not frame.intact:
        raise CorruptKv(f"{frame}: payload crc mismatch")
    frame.check(limits)
    return frame, end


def parse_all(
    data: bytes | memoryview, limits: FrameLimits = DEFAULT_FRAME_LIMITS
) -> Iterator[Frame]:
    """All frames of one gRPC message, unknown skippable ones left out."""
    view = memoryview(data)
    at = 0
    while at < len(view):
        frame, at = parse(view, limits, at)
        if frame is not None:
            yield frame


def with_flag(frame: Frame, flag: FrameFlag) -> Frame:
    """The same frame with one more flag."""
    return replace(frame, flags=frame.flags | flag)
