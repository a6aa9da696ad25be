"""Where protobuf stops: the events of Watch to our own types and back."""

from __future__ import annotations

import math

from prfaas.errors import ProtocolError
from prfaas.hashing import HASH_BYTES, BlockHash
from prfaas.rpc.convert import require_finite
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.snapshot import Outcome, PrefillCurve
from prfaas.telemetry import EngineInfo, KvDelta, LinkInfo, LinkLimit, WatchUpdate


def _curve_to_pb(value: PrefillCurve) -> pb.PrefillCurve:
    return pb.PrefillCurve(
        base_s=value.base_s,
        token_s=value.token_s,
        token_context_s=value.token_context_s,
        chunk_tokens=value.chunk_tokens,
    )


def _curve_from_pb(message: pb.PrefillCurve) -> PrefillCurve:
    return PrefillCurve(
        message.base_s, message.token_s, message.token_context_s, message.chunk_tokens
    )


def _engine_to_pb(value: EngineInfo) -> pb.EngineState:
    return pb.EngineState(
        name=value.name,
        ready=value.ready,
        draining=value.draining,
        queue_tokens=value.queue_tokens,
        waiting=value.waiting,
        running=value.running,
        context_tokens=value.context_tokens,
        free_blocks=value.free_blocks,
        total_blocks=value.total_blocks,
        decode_step_s=value.decode_step_s,
        curve=_curve_to_pb(value.curve),
        model=value.model,
        block_tokens=value.block_tokens,
        token_bytes=value.token_bytes,
        epoch=value.epoch,
        paced=value.paced,
        free_staging_bytes=value.free_staging_bytes,
        free_retention_bytes=value.free_retention_bytes,
        roles=value.roles,
        waiting_kv=value.waiting_kv,
        max_running=value.max_running,
    )


def _engine_from_pb(message: pb.EngineState) -> EngineInfo:
    return EngineInfo(
        name=message.name,
        ready=message.ready,
        draining=message.draining,
        queue_tokens=message.queue_tokens,
        waiting=message.waiting,
        running=message.running,
        context_tokens=message.context_tokens,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        decode_step_s=message.decode_step_s,
        curve=_curve_from_pb(message.curve),
        model=message.model,
        block_tokens=message.block_tokens,
        token_bytes=message.token_bytes,
        epoch=message.epoch,
        paced=message.paced,
        free_staging_bytes=message.free_staging_bytes,
        free_retention_bytes=message.free_retention_bytes,
        roles=tuple(message.roles),
        waiting_kv=message.waiting_kv,
        max_running=message.max_running,
    )


_LIMITS = {limit.value: limit for limit in LinkLimit}
"""What a newer agent calls by another name is as good as not said."""


def _link_to_pb(value: LinkInfo) -> pb.LinkSample:
    return pb.LinkSample(
        peer=value.peer,
        instance=value.instance,
        link_class=value.link_class,
        ready=value.ready,
        detail=value.detail,
        goodput_bytes_per_s=value.goodput_bytes_per_s,
        rtt_s=value.rtt_s,
        in_flight_bytes=value.in_flight_bytes,
        wire_ratio=value.wire_ratio,
        age_s=value.age_s,
        sessions=value.sessions,
        goodput_age_s=value.goodput_age_s,
        agent=value.agent,
        limit=value.limit or "",
        rate_bytes_per_s=value.rate_bytes_per_s,
        queueing_s=value.queueing_s,
        stalled_s=value.stalled_s,
        stalls=value.stalls,
        retransmitted_bytes=value.retransmitted_bytes,
        under_way_bytes=value.under_way_bytes,
        held_bytes=value.held_bytes,
        free_staging_bytes=value.free_staging_bytes,
    )


def _link_from_pb(message: pb.LinkSample) -> LinkInfo:
    return LinkInfo(
        peer=message.peer,
        instance=message.instance,
        link_class=message.link_class,
        ready=message.ready,
        detail=message.detail,
        goodput_bytes_per_s=message.goodput_bytes_per_s,
        rtt_s=message.rtt_s,
        in_flight_bytes=message.in_flight_bytes,
        wire_ratio=message.wire_ratio,
        age_s=message.age_s,
        sessions=message.sessions,
        goodput_age_s=message.goodput_age_s,
        agent=message.agent,
        limit=_LIMITS.get(message.limit),
        rate_bytes_per_s=message.rate_bytes_per_s,
        queueing_s=message.queueing_s,
        stalled_s=message.stalled_s,
        stalls=message.stalls,
        retransmitted_bytes=(
            message.retransmitted_bytes if message.HasField("retransmitted_bytes") else None
        ),
        under_way_bytes=message.under_way_bytes,
        held_bytes=message.held_bytes,
        free_staging_bytes=message.free_staging_bytes,
    )


def _outcome_to_pb(value: Outcome) -> pb.OutcomeEvent:
    return pb.OutcomeEvent(
        transfer_id=value.transfer_id,
        status=value.status,
        reason=value.reason,
        peer=value.peer,
        instance=value.instance,
        have_tokens=value.have_tokens,
        want_tokens=value.want_tokens,
        received_tokens=value.received_tokens,
        remote_cached_tokens=value.remote_cached_tokens,
        raw_bytes=value.raw_bytes,
        wire_bytes=value.wire_bytes,
        hidden_wire_bytes=value.hidden_wire_bytes,
        phases=value.phases,
        tried=value.tried,
        quality=value.quality,
        codecs=value.codecs,
        tried_reasons=value.tried_reasons,
    )


def _outcome_from_pb(message: pb.OutcomeEvent) -> Outcome:
    phases = dict(message.phases.items())
    for seconds in phases.values():
        if not math.isfinite(seconds):
            raise ProtocolError(f"OutcomeEvent.phases is {seconds}")
    if message.tried_reasons and len(message.tried_reasons) != len(message.tried):
        raise ProtocolError("OutcomeEvent.tried_reasons are not as many as tried")
    return Outcome(
        transfer_id=message.transfer_id,
        status=message.status,
        reason=message.reason,
        peer=message.peer,
        instance=message.instance,
        have_tokens=message.have_tokens,
        want_tokens=message.want_tokens,
        received_tokens=message.received_tokens,
        remote_cached_tokens=message.remote_cached_tokens,
        raw_bytes=message.raw_bytes,
        wire_bytes=message.wire_bytes,
        hidden_wire_bytes=message.hidden_wire_bytes,
        phases=phases,
        tried=tuple(message.tried),
        quality=message.quality,
        codecs=dict(message.codecs.items()),
        tried_reasons=tuple(message.tried_reasons),
    )


def _hashes_from_bytes(data: bytes) -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise ProtocolError(f"{len(data)} bytes are not a list of {HASH_BYTES}-byte block hashes")
    return tuple(data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES))


def _kv_to_pb(value: KvDelta) -> pb.KvIndexDelta:
    return pb.KvIndexDelta(
        engine=value.engine,
        epoch=value.epoch,
        cleared=value.cleared,
        stored=b"".join(value.stored),
        removed=b"".join(value.removed),
    )


def _kv_from_pb(message: pb.KvIndexDelta) -> KvDelta:
    return KvDelta(
        engine=message.engine,
        epoch=message.epoch,
        cleared=message.cleared,
        stored=_hashes_from_bytes(message.stored),
        removed=_hashes_from_bytes(message.removed),
    )


def watch_to_pb(value: WatchUpdate) -> pb.WatchEvent:
    return pb.WatchEvent(
        seq=value.seq,
        full=value.full,
        agent=value.agent,
        engines=map(_engine_to_pb, value.engines),
        kv=map(_kv_to_pb, value.kv),
        links=map(_link_to_pb, value.links),
        outcomes=map(_outcome_to_pb, value.outcomes),
        started=value.started,
    )


def watch_from_pb(message: pb.WatchEvent) -> WatchUpdate:
    for part in (*message.engines, *message.links):
        require_finite(part)
    return WatchUpdate(
        seq=message.seq,
        full=message.full,
        agent=message.agent,
        engines=tuple(map(_engine_from_pb, message.engines)),
        kv=tuple(map(_kv_from_pb, message.kv)),
        links=tuple(map(_link_from_pb, message.links)),
        outcomes=tuple(map(_outcome_from_pb, message.outcomes)),
        started=tuple(message.started),
    )
