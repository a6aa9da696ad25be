"""KV codecs: bytes in, bytes out, no I/O; a number on the wire names the codec of each frame.

`planes-zstd` splits items into byte planes (all first bytes, all second bytes, ...), because sign
and exponent bytes of KV compress and mantissa bytes do not, and packs each plane on its own:

    for each plane: u32 little endian (bit 31: stored as it is; low bits: bytes that follow) | bytes

Output bounds are checked against the frame's sizes before memory is taken: hostile input is a
CorruptKv and costs at most the decoded size that was negotiated.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from prfaas.errors import CorruptKv, IncompatibleLayout

Bytes = npt.NDArray[np.uint8]

_PLANE = struct.Struct("<I")
_STORED = 1 << 31
_FASTEST = 1
"""Level at which zstd is to spend its time on entropy coding alone."""


class Codec(Protocol):
    """Encodes and decodes one frame's payload; thread-safe, long work releases the GIL."""

    id: ClassVar[int]
    name: ClassVar[str]

    def encode(self, raw: Bytes, item_bytes: int) -> bytes | None:
        """The encoded bytes, or None where the result would not be smaller than `raw`."""
        ...

    def decode_into(self, payload: memoryview, out: Bytes, item_bytes: int) -> None:
        """Fill all of contiguous `out`. Raises CorruptKv; `out` then holds rubbish."""
        ...


class RawCodec:
    """The bytes as they are."""

    id: ClassVar[int] = 0
    name: ClassVar[str] = "raw"

    def encode(self, raw: Bytes, item_bytes: int) -> bytes | None:
        return raw.tobytes()

    def decode_into(self, payload: memoryview, out: Bytes, item_bytes: int) -> None:
        if len(payload) != out.nbytes:
            raise CorruptKv(f"raw payload has {len(payload)} bytes, not {out.nbytes}")
        out[:] = np.frombuffer(payload, dtype=np.uint8)


class PlanesZstdCodec:
    """Lossless: byte planes, each through zstd. Contexts are kept per thread."""

    id: ClassVar[int] = 1
    name: ClassVar[str] = "planes-zstd"

    def __init__(self, level: int = _FASTEST) -> None:
        self._parameters = _parameters(level)
        self._local = threading.local()

    def encode(self, raw: Bytes, item_bytes: int) -> bytes | None:
        compress = self._compressor().compress
        parts: list[bytes] = []
        total = 0
        for plane in split_planes(raw, item_bytes):
            packed = compress(plane.data)
            if len(packed) < plane.nbytes:
                parts += (_PLANE.pack(len(packed)), packed)
            else:
                parts += (_PLANE.pack(plane.nbytes | _STORED), plane.tobytes())
            total += _PLANE.size + len(parts[-1])
        return b"".join(parts) if total < raw.nbytes else None

    def decode_into(self, payload: memoryview, out: Bytes, item_bytes: int) -> None:
        if out.nbytes % item_bytes:
            raise CorruptKv(f"{out.nbytes} bytes are not a multiple of {item_bytes}")
        plane_bytes = out.nbytes // item_bytes
        planes: list[Bytes] = []
        at = 0
        for _ in range(item_bytes):
            if len(payload) - at < _PLANE.size:
                raise CorruptKv("planes-zstd payload is truncated")
            (word,) = _PLANE.unpack_from(payload, at)
            at += _PLANE.size
            size = word & ~_STORED
            part = payload[at : at + size]
            if len(part) != size:
                raise CorruptKv("planes-zstd payload is truncated")
            at += size
            planes.append(self._plane(part, plane_bytes, stored=bool(word & _STORED)))
        if at != len(payload):
            raise CorruptKv(f"planes-zstd payload has {len(payload) - at} bytes too many")
        merge_planes(planes, out)

    def _plane(self, part: memoryview, plane_bytes: int, *, stored: bool) -> Bytes:
        if stored:
            if len(part) != plane_bytes:
                raise CorruptKv(f"stored plane has {len(part)} bytes, not {plane_bytes}")
            return np.frombuffer(part, dtype=np.uint8)
        try:
            # zstandard allocates what the frame claims: look before it does.
            claimed = zstandard.get_frame_parameters(part).content_size
            if claimed != plane_bytes:
                raise CorruptKv(f"zstd plane claims {claimed} bytes, not {plane_bytes}")
            data = self._decompressor().decompress(
                part, max_output_size=plane_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as exc:
            raise CorruptKv(f"zstd plane: {exc}") from exc
        if len(data) != plane_bytes:
            raise CorruptKv(f"zstd plane gave {len(data)} bytes, not {plane_bytes}")
        return np.frombuffer(data, dtype=np.uint8)

    def _compressor(self) -> zstandard.ZstdCompressor:
        context: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if context is None:
            context = zstandard.ZstdCompressor(compression_params=self._parameters)
            self._local.compressor = context
        return context

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        context: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if context is None:
            context = self._local.decompressor = zstandard.ZstdDecompressor()
        return context


def _parameters(level: int) -> zstandard.ZstdCompressionParameters:
    """The planes of KV hardly repeat themselves: looking for matches takes most of zstd's time and
    finds short ones, which cost about what they save. A table of 256 places still finds what is
    plain: recorded and random KV shrink as before within 2%, in 0.6 of the time.
    """
    if level == _FASTEST:
        return zstandard.ZstdCompressionParameters.from_level(level, hash_log=8, min_match=7)
    return zstandard.ZstdCompressionParameters.from_level(level)


def split_planes(raw: Bytes, item_bytes: int) -> Sequence[Bytes]:
    """`raw` (a multiple of `item_bytes` long) as `item_bytes` contiguous byte planes, low first."""
    if item_bytes == 2:
        # Half again as fast as the strided copy, and 2-byte KV is the common case.
        items = raw.view("<u2")
        return items.astype(np.uint8), (items >> 8).astype(np.uint8)
    return tuple(np.ascontiguousarray(raw.reshape(-1, item_bytes).T))


def merge_planes(planes: Sequence[Bytes], out: Bytes) -> None:
    """Inverse of `split_planes`, into contiguous `out`."""
    for index, plane in enumerate(planes):
        out[index :: len(planes)] = plane


class CodecSet:
    """The codecs one side speaks, found by number or name; frozen once made."""

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._by_id = {codec.id: codec for codec in codecs}
        self._by_name = {codec.name: codec for codec in self._by_id.values()}

    @property
    def names(self) -> tuple[str, ...]:
        """Best first: a higher number is a newer codec."""
        return tuple(self._by_id[i].name for i in sorted(self._by_id, reverse=True))

    def only(self, names: Iterable[str]) -> CodecSet:
        """Those of `names`; all for an empty list."""
        wanted = set(names) or set(self._by_name)
        return CodecSet(codec for name, codec in self._by_name.items() if name in wanted)

    def by_id(self, codec_id: int) -> Codec:
        """Raises CorruptKv for a number that was not negotiated."""
        codec = self._by_id.get(codec_id)
        if codec is None:
            raise CorruptKv(f"codec {codec_id} is not one of {sorted(self._by_id)}")
        return codec

    def negotiate(self, offered: Iterable[str]) -> Codec:
        """Our best codec that is in `offered`. Raises IncompatibleLayout (field `codecs`)."""
        theirs = set(offered)
        for name in self.names:
            if name in theirs:
                return self._by_name[name]
        raise IncompatibleLayout(
            f"no codec in common: {list(self.names)} here, {sorted(theirs)} there", field="codecs"
        )


RAW = RawCodec()


def default_codecs(zstd_level: int = 1) -> CodecSet:
    """All codecs of this version."""
    return CodecSet((RAW, PlanesZstdCodec(zstd_level)))


def encode(codec: Codec, raw: Bytes, item_bytes: int) -> tuple[int, bytes]:
    """(codec number, payload): `raw` where `codec` does not make it smaller, so the payload is
    never longer than `raw`.
    """
    payload = codec.encode(raw, item_bytes)
    return (RAW.id, raw.tobytes()) if payload is None else (codec.id, payload)
