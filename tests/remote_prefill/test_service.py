"""The prefill service over real gRPC and KvPort: sessions, refusals, faults, nothing left."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prfaas.codecs import default_codecs
from prfaas.errors import (
    Cancelled,
    ContextTooLong,
    CorruptKv,
    EngineUnavailable,
    IncompatibleLayout,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    PrefillTimeout,
    PrfaasError,
    ProtocolError,
    UnknownModel,
)
from prfaas.frames import Frame, FrameFlag, FrameType, parse_all
from prfaas.receive_session import ReceiveState
from prfaas.rpc import convert
from prfaas.rpc.status import error_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, PrefillScript, ScriptedEngine
from prfaas.testing.waiting import eventually
from remote_prefill.identity import handshake_of
from remote_prefill.transport import SERVICE, SESSION

CODECS = default_codecs()
CREDIT = 1 << 22


@pytest.mark.parametrize("send_from", [0, 5, 8, 20])
@pytest.mark.parametrize("ranks", [((0, 2),), ((0, 1), (1, 2))])
async def test_a_session_brings_exactly_what_the_engine_computed(
    prefill_site: Any, tokens: Any, send_from: int, ranks: Any
) -> None:
    site = await prefill_site(engine={"ranks": ranks, "script": PrefillScript(cached_tokens=8)})
    client = await site.client(tokens(21), send_from=send_from, salt="s").run()
    assert client.machine.state is ReceiveState.COMPLETE
    assert client.staged_is_right(site.engine)
    start, prompt = site.engine.prefills[0]
    assert (start.send_from, start.salt, start.use_cache, start.epoch) == (send_from, "s", True, 1)
    assert (prompt == client.tokens).all()
    report = client.machine.seal.report
    assert (report.cached_tokens, report.computed_tokens) == (8, 13)
    kv = [f for f in client.frames if f.type is FrameType.KV]
    assert all(bool(f.flags & FrameFlag.CACHED) == (f.token_end <= 8) for f in kv)
    assert report.last_layer_s > 0
    await site.clean()


async def test_frames_leave_as_they_are_computed(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 1))})
    client = await site.client(tokens(20)).open()
    while client.machine.ledger.frames < 4:
        assert await client.step()
    assert client.machine.ledger.watermark == 8
    site.engine.script.go.set()
    await client.rest()
    assert client.machine.state is ReceiveState.COMPLETE
    assert client.machine.seal.report.wire_bytes_before_last_layer > 0
    first = next(f for f in client.frames if f.type is FrameType.KV)
    assert first.flags is FrameFlag.APP_LIMITED
    await site.clean()


async def test_held_frames_come_after_the_prefill_has_ended(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(2, 2))})
    client = await site.client(tokens(20), hold_until_sealed=True).open()
    await client.until(FrameType.ACCEPT)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(client.step())), 0.1)
    assert client.machine.ledger.frames == 0
    site.engine.script.go.set()
    await asyncio.sleep(0.05)
    while client.machine.state is not ReceiveState.COMPLETE:
        assert await client.step()
    assert client.machine.seal.report.wire_bytes_before_last_layer == 0
    await site.clean()


async def test_many_sessions_share_a_small_ring(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(ring_bytes=1024, codec_threads=2)
    clients = [site.client(tokens(50, seed), session=seed + 1) for seed in range(6)]
    await asyncio.gather(*(client.run() for client in clients))
    assert all(c.machine.state is ReceiveState.COMPLETE for c in clients)
    assert all(c.staged_is_right(site.engine) for c in clients)
    await site.clean()


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": "other"}, UnknownModel, "'other' is not 'scripted-model'"),
        ({"tokens": b""}, InvalidRequest, "0 bytes"),
        ({"tokens": b"\0\0\0"}, InvalidRequest, "3 bytes"),
        ({"tokens": b"\xff\xff\xff\xff" * 9}, InvalidRequest, "token -1"),
        ({"tokens": b"\xe8\3\0\0" * 9}, InvalidRequest, "token 1000 is not in the vocabulary"),
        ({"tokens": bytes(4 * 4097)}, ContextTooLong, "4097 tokens are more than the 4096"),
        ({"send_from": 9}, InvalidRequest, "send_from 9 is not below 9"),
        ({"quality": "rough"}, InvalidRequest, "quality 'rough'"),
        ({"codecs": ("rans",)}, IncompatibleLayout, "no codec in common"),
        ({"deadline_s": 0.0}, InvalidRequest, "must be positive"),
        ({"lease_s": -1.0}, InvalidRequest, "must be positive"),
        ({"engine_epoch": "old"}, EngineUnavailable, "restarted since the handshake"),
    ],
)
async def test_an_open_that_is_wrong_is_refused_and_costs_nothing(
    prefill_site: Any, tokens: Any, changes: dict[str, Any], error: type[PrfaasError], says: str
) -> None:
    site = await prefill_site()
    client = site.client(tokens(9))
    client.machine.request = replace(client.machine.request, **changes)
    with pytest.raises(error, match=says):
        await client.run()
    assert site.engine.prefills == []
    site.assert_clean()
    counted = site.agent.metrics.sessions.labels("refused", error.kind)._value.get()
    assert counted == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1",
        bytes(64),
        Frame(FrameType.ACK, 1).serialize(),
        Frame(FrameType.OPEN, 1, payload=b"\xff\xff").serialize(),
        Frame(FrameType.OPEN, 1).serialize() * 2,
        Frame(FrameType.OPEN, 1).serialize()[:-1] + b"x",
    ],
)
async def test_garbage_instead_of_open_is_refused(prefill_site: Any, data: bytes) -> None:
    site = await prefill_site()
    call = site.channel.stream_stream(SESSION)(timeout=5)
    await call.write(data)
    (frame,) = parse_all(await call.read())
    assert frame.type is FrameType.ERROR
    kind = convert.error_from_bytes(frame.payload).kind
    assert kind in ("protocol_error", "corrupt_kv", "engine_unavailable")
    assert await call.read() is grpc.aio.EOF
    site.assert_clean()


async def test_garbage_bytes_on_the_port_crash_nothing(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site()
    rng = np.random.default_rng(0)
    for size in (1, 100, 5000):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(rng.bytes(size))
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    assert (await site.client(tokens(9)).run()).machine.state is ReceiveState.COMPLETE
    await site.clean()


async def test_without_an_engine_everything_is_refused_as_engine_unavailable(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(engine=None)
    with pytest.raises(EngineUnavailable, match="no engine is connected"):
        await site.client(tokens(9)).run()
    site.engine = ScriptedEngine(site.socket, roles=["decode"])
    try:
        await site.engine.start()
        with pytest.raises(EngineUnavailable, match="has no prefill"):
            await site.client(tokens(9)).run()
    finally:
        await site.engine.close()


async def test_sessions_beyond_retention_queue_in_order_and_hear_their_place(
    prefill_site: Any, tokens: Any
) -> None:
    one = SCRIPTED_LAYOUT.session_bytes(0, 16)
    site = await prefill_site(
        engine={"script": PrefillScript(stop_before=(1, 0))},
        retention_bytes=one,
        limits={"prefill_queue_sessions": 2, "progress_timeout_s": 0.06},
    )
    first = await site.client(tokens(16), session=1).open()
    await first.until(FrameType.KV)
    second = await site.client(tokens(16), session=2).open()
    await second.until(FrameType.ACCEPT)
    third = await site.client(tokens(16), session=3).open()
    await third.until(FrameType.ACCEPT)
    assert (second.machine.queue_position, third.machine.queue_position) == (1, 2)
    await third.step()  # told again while it waits
    assert third.machine.queue_position == 2
    with pytest.raises(Overloaded) as caught:
        await site.client(tokens(16), session=4).run()
    assert caught.value.retry_after_s is not None
    with pytest.raises(InvalidRequest, match="can never fit"):
        await site.client(tokens(17), session=5).run()
    assert len(site.engine.prefills) == 1
    site.engine.script.go.set()
    for client in (first, second, third):
        await client.rest()
        assert client.machine.state is ReceiveState.COMPLETE
    assert [len(t) for _, t in site.engine.prefills] == [16, 16, 16]
    await site.clean()


async def test_the_feed_counts_what_waits_and_names_what_the_load_includes(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(
        engine={"script": PrefillScript(stop_before=(1, 0))},
        retention_bytes=SCRIPTED_LAYOUT.session_bytes(0, 16),
    )
    feed = site.agent.feed
    first = await site.client(tokens(16), session=1, transfer_id="one").open()
    await first.until(FrameType.KV)
    second = await site.client(tokens(16), session=2, transfer_id="two").open()
    await second.until(FrameType.ACCEPT)
    assert not feed.active, "no Stats has come since the start"

    def shown(tokens_: int, waiting: int) -> None:
        assert (feed.engine.queue_tokens, feed.engine.waiting) == (tokens_, waiting)

    site.engine.stats(queue_tokens=9, waiting=1)
    await eventually(lambda: shown(9 + 16, 1 + 1))
    assert not feed.active, "that Stats may be older than the start"
    site.engine.stats(queue_tokens=9, waiting=1)

    def named(*ids: str) -> None:
        assert list(feed.active) == list(ids)

    await eventually(lambda: named("one"))
    site.engine.script.go.set()
    for client in (first, second):
        await client.rest()
    await site.clean()
    named()


async def test_more_sessions_than_the_limit_are_refused(prefill_site: Any, tokens: Any) -> None:
    script = PrefillScript(stop_before=(0, 1))
    site = await prefill_site(engine={"script": script}, limits={"agent_max_sessions": 1})
    first = await site.client(tokens(9), session=1).open()
    await first.until(FrameType.KV)
    with pytest.raises(Overloaded, match="1 sessions are open"):
        await site.client(tokens(9), session=2).run()
    await first.cancel()
    await site.clean()


async def test_the_same_session_number_twice_is_refused(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(0, 1))})
    first = await site.client(tokens(9)).open()
    await first.until(FrameType.KV)
    with pytest.raises(InvalidRequest, match="open already"):
        await site.client(tokens(9)).run()
    site.engine.script.go.set()
    await first.rest()
    assert first.machine.state is ReceiveState.COMPLETE


@pytest.mark.parametrize("how", ["frame", "rpc"])
async def test_a_cancel_reaches_the_engine_and_frees_everything(
    prefill_site: Any, tokens: Any, how: str
) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 1))})
    client = await site.client(tokens(20)).open()
    await client.until(FrameType.KV)
    if how == "frame":
        await client.cancel()
    else:
        cancel = site.channel.unary_unary(f"/{SERVICE}/Cancel")
        request = pb.CancelRequest(sessions=[client.machine.session, 5]).SerializeToString()
        assert pb.CancelReply.FromString(await cancel(request)).cancelled == 1
    await site.clean()
    await eventually(lambda: site.engine.ended)
    assert site.engine.ended[0].status == "cancelled"
    again = await site.client(tokens(7), session=78).run()
    assert again.machine.state is ReceiveState.COMPLETE


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_a_stream_that_ends_leaves_the_session_to_its_lease(
    prefill_site: Any, tokens: Any, how: str
) -> None:
    site = await prefill_site(
        engine={"script": PrefillScript(stop_before=(1, 1))}, limits={"lease_s": 0.4}
    )
    client = await site.client(tokens(20)).open()
    await client.until(FrameType.KV)
    if how == "close":
        await client.call.done_writing()
    else:
        client.call.cancel()
    await asyncio.sleep(0.1)
    assert len(site.agent.sessions) == 1
    await site.clean()
    await eventually(lambda: site.engine.ended)
    assert site.engine.ended[0].status == "cancelled"


async def test_a_cancel_while_queued_leaves_the_queue(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(
        engine={"script": PrefillScript(stop_before=(1, 0))},
        retention_bytes=SCRIPTED_LAYOUT.session_bytes(0, 16),
    )
    first = await site.client(tokens(16), session=1).open()
    await first.until(FrameType.KV)
    second = await site.client(tokens(16), session=2).open()
    await second.until(FrameType.ACCEPT)
    assert site.agent.retention.waiting == 1
    await second.cancel()
    await eventually(lambda: not site.agent.retention.waiting)
    await first.cancel()
    await site.clean()
    assert len(site.engine.prefills) == 1


async def test_a_silent_client_is_freed_when_its_lease_ends_and_acks_renew_it(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(
        engine={"script": PrefillScript(stop_before=(1, 0))}, limits={"lease_s": 0.3}
    )
    client = await site.client(tokens(20), lease_s=60.0).open()
    await client.until(FrameType.KV)
    for _ in range(4):
        await asyncio.sleep(0.15)
        await client.ack()
    assert len(site.agent.sessions) == 1
    await site.clean()
    assert site.agent.metrics.sessions.labels("cancelled", "prefill_timeout")._value.get() == 1


async def test_the_deadline_ends_a_session_with_its_phase(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 0))})
    with pytest.raises(PrefillTimeout) as caught:
        await site.client(tokens(20), deadline_s=0.1).run()
    assert caught.value.phase == "total"
    await site.clean()


async def test_an_engine_that_leaves_fails_running_and_queued_sessions_at_once(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(
        engine={"script": PrefillScript(stop_before=(1, 0))},
        retention_bytes=SCRIPTED_LAYOUT.session_bytes(0, 16),
    )
    first = await site.client(tokens(16), session=1).open()
    await first.until(FrameType.KV)
    second = await site.client(tokens(16), session=2).open()
    await second.until(FrameType.ACCEPT)
    await site.engine.close()
    for client in (first, second):
        with pytest.raises(EngineUnavailable, match="disconnected"):
            await client.rest()
    assert first.machine.ledger.watermark == 8
    assert first.staged_is_right(site.engine)
    await site.clean()


@pytest.mark.parametrize(
    ("script", "error", "says"),
    [
        (PrefillScript(fail_before=(1, 1)), EngineUnavailable, "failed boom"),
        (PrefillScript(fail_before=(0, 0), fail_reason="overloaded"), Overloaded, "overloaded"),
        (
            PrefillScript(fail_before=(0, 0), fail_reason="invalid_request_error: token 9"),
            InvalidRequest,
            "token 9",
        ),
        (PrefillScript(skip=(1, 2)), CorruptKv, "did not export chunk 1 group 0 layer 2"),
        (PrefillScript(wrong_size=(1, 0)), ProtocolError, "exported 255 bytes, not 256"),
    ],
)
async def test_a_prefill_that_goes_wrong_is_told_by_its_class(
    prefill_site: Any, tokens: Any, script: PrefillScript, error: type[PrfaasError], says: str
) -> None:
    site = await prefill_site(engine={"script": script})
    with pytest.raises(error, match=says):
        await site.client(tokens(20)).run()
    await site.clean()


async def test_garbage_on_a_control_stream_ends_the_stream_and_not_the_session(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 0))})
    client = await site.client(tokens(20)).open()
    await client.until(FrameType.KV)
    await client.call.write(b"garbage" * 20)
    with pytest.raises(ProtocolError):
        await client.rest()  # ERROR of no session: nobody could read what it was about
    (served,) = site.agent.sessions.values()
    served.stop(Cancelled("the test is over"))
    await site.clean()


async def test_a_client_that_is_gone_after_the_seal_is_freed_with_its_lease(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(limits={"lease_s": 0.4})
    client = await site.client(tokens(20), credit_bytes=0).open()
    await client.until(FrameType.SEAL)
    assert site.agent.retention.used_bytes > 0
    client.call.cancel()
    client.lane.cancel()
    began = time.monotonic()
    await site.clean()
    assert time.monotonic() - began < 1.0


class LeavingStream:
    """A control stream whose other side has closed its end, and is gone when it is written to."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()
        self.gone = asyncio.Event()

    async def read(self) -> object:
        await self.writing.wait()
        return None

    async def write(self, message: bytes) -> None:
        self.writing.set()
        await self.gone.wait()
        raise Cancelled("the other side has left")


async def test_a_handler_that_grpc_cancels_at_its_end_leaves_no_unread_exception(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 0))})
    client = await site.client(tokens(20)).open()
    await client.until(FrameType.KV)
    (served,) = site.agent.sessions.values()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    stream = LeavingStream()
    attending = asyncio.create_task(served.attend(stream))
    await stream.writing.wait()
    await asyncio.sleep(0.01)  # it waits for the last write now
    attending.cancel()
    stream.gone.set()
    await asyncio.gather(attending, return_exceptions=True)
    del attending
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    served.stop(Cancelled("the test is over"))
    await site.clean()


async def handshake(site: Any, **changes: Any) -> pb.HandshakeReply:
    engine = site.engine
    mine = handshake_of("d", engine.hello, engine.layout, CODECS)
    if changes:
        mine = replace(mine, fingerprint=replace(mine.fingerprint, **changes))
    call = site.channel.unary_unary(f"/{SERVICE}/Handshake")
    try:
        data = await call(convert.handshake_request(mine).SerializeToString(), timeout=5)
    except grpc.RpcError as exc:
        raise error_of(exc, peer="p", phase="connect") from exc
    return pb.HandshakeReply.FromString(data)


async def test_a_handshake_tells_who_is_there(prefill_site: Any) -> None:
    site = await prefill_site()
    reply = convert.handshake_from_reply(await handshake(site))
    assert (reply.instance, reply.model, reply.chunk_tokens) == ("p0", "scripted-model", 8)
    assert (reply.engine_epoch, reply.paced) == ("epoch-1", False)
    assert reply.fingerprint.layout == SCRIPTED_LAYOUT


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"config_digest": "x"}, "config_digest"),
        ({"tokenizer_digest": "x"}, "tokenizer_digest"),
        ({"model_identity": "x"}, "model_identity"),
        ({"wire_major": 2}, "wire_major"),
    ],
)
async def test_a_handshake_that_differs_is_refused_by_field(
    prefill_site: Any, changes: dict[str, Any], field: str
) -> None:
    site = await prefill_site()
    with pytest.raises(IncompatibleLayout) as caught:
        await handshake(site, **changes)
    assert caught.value.field == field


async def test_ping_tells_clock_and_epoch_and_sends_as_much_as_asked(prefill_site: Any) -> None:
    site = await prefill_site()
    call = site.channel.unary_stream(f"/{SERVICE}/Ping")
    request = pb.PingRequest(probe_bytes=200_000).SerializeToString()
    replies = [pb.PingReply.FromString(data) async for data in call(request, timeout=5)]
    assert sum(len(r.padding) for r in replies) == 200_000
    assert [r.last for r in replies] == [False] * (len(replies) - 1) + [True]
    assert abs(replies[-1].server_s - site.agent.clock.now()) < 1
    assert replies[-1].engine_epoch == "epoch-1"
    await site.engine.close()
    replies = [pb.PingReply.FromString(data) async for data in call(b"", timeout=5)]
    assert [(r.last, r.engine_epoch) for r in replies] == [(True, "")]


async def test_health_and_reflection_answer_the_standard_tools(prefill_site: Any) -> None:
    site = await prefill_site()
    health = health_pb2_grpc.HealthStub(site.channel)
    serving = health_pb2.HealthCheckResponse.SERVING

    async def is_serving() -> bool:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        return (await health.Check(request)).status == serving

    async def is_not() -> bool:
        return not await is_serving()

    await eventually(is_serving)
    site.agent.drain()
    await eventually(is_not)
    reflection = reflection_pb2_grpc.ServerReflectionStub(site.channel)

    async def requests() -> Any:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for reply in reflection.ServerReflectionInfo(requests()):
        names = {s.name for s in reply.list_services_response.service}
        assert {SERVICE, "prfaas.rpc.v1.Telemetry"} <= names


async def test_a_draining_service_finishes_and_refuses(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 0))})
    client = await site.client(tokens(16)).open()
    await client.until(FrameType.KV)
    site.agent.drain()
    with pytest.raises(PeerUnavailable, match="draining"):
        await site.client(tokens(16), session=2).run()
    site.engine.script.go.set()
    await client.rest()
    assert client.machine.state is ReceiveState.COMPLETE
    await asyncio.wait_for(site.agent.wait_idle(), 2)


async def test_stopping_tells_running_sessions(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 0))})
    client = await site.client(tokens(16)).open()
    await client.until(FrameType.KV)
    stopping = asyncio.ensure_future(site.agent.stop_sessions())
    with pytest.raises(PeerUnavailable, match="shutting down"):
        await client.rest()
    await stopping
    await site.clean()
