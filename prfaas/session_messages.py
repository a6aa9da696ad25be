"""What the control frames of a session and the handshake carry, in our own types.

`prfaas.rpc.convert` turns them into payload bytes and back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from prfaas.errors import IncompatibleLayout, PrfaasError
from prfaas.layout import Fingerprint, GroupKind
from prfaas.sequences import Range


class Feature(enum.IntFlag):
    """Feature bits of the handshake; a bit that one side lacks is not used by the other."""

    NONE = 0
    ON_DEMAND = 1
    """A session may send only what the receiver asks for, when it asks."""
    RECURRENT = 2
    """Layer groups that keep state, which travels at checkpoints."""


_FEATURE_OF_KIND = {GroupKind.RECURRENT: Feature.RECURRENT}
"""What both sides must speak for a layer group of the kind."""


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
    link: bytes = b""
    """Server: names the link from now on. Client: the link of its handshake before."""

    def require_compatible(self, other: Handshake) -> None:
        """Raise IncompatibleLayout naming what `other` lacks or the first field that differs."""
        kinds = {group.kind for group in self.fingerprint.layout.groups}
        for kind, feature in _FEATURE_OF_KIND.items():
            if kind in kinds and feature not in other.features:
                raise IncompatibleLayout(
                    f"the model here has layers of kind {kind.value!r}, and {other.name!r} does "
                    f"not speak feature {kind.value!r}",
                    field="features",
                )
        self.fingerprint.require_compatible(other.fingerprint)


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
    link: bytes = b""
    """Whose lanes carry the KV."""
    credit_bytes: int = 0
    """Until the first ACK; 0: nothing is sent before it grants some."""
    on_demand: bool = False
    """Pull: nothing is sent before an ACK asks for it. Otherwise all is, as soon as it is there."""
    traceparent: str = ""
    """Of D's span; empty: nobody traces."""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class SessionAccept:
    """ACCEPT: position 0 means that prefill was handed to the engine; repeated while queued."""

    chunk_tokens: int
    queue_position: int = 0
    retained_bytes: int = 0
    lease_s: float = 0.0
    """What the sender makes of OPEN's; 0: that."""


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
class ReceiverReport:
    """What an ACK tells of the receiver and of the link as it measures it, over all sessions."""

    busy_share: float = 0.0
    """Of the last second: it had no time to spare, or frames waited to be decoded."""
    held_bytes: int = 0
    """Received and not verified."""
    free_staging_bytes: int = 0
    rtt_s: float = 0.0
    queueing_s: float = 0.0
    """Of the round trip: what is over the shortest of the last minutes."""
    goodput_age_s: float = 0.0
    """Since the ACK's `receive_bytes_per_s` was measured."""


@dataclass(frozen=True, slots=True)
class SessionAck:
    """ACK: how far the receiver is; any ACK renews the lease.

    What was sent on a lane among the first `lanes_opened` that is not in `lanes`, and is neither
    verified nor held, is lost.
    """

    next_sequence: int = 0
    """All KV frames below are verified and in place."""
    verified: tuple[Range, ...] = ()
    """Those beyond."""
    held: tuple[Range, ...] = ()
    """Received, not verified yet."""
    missing: tuple[int, ...] = ()
    """Came broken: to be sent again."""
    credit_bytes: int = 0
    """Bytes that may be under way: sent, headers included, and not verified."""
    lanes: tuple[int, ...] = ()
    lanes_opened: int = 0
    receive_bytes_per_s: float = 0.0
    sealed: bool = False
    """SEAL has come: only then may the sender forget the session."""
    wanted: tuple[Range, ...] = ()
    """On demand: tensors asked for and not here, by their number in wire order. What was asked for
    once stays asked for.
    """
    report: ReceiverReport | None = None
    """None: the receiver does not say."""


@dataclass(frozen=True, slots=True)
class SessionResume:
    """RESUME: the control stream broke; the session goes on from here."""

    link: bytes
    ack: SessionAck


@dataclass(frozen=True, slots=True)
class SessionError:
    """ERROR: why the session ends, and how many KV frames may still be under way."""

    error: PrfaasError
    frames: int = 0


@dataclass(frozen=True, slots=True)
class LaneAttach:
    """ATTACH: a stream becomes lane number `lane` of a link."""

    link: bytes
    lane: int
