"""The codecs there are, and those that two sides have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from prfaas.codecs.base import Bytes, Codec, Quality, Shape, base_name
from prfaas.codecs.calibration import Calibration
from prfaas.codecs.exponent import ExponentCodec
from prfaas.codecs.gate import why_not
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
            codec for name, codec in self._by_name.items() if {name, base_name(name)} & wanted
        )

    def for_model(self, identity: str) -> CodecSet:
        """Those that this model may be sent with: without what is calibrated for another."""
        return CodecSet(
            codec
            for codec in self._by_id.values()
            if not codec.model_identity or codec.model_identity == identity
        )

    def within(self, offered: Iterable[str], quality: Quality) -> CodecSet:
        """Those that a session may use: see `common`."""
        return CodecSet(self.common(offered, quality))

    def by_id(self, codec_id: int) -> Codec:
        """`raw` needs no negotiation. Raises CorruptKv for another number that is not here."""
        codec = self._by_id.get(codec_id) or (RAW if codec_id == RAW.id else None)
        if codec is None:
            raise CorruptKv(f"codec {codec_id} is not one of {sorted(self._by_id)}")
        return codec

    def common(self, offered: Iterable[str], quality: Quality) -> tuple[Codec, ...]:
        """Ours that are in `offered` and within the class, fewest bytes first."""
        theirs, allowed = set(offered), quality.allowed
        mine = (self._by_name[name] for name in self.names if name in theirs)
        return tuple(codec for codec in mine if codec.quality in allowed)

    def negotiate(self, offered: Iterable[str], quality: Quality = Quality.EXACT) -> Codec:
        """Our codec for fewest bytes that is in `offered` and within the class. Raises
        IncompatibleLayout (field `codecs`).
        """
        theirs = tuple(offered)
        for codec in self.common(theirs, quality):
            return codec
        raise IncompatibleLayout(
            f"no codec in common: {list(self.names)} here, {sorted(set(theirs))} there",
            field="codecs",
        )


def default_codecs(zstd_level: int = 1, calibration: Calibration | None = None) -> CodecSet:
    """All codecs this installation has at full speed: the exact ones, and of the lossy ones those
    that a calibration has measured to keep their class on its model.
    """
    codecs: list[Codec] = [RAW, PlanesZstdCodec(zstd_level)]
    if native is not None:
        codecs.append(ExponentCodec(native))
        if calibration is not None:
            int8 = calibration.rung(Int8Codec.name)
            if int8 is not None and not why_not(int8):
                codecs.append(Int8Codec(native, calibration.header.model_identity))
            codecs += calibrated_codecs(native, calibration)
    return CodecSet(codecs)


def agent_codecs(
    names: Iterable[str], calibration: Path | None = None, zstd_level: int = 1
) -> CodecSet:
    """What an agent speaks: of `names` those that are here. Raises ConfigError for a file that is
    not a calibration.
    """
    loaded = None if calibration is None else Calibration.load(calibration)
    return default_codecs(zstd_level, loaded).only(names)


def encode(codec: Codec, raw: Bytes, shape: Shape) -> tuple[int, bytes]:
    """(codec number, payload): `raw` where `codec` does not make it smaller, so the payload is
    never longer than `raw`.
    """
    found, payload = encode_first((codec,), raw, shape)
    return found.id, payload


def encode_first(codecs: Sequence[Codec], raw: Bytes, shape: Shape) -> tuple[Codec, bytes]:
    """By the first of `codecs` that may touch such a tensor and makes it smaller, else as it is."""
    for codec in codecs:
        payload = codec.encode(raw, shape)
        if payload is not None:
            return codec, payload
    return RAW, raw.tobytes()
