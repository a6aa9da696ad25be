"""KV codecs by quality class: a file each, a registry, and the calibration some of them need."""

from prfaas.codecs.base import SINK_TOKENS, Bytes, Codec, Quality, Shape, Tile
from prfaas.codecs.calibration import Calibration
from prfaas.codecs.planes_zstd import PlanesZstdCodec, merge_planes, split_planes
from prfaas.codecs.raw import RAW, RawCodec
from prfaas.codecs.registry import KNOWN_CODECS, CodecSet, default_codecs, encode

__all__ = [
    "KNOWN_CODECS",
    "RAW",
    "SINK_TOKENS",
    "Bytes",
    "Calibration",
    "Codec",
    "CodecSet",
    "PlanesZstdCodec",
    "Quality",
    "RawCodec",
    "Shape",
    "Tile",
    "default_codecs",
    "encode",
    "merge_planes",
    "split_planes",
]
