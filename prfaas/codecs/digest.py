"""What a ledger keeps of a piece that a codec has carried."""

from __future__ import annotations

from prfaas.codecs.base import Bytes, Codec, Quality
from prfaas.codecs.raw import RAW
from prfaas.ledger import digest_of_crc, piece_digest


def digest_of(codec: Codec, raw: Bytes, payload_crc: int) -> bytes:
    """The same at both ends: of an exact codec the digest of the piece's bytes, which proves the
    decoder too; of a lossy one that of its payload, for what comes out of floating point need not
    be equal to the last bit on two machines.
    """
    if codec.quality is not Quality.EXACT or codec.id == RAW.id:
        return digest_of_crc(payload_crc)
    return piece_digest(raw)
