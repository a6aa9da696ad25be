"""Where protobuf stops: messages of a session to our own types and back (Watch: convert_watch).

Reading raises ProtocolError for bytes that are not the message, and what the types themselves
refuse (an unsupported layout is IncompatibleLayout).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from prfaas.errors import BY_KIND, IncompatibleLayout, PrfaasError, ProtocolError, from_kind
from prfaas.layout import Fingerprint, GroupKind, KvLayout, LayerGroup, LayoutError
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.sequences import MAX_RANGES, checked_ranges
from prfaas.session_messages import (
    Feature,
    Handshake,
    LaneAttach,
    PrefillReport,
    ReceiverReport,
    SessionAccept,
    SessionAck,
    SessionError,
    SessionOpen,
    SessionResume,
    SessionSeal,
)

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes | memoryview) -> M:
    """A message that came. Raises ProtocolError, which a deserializer of gRPC could not pass on."""
    message = kind()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as exc:
        raise ProtocolError(f"payload is not a {kind.__name__}: {exc}") from exc
    require_finite(message)
    return message


def require_finite(message: Message) -> None:
    """Raise ProtocolError for a number that is none: one NaN would upset a loop's timers."""
    for field, value in message.ListFields():
        if isinstance(value, float):
            items: Iterable[object] = (value,)
        elif field.message_type is None:
            continue
        elif isinstance(value, Message):
            items = (value,)
        else:
            items = value.values() if isinstance(value, Mapping) else value
        for item in items:
            if isinstance(item, Message):
                require_finite(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise ProtocolError(f"{message.DESCRIPTOR.name}.{field.name} is {item}")


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


# --- errors ---


def wire_kind(error: PrfaasError) -> str:
    """The kind under which an error crosses: its class's, or its nearest listed base's."""
    for cls in type(error).__mro__:
        if issubclass(cls, PrfaasError) and BY_KIND.get(cls.kind) is cls:
            return cls.kind
    return PrfaasError.kind


def error_to_bytes(error: PrfaasError, frames: int = 0) -> bytes:
    """Payload of an ERROR frame, and detail of a gRPC status."""
    return _bytes(
        pb.ErrorDetail(
            kind=wire_kind(error),
            message=error.message,
            field=error.field,
            phase=error.phase,
            retry_after_s=error.retry_after_s,
            param=error.param,
            frames=frames,
        )
    )


def error_from_bytes(data: bytes | memoryview) -> PrfaasError:
    """The error that went in, as the same class."""
    return session_error_from_bytes(data).error


def session_error_from_bytes(data: bytes | memoryview) -> SessionError:
    """Payload of an ERROR frame."""
    detail = parse(pb.ErrorDetail, data)
    error = from_kind(
        detail.kind,
        detail.message,
        param=detail.param if detail.HasField("param") else None,
        retry_after_s=detail.retry_after_s if detail.HasField("retry_after_s") else None,
        phase=detail.phase if detail.HasField("phase") else None,
        field=detail.field if detail.HasField("field") else None,
    )
    return SessionError(error, detail.frames)


# --- handshake ---


def fingerprint_to_pb(value: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(
        wire_major=value.wire_major,
        model_identity=value.model_identity,
        config_digest=value.config_digest,
        tokenizer_digest=value.tokenizer_digest,
        adapters=value.adapters,
        groups=[
            pb.LayerGroup(
                kind=g.kind.value,
                layers=g.layers,
                kv_heads=g.kv_heads,
                head_dim=g.head_dim,
                dtype=g.dtype,
                state_dim=g.state_dim,
            )
            for g in value.layout.groups
        ],
    )


def fingerprint_from_pb(message: pb.Fingerprint) -> Fingerprint:
    groups: list[LayerGroup] = []
    for i, g in enumerate(message.groups):
        try:
            groups.append(
                LayerGroup(
                    GroupKind(g.kind),
                    tuple(g.layers),
                    g.kv_heads,
                    g.head_dim,
                    g.dtype,
                    g.state_dim,
                )
            )
        except (LayoutError, ValueError) as exc:
            raise IncompatibleLayout(f"groups[{i}]: {exc}", field=f"groups[{i}]") from exc
    if not groups:
        raise IncompatibleLayout("a fingerprint needs at least one layer group", field="groups")
    return Fingerprint(
        wire_major=message.wire_major,
        model_identity=message.model_identity,
        config_digest=message.config_digest,
        tokenizer_digest=message.tokenizer_digest,
        adapters=tuple(message.adapters),
        layout=KvLayout(tuple(groups)),
    )


def handshake_request(value: Handshake) -> pb.HandshakeRequest:
    return pb.HandshakeRequest(
        client=value.name,
        model=value.model,
        wire_major=value.wire_major,
        wire_minor=value.wire_minor,
        features=int(value.features),
        fingerprint=fingerprint_to_pb(value.fingerprint),
        codecs=value.codecs,
        link=value.link,
    )


def handshake_from_request(message: pb.HandshakeRequest) -> Handshake:
    return Handshake(
        name=message.client,
        model=message.model,
        wire_major=message.wire_major,
        wire_minor=message.wire_minor,
        features=Feature(message.features),
        fingerprint=fingerprint_from_pb(message.fingerprint),
        codecs=tuple(message.codecs),
        link=message.link,
    )


def handshake_reply(value: Handshake) -> pb.HandshakeReply:
    return pb.HandshakeReply(
        server=value.name,
        model=value.model,
        wire_major=value.wire_major,
        wire_minor=value.wire_minor,
        features=int(value.features),
        fingerprint=fingerprint_to_pb(value.fingerprint),
        codecs=value.codecs,
        chunk_tokens=value.chunk_tokens,
        max_tokens=value.max_tokens,
        instance=value.instance,
        engine_epoch=value.engine_epoch,
        paced=value.paced,
        link=value.link,
    )


def handshake_from_reply(message: pb.HandshakeReply) -> Handshake:
    return Handshake(
        name=message.server,
        model=message.model,
        wire_major=message.wire_major,
        wire_minor=message.wire_minor,
        features=Feature(message.features),
        fingerprint=fingerprint_from_pb(message.fingerprint),
        codecs=tuple(message.codecs),
        chunk_tokens=message.chunk_tokens,
        max_tokens=message.max_tokens,
        instance=message.instance,
        engine_epoch=message.engine_epoch,
        paced=message.paced,
        link=message.link,
    )


# --- payloads of control frames ---


def open_to_bytes(value: SessionOpen) -> bytes:
    return _bytes(
        pb.SessionOpen(
            transfer_id=value.transfer_id,
            model=value.model,
            tokens=value.tokens,
            send_from=value.send_from,
            salt=value.salt,
            use_cache=value.use_cache,
            quality=value.quality,
            codecs=value.codecs,
            deadline_s=value.deadline_s,
            lease_s=value.lease_s,
            hold_until_sealed=value.hold_until_sealed,
            engine_epoch=value.engine_epoch,
            tenant=value.tenant,
            link=value.link,
            credit_bytes=value.credit_bytes,
            on_demand=value.on_demand,
            traceparent=value.traceparent,
        )
    )


def open_from_bytes(data: bytes | memoryview) -> SessionOpen:
    message = parse(pb.SessionOpen, data)
    return SessionOpen(
        transfer_id=message.transfer_id,
        model=message.model,
        tokens=message.tokens,
        send_from=message.send_from,
        salt=message.salt,
        use_cache=message.use_cache,
        quality=message.quality,
        codecs=tuple(message.codecs),
        deadline_s=message.deadline_s,
        lease_s=message.lease_s,
        engine_epoch=message.engine_epoch,
        hold_until_sealed=message.hold_until_sealed,
        tenant=message.tenant,
        link=message.link,
        credit_bytes=message.credit_bytes,
        on_demand=message.on_demand,
        traceparent=message.traceparent,
    )


def accept_to_bytes(value: SessionAccept) -> bytes:
    return _bytes(
        pb.SessionAccept(
            chunk_tokens=value.chunk_tokens,
            queue_position=value.queue_position,
            retained_bytes=value.retained_bytes,
            lease_s=value.lease_s,
        )
    )


def accept_from_bytes(data: bytes | memoryview) -> SessionAccept:
    message = parse(pb.SessionAccept, data)
    return SessionAccept(
        message.chunk_tokens, message.queue_position, message.retained_bytes, message.lease_s
    )


def seal_to_bytes(value: SessionSeal) -> bytes:
    report = value.report
    return _bytes(
        pb.SessionSeal(
            frames=value.frames,
            raw_bytes=value.raw_bytes,
            wire_bytes=value.wire_bytes,
            root_digest=value.root_digest,
            cached_tokens=report.cached_tokens,
            computed_tokens=report.computed_tokens,
            queue_s=report.queue_s,
            compute_s=report.compute_s,
            wire_bytes_before_last_layer=report.wire_bytes_before_last_layer,
            last_layer_s=report.last_layer_s,
        )
    )


def seal_from_bytes(data: bytes | memoryview) -> SessionSeal:
    message = parse(pb.SessionSeal, data)
    return SessionSeal(
        frames=message.frames,
        raw_bytes=message.raw_bytes,
        wire_bytes=message.wire_bytes,
        root_digest=message.root_digest,
        report=PrefillReport(
            cached_tokens=message.cached_tokens,
            computed_tokens=message.computed_tokens,
            queue_s=message.queue_s,
            compute_s=message.compute_s,
            last_layer_s=message.last_layer_s,
            wire_bytes_before_last_layer=message.wire_bytes_before_last_layer,
        ),
    )


def _ack_to_pb(value: SessionAck) -> pb.SessionAck:
    return pb.SessionAck(
        next_sequence=value.next_sequence,
        verified=[n for pair in value.verified for n in pair],
        held=[n for pair in value.held for n in pair],
        missing=value.missing,
        credit_bytes=value.credit_bytes,
        lanes=value.lanes,
        lanes_opened=value.lanes_opened,
        receive_bytes_per_s=value.receive_bytes_per_s,
        sealed=value.sealed,
        wanted=[n for pair in value.wanted for n in pair],
        report=None if value.report is None else _report_to_pb(value.report),
    )


def _report_to_pb(value: ReceiverReport) -> pb.ReceiverReport:
    return pb.ReceiverReport(
        busy_share=value.busy_share,
        held_bytes=value.held_bytes,
        free_staging_bytes=value.free_staging_bytes,
        rtt_s=value.rtt_s,
        queueing_s=value.queueing_s,
        goodput_age_s=value.goodput_age_s,
    )


def _report_from_pb(message: pb.ReceiverReport) -> ReceiverReport:
    return ReceiverReport(
        busy_share=message.busy_share,
        held_bytes=message.held_bytes,
        free_staging_bytes=message.free_staging_bytes,
        rtt_s=message.rtt_s,
        queueing_s=message.queueing_s,
        goodput_age_s=message.goodput_age_s,
    )


def _ack_from_pb(message: pb.SessionAck) -> SessionAck:
    if len(message.missing) > MAX_RANGES or len(message.lanes) > MAX_RANGES:
        raise ProtocolError("an ack that lists so much is not one of ours")
    return SessionAck(
        next_sequence=message.next_sequence,
        verified=checked_ranges(message.verified),
        held=checked_ranges(message.held),
        missing=tuple(message.missing),
        credit_bytes=message.credit_bytes,
        lanes=tuple(message.lanes),
        lanes_opened=message.lanes_opened,
        receive_bytes_per_s=message.receive_bytes_per_s,
        sealed=message.sealed,
        wanted=checked_ranges(message.wanted),
        report=_report_from_pb(message.report) if message.HasField("report") else None,
    )


def ack_to_bytes(value: SessionAck) -> bytes:
    return _bytes(_ack_to_pb(value))


def ack_from_bytes(data: bytes | memoryview) -> SessionAck:
    return _ack_from_pb(parse(pb.SessionAck, data))


def resume_to_bytes(value: SessionResume) -> bytes:
    return _bytes(pb.SessionResume(link=value.link, ack=_ack_to_pb(value.ack)))


def resume_from_bytes(data: bytes | memoryview) -> SessionResume:
    message = parse(pb.SessionResume, data)
    return SessionResume(message.link, _ack_from_pb(message.ack))


def attach_to_bytes(value: LaneAttach) -> bytes:
    return _bytes(pb.LaneAttach(link=value.link, lane=value.lane))


def attach_from_bytes(data: bytes | memoryview) -> LaneAttach:
    message = parse(pb.LaneAttach, data)
    return LaneAttach(message.link, message.lane)
