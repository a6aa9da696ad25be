"""The codecs there are, and those that two sides have in common."""

from __future__ import annotations

from collections.abc import Iterable

from prfaas.codecs.base import Bytes, Codec, Quality, Shape
from prfaas.codecs.calibration import Calibration
from prfaas.codecs.exponent import ExponentCodec
from prfaas.codecs.int8 import Int8Codec
from prfaas.codecs.native import native
from prfaas.codecs.planes_zstd import PlanesZstdCodec
from prfaas.codecs.raw import RAW, RawCodec
from prfaas.codecs.transform import RUNGS, calibrated_codecs
from prfaas.errors import CorruptKv, IncompatibleLayout

KNOWN_CODECS: dict[str, int] = {
    RawCodec.name: RawCodec.id,
    PlanesZstdCodec.name: PlanesZstdCodec.id,
    ExponentCodec.name: ExponentCodec.id,
    Int8Codec.name: Int8Codec.id,
    **{name: rung.id for name, rung in RUNGS.items()},
}
"""Number on the wire of every codec of this version, by its name without a calibration's digest."""


class CodecSet:
    """The codecs one side speaks, found by number or name; frozen once made."""

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._by_id = {codec.id: codec for codec in codecs}
        self._by_name = {codec.name: codec for codec in self._by_id.values()}

    @property
    def names(self) -> tuple[str, ...]:
        """Fewest bytes first: numbers are given in that order."""
        return tuple(self._by_id[i].name for i in sorted(self._by_id, reverse=True))

    def only(self, names: Iterable[str]) -> CodecSet:
        """Those of `names`, whatever calibration they use; all for an empty list."""
        wanted = set(names) or set(self._by_name)
        return CodecSet(
            codec
            for name, codec in self._by_name.items()
            if {name, name.partition("@")[0]} & wanted
        )

    def by_id(self, codec_id: int) -> Codec:
        """Raises CorruptKv for a number that was not negotiated."""
        codec = self._by_id.get(codec_id)
        if codec is None:
            raise CorruptKv(f"codec {codec_id} is not one of {sorted(self._by_id)}")
        return codec

    def common(self, offered: Iterable[str], quality: Quality) -> tuple[Codec, ...]:
        """Ours that are in `offered` and within the class, fewest bytes first."""
        theirs, allowed = set(offered), quality.allowed
        mine = (self._by_name[name] for name in self.names if name in theirs)
        return tuple(codec for codec in mine if codec.quality in allowed)

    def negotiate(self, offered: Iterable[str], quality: Quality = Quality.EXACT) -> Codec:
        """Our codec for fewest bytes that is in `offered` and within the class, on tiles of one
        layer. Raises IncompatibleLayout (field `codecs`).
        """
        theirs = tuple(offered)
        for codec in self.common(theirs, quality):
            if codec.layer_span == 1:
                return codec
        raise IncompatibleLayout(
            f"no codec in common: {list(self.names)} here, {sorted(set(theirs))} there",
            field="codecs",
        )


def default_codecs(zstd_level: int = 1, calibration: Calibration | None = None) -> CodecSet:
    """All codecs this installation has at full speed; those that need a calibration where there is
    one, and as far as it was measured to keep their promise.
    """
    codecs: list[Codec] = [RAW, PlanesZstdCodec(zstd_level)]
    if native is not None:
        codecs += [ExponentCodec(native), Int8Codec(native)]
        if calibration is not None:
            codecs += calibrated_codecs(native, calibration)
    return CodecSet(codecs)


def encode(codec: Codec, raw: Bytes, shape: Shape) -> tuple[int, bytes]:
    """(codec number, payload): `raw` where `codec` does not make it smaller, so the payload is
    never longer than `raw`.
    """
    payload = codec.encode(raw, shape)
    return (RAW.id, raw.tobytes()) if payload is None else (codec.id, payload)
