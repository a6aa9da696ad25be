"""What the control frames of a session and the handshake carry, in our own types.

`prfaas.rpc.convert` turns them into payload bytes and back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from prfaas.layout import Fingerprint


class Feature(enum.IntFlag):
    """Feature bits of the handshake; a bit that one side lacks is not used by the other."""

    NONE = 0


@dataclass(frozen=True, slots=True)
class Handshake:
    """One side of a handshake. The client leaves the fields of the server empty."""

    name: str
    model: str
    wire_major: int
    wire_minor: int
    features: Feature
    fingerprint: Fingerprint
    codecs: tuple[str, ...]
    chunk_tokens: int = 0
    max_tokens: int = 0
    instance: str = ""
    engine_epoch: str = ""
    paced: bool = False


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """OPEN: prefill `tokens` and send KV of [send_from, len(tokens))."""

    transfer_id: str
    model: str
    tokens: bytes
    """Little-endian int32 ids: the prompt less its last token."""
    send_from: int
    salt: str
    use_cache: bool
    quality: str
    codecs: tuple[str, ...]
    deadline_s: float
    lease_s: float
    engine_epoch: str
    """Of the engine the sender shook hands with."""
    hold_until_sealed: bool = False
    tenant: str = ""
    """For whom, as the gateway signed it; empty: nobody in particular."""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class SessionAccept:
    """ACCEPT: position 0 means that prefill was handed to the engine; repeated while queued."""

    chunk_tokens: int
    queue_position: int = 0
    retained_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefill engine did, as SEAL tells it."""

    cached_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    last_layer_s: float = 0.0
    """When the last layer was computed, on the sender's clock (the one Ping tells)."""
    wire_bytes_before_last_layer: int = 0
    """Handed to the transport before that."""


@dataclass(frozen=True, slots=True)
class SessionSeal:
    """SEAL: everything was sent; counts and root digest to compare with."""

    frames: int
    raw_bytes: int
    wire_bytes: int
    root_digest: bytes
    report: PrefillReport = PrefillReport()


@dataclass(frozen=True, slots=True)
class SessionAck:
    """ACK: what the receiver has verified; any ACK renews the lease."""

    frames: int
    wire_bytes: int
    receive_bytes_per_s: float
