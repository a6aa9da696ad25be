"""KV codecs by quality class: a file each, a registry, and the calibration some of them need."""

from prfaas.codecs.base import (
    SINK_TOKENS,
    Bytes,
    Codec,
    Preparable,
    Quality,
    Shape,
    Tile,
    base_name,
    span_of,
)
from prfaas.codecs.calibration import Calibration
from prfaas.codecs.digest import digest_of
from prfaas.codecs.planes_zstd import PlanesZstdCodec, merge_planes, split_planes
from prfaas.codecs.raw import RAW, RawCodec
from prfaas.codecs.registry import (
    KNOWN_CODECS,
    CodecSet,
    agent_codecs,
    default_codecs,
    encode,
    encode_first,
)

__all__ = [
    "KNOWN_CODECS",
    "RAW",
    "SINK_TOKENS",
    "Bytes",
    "Calibration",
    "Codec",
    "CodecSet",
    "PlanesZstdCodec",
    "Preparable",
    "Quality",
    "RawCodec",
    "Shape",
    "Tile",
    "agent_codecs",
    "base_name",
    "default_codecs",
    "digest_of",
    "encode",
    "encode_first",
    "merge_planes",
    "span_of",
    "split_planes",
]
