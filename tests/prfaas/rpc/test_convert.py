"""Everything that crosses in protobuf comes out equal to what went in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.errors import BY_KIND, IncompatibleLayout, Overloaded, PrfaasError, ProtocolError
from prfaas.kvport import PortClosed
from prfaas.layout import Fingerprint, GroupKind, KvLayout, LayerGroup
from prfaas.rpc import convert, convert_watch
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.session_messages import (
    Feature,
    Handshake,
    PrefillReport,
    ReceiverReport,
    SessionAccept,
    SessionAck,
    SessionOpen,
    SessionResume,
    SessionSeal,
)
from prfaas.snapshot import Outcome, PrefillCurve
from prfaas.telemetry import EngineInfo, KvDelta, LinkInfo, LinkLimit, WatchUpdate

FINGERPRINT = Fingerprint(
    wire_major=1,
    model_identity="id",
    config_digest="cfg",
    tokenizer_digest="tok",
    adapters=("a", "b"),
    layout=KvLayout(
        (
            LayerGroup(GroupKind.FULL, (0, 2), 3, 64, "bfloat16"),
            LayerGroup(GroupKind.FULL, (1,), 2, 8, "float32"),
        )
    ),
)
HANDSHAKE = Handshake(
    name="n",
    model="m",
    wire_major=1,
    wire_minor=0,
    features=Feature.NONE,
    fingerprint=FINGERPRINT,
    codecs=("planes-zstd", "raw"),
)


@pytest.mark.parametrize("cls", sorted(BY_KIND.values(), key=lambda c: c.kind))
def test_every_error_comes_out_as_its_class_with_its_fields(cls: type[PrfaasError]) -> None:
    full = cls("m", param="p", retry_after_s=0.0, phase="progress", field="groups[0].dtype")
    bare = cls("text")
    for error in (full, bare):
        back = convert.error_from_bytes(convert.error_to_bytes(error))
        assert type(back) is cls
        assert vars(back) == vars(error)


def test_a_class_unknown_to_the_wire_crosses_as_its_nearest_base() -> None:
    back = convert.error_from_bytes(convert.error_to_bytes(PortClosed("gone")))
    assert back.kind == "engine_unavailable"
    assert back.message == "gone"


def test_a_kind_from_the_future_is_a_protocol_error_that_keeps_its_text() -> None:
    data = pb.ErrorDetail(kind="novel", message="something new").SerializeToString()
    back = convert.error_from_bytes(data)
    assert type(back) is ProtocolError
    assert "novel" in back.message
    assert "something new" in back.message


def test_handshakes_come_out_equal() -> None:
    assert convert.handshake_from_request(convert.handshake_request(HANDSHAKE)) == HANDSHAKE
    reply = replace(
        HANDSHAKE, chunk_tokens=256, max_tokens=8192, instance="i", engine_epoch="e", paced=True
    )
    assert convert.handshake_from_reply(convert.handshake_reply(reply)) == reply


def test_unknown_feature_bits_survive() -> None:
    message = convert.handshake_request(HANDSHAKE)
    message.features = 1 << 40
    assert int(convert.handshake_from_request(message).features) == 1 << 40


@pytest.mark.parametrize("field", [{"kind": "latent"}, {"kind": "novel"}, {"dtype": "int3"}])
def test_a_group_of_another_kind_is_incompatible_and_named(field: dict[str, str]) -> None:
    message = convert.fingerprint_to_pb(FINGERPRINT)
    for name, value in field.items():
        setattr(message.groups[1], name, value)
    with pytest.raises(IncompatibleLayout) as caught:
        convert.fingerprint_from_pb(message)
    assert caught.value.field == "groups[1]"
    del message.groups[:]
    with pytest.raises(IncompatibleLayout, match="at least one"):
        convert.fingerprint_from_pb(message)


OPEN = SessionOpen(
    transfer_id="t",
    model="m",
    tokens=b"\1\0\0\0\2\0\0\0",
    send_from=1,
    salt="s",
    use_cache=True,
    quality="exact",
    codecs=("raw",),
    deadline_s=1.5,
    lease_s=2.5,
    engine_epoch="e",
    hold_until_sealed=True,
    on_demand=True,
)
SEAL = SessionSeal(
    frames=1,
    raw_bytes=1 << 40,
    wire_bytes=3,
    root_digest=b"d" * 16,
    report=PrefillReport(
        cached_tokens=4,
        computed_tokens=5,
        queue_s=0.5,
        compute_s=0.25,
        last_layer_s=1e6,
        wire_bytes_before_last_layer=2,
    ),
)


def test_control_payloads_come_out_equal() -> None:
    assert convert.open_from_bytes(convert.open_to_bytes(OPEN)) == OPEN
    assert OPEN.token_count == 2
    accept = SessionAccept(256, 3, 4, 5.5)
    assert convert.accept_from_bytes(convert.accept_to_bytes(accept)) == accept
    assert convert.seal_from_bytes(convert.seal_to_bytes(SEAL)) == SEAL
    ack = SessionAck(1, ((2, 4), (7, 8)), ((5, 6),), (4,), 9, (0, 1), 2, 3.0, True, ((0, 9),))
    assert convert.ack_from_bytes(convert.ack_to_bytes(ack)) == ack
    told = replace(ack, report=ReceiverReport(0.5, 1 << 40, 1 << 41, 0.04, 0.01, 3.5))
    assert convert.ack_from_bytes(convert.ack_to_bytes(told)) == told
    resume = SessionResume(b"link", told)
    assert convert.resume_from_bytes(convert.resume_to_bytes(resume)) == resume
    unsaid = pb.SessionAck(report=pb.ReceiverReport(busy_share=float("nan")))
    with pytest.raises(ProtocolError, match=r"ReceiverReport\.busy_share"):
        convert.ack_from_bytes(unsaid.SerializeToString())


@pytest.mark.parametrize(
    "read",
    [
        convert.open_from_bytes,
        convert.accept_from_bytes,
        convert.seal_from_bytes,
        convert.ack_from_bytes,
        convert.error_from_bytes,
    ],
)
def test_bytes_that_are_no_message_are_a_protocol_error(read: object) -> None:
    with pytest.raises(ProtocolError, match="payload is not a"):
        read(memoryview(b"\xff\xff\xff"))  # type: ignore[operator]


def test_watch_updates_come_out_equal() -> None:
    update = WatchUpdate(
        seq=9,
        full=True,
        agent="a",
        engines=(
            EngineInfo(
                name="e",
                ready=True,
                draining=True,
                queue_tokens=1,
                waiting=2,
                running=3,
                context_tokens=4,
                free_blocks=5,
                total_blocks=6,
                decode_step_s=0.5,
                curve=PrefillCurve(0.1, 0.2, 0.3, 256),
                model="m",
                block_tokens=16,
                token_bytes=768,
                epoch="x",
                paced=True,
                free_staging_bytes=1 << 33,
                free_retention_bytes=1 << 34,
                roles=("prefill", "decode"),
                waiting_kv=1,
                max_running=32,
            ),
        ),
        kv=(KvDelta("e", "x", True, (b"1" * 16, b"2" * 16), (b"3" * 16,)),),
        links=(
            LinkInfo(
                peer="p",
                instance="i",
                link_class="lan",
                ready=True,
                detail="d",
                goodput_bytes_per_s=1e9,
                rtt_s=0.04,
                in_flight_bytes=7,
                wire_ratio=1.5,
                age_s=0.25,
                sessions=2,
                goodput_age_s=3.0,
                agent="d0",
                limit=LinkLimit.RECEIVER,
                rate_bytes_per_s=5e8,
                queueing_s=0.01,
                stalled_s=1.5,
                stalls=4,
                retransmitted_bytes=1 << 35,
                under_way_bytes=1 << 36,
                held_bytes=1 << 37,
                free_staging_bytes=1 << 38,
            ),
            LinkInfo("p", "j", retransmitted_bytes=0),
        ),
        outcomes=(
            Outcome(
                transfer_id="t",
                status="staged",
                reason="r",
                peer="p",
                instance="i",
                have_tokens=1,
                want_tokens=2,
                received_tokens=3,
                remote_cached_tokens=4,
                raw_bytes=5,
                wire_bytes=6,
                hidden_wire_bytes=7,
                phases={"connect": 0.5, "total": 1.0},
                tried=("p/i", "p/j"),
                tried_reasons=("overloaded", ""),
            ),
        ),
        started=("t1", "t2"),
    )
    assert convert_watch.watch_from_pb(convert_watch.watch_to_pb(update)) == update
    defaults = WatchUpdate(
        seq=1, full=False, engines=(EngineInfo("e"),), links=(LinkInfo("p", "i"),)
    )
    assert convert_watch.watch_from_pb(convert_watch.watch_to_pb(defaults)) == defaults


def test_a_limit_that_only_newer_agents_know_is_as_good_as_not_said() -> None:
    event = pb.WatchEvent(links=[pb.LinkSample(peer="p", instance="i", limit="the weather")])
    assert convert_watch.watch_from_pb(event).links == (
        LinkInfo("p", "i", link_class="", limit=None, wire_ratio=0.0),
    )


def test_a_ragged_list_of_hashes_is_a_protocol_error() -> None:
    event = pb.WatchEvent(kv=[pb.KvIndexDelta(engine="e", stored=b"x" * 17)])
    with pytest.raises(ProtocolError, match="17 bytes"):
        convert_watch.watch_from_pb(event)


def test_reasons_are_as_many_as_instances_or_none() -> None:
    event = pb.WatchEvent(outcomes=[pb.OutcomeEvent(tried=["p/i"], tried_reasons=["r", ""])])
    with pytest.raises(ProtocolError, match="tried_reasons"):
        convert_watch.watch_from_pb(event)


def test_details_keep_absent_and_zero_apart() -> None:
    back = convert.error_from_bytes(convert.error_to_bytes(Overloaded("m", retry_after_s=0.0)))
    assert back.retry_after_s == 0.0
    assert convert.error_from_bytes(convert.error_to_bytes(Overloaded("m"))).retry_after_s is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_refused_wherever_it_stands(value: float) -> None:
    opening = pb.SessionOpen(deadline_s=value).SerializeToString()
    with pytest.raises(ProtocolError, match="deadline_s"):
        convert.open_from_bytes(opening)
    for event, name in (
        (pb.WatchEvent(links=[pb.LinkSample(rtt_s=value)]), "rtt_s"),
        (pb.WatchEvent(engines=[pb.EngineState(curve=pb.PrefillCurve(base_s=value))]), "base_s"),
        (pb.WatchEvent(outcomes=[pb.OutcomeEvent(phases={"total": value})]), "phases"),
    ):
        with pytest.raises(ProtocolError, match=name):
            convert_watch.watch_from_pb(event)
