"""P tells its clients apart by certificate: who may open what, and whose sessions are whose."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
import pytest

from prfaas.codecs import default_codecs
from prfaas.dialling import checked_endpoint, open_files
from prfaas.errors import (
    ConfigError,
    Forbidden,
    Overloaded,
    PrefillTimeout,
    PrfaasError,
    Unauthorized,
)
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.limits import Limits
from prfaas.rpc import convert
from prfaas.rpc.status import error_of
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.session_messages import SessionOpen
from prfaas.settings import PrefillSettings, Settings
from prfaas.testing.pki import Pki
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from prfaas.tls_files import check_files
from remote_prefill import service, transport
from remote_prefill.access import Access, Client
from remote_prefill.agent_main import AgentServer
from remote_prefill.prefill_agent import PrefillAgent
from remote_prefill.prefill_main import PrefillServer
from remote_prefill.telemetry_service import TELEMETRY
from remote_prefill.transport import SERVICE, SESSION, open_channel

MODEL = "scripted-model"
ANY = {"identity": "d0"}
LINKS: WeakKeyDictionary[grpc.aio.Channel, bytes] = WeakKeyDictionary()
"""As a handshake over each channel would have given it."""


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


@pytest.fixture
def start(prefill_site: Any, pki: Pki) -> Any:
    """Start P `p0` with these authorised clients, over mutual TLS."""

    async def start(*authorised: dict[str, Any], **fields: Any) -> Any:
        settings = pki.settings("p0", peers=fields.pop("peers", ()))
        return await prefill_site(tls=settings, authorised=authorised, **fields)

    return start


@pytest.fixture
def dial(stack: AsyncExitStack, pki: Pki) -> Any:
    """A channel to a site as the named client."""

    def dial(site: Any, name: str) -> grpc.aio.Channel:
        files = open_files(pki.settings(name), "client", "tls")
        endpoint = checked_endpoint(f"127.0.0.1:{site.port}", files, None, "test")
        channel = open_channel(endpoint)
        stack.push_async_callback(channel.close)
        if isinstance(site.agent, PrefillAgent):
            LINKS[channel] = site.agent.links.open(name, name, b"").token
        return channel

    return dial


class Stream:
    """The control stream of one session."""

    def __init__(self, channel: grpc.aio.Channel, tokens: Any, session: int = 5) -> None:
        self.call = channel.stream_stream(SESSION)(timeout=10)
        self.session = session
        self.request = SessionOpen(
            transfer_id=f"t{session}",
            model=MODEL,
            tokens=tokens.astype("<i4").tobytes(),
            send_from=0,
            salt="",
            use_cache=True,
            quality="exact",
            codecs=default_codecs().names,
            deadline_s=10,
            lease_s=10,
            engine_epoch="epoch-1",
            link=LINKS[channel],
            credit_bytes=1 << 22,
        )

    async def open(self, **changes: Any) -> FrameType:
        """The type of the first frame. Raises what an ERROR frame carries."""
        payload = convert.open_to_bytes(replace(self.request, **changes))
        await self.call.write(Frame(FrameType.OPEN, self.session, 1, payload=payload).serialize())
        return await self.next()

    async def next(self) -> FrameType:
        data = await self.call.read()
        assert isinstance(data, bytes), data
        frame = next(iter(parse_all(data)))
        if frame.type is FrameType.ERROR:
            raise convert.error_from_bytes(frame.payload)
        return frame.type


async def cancel(channel: grpc.aio.Channel, session: int) -> int:
    request = pb.CancelRequest(sessions=[session])
    reply = await unary_of(channel, "Cancel", request, pb.CancelReply)
    return int(reply.cancelled)


async def unary_of(channel: grpc.aio.Channel, method: str, request: Any, reply: Any) -> Any:
    call = channel.unary_unary(
        f"/{SERVICE}/{method}", type(request).SerializeToString, reply.FromString
    )
    try:
        return await call(request, timeout=5)
    except grpc.aio.AioRpcError as exc:
        raise error_of(exc, peer="p0", phase="test") from exc


async def ping(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(
        f"/{SERVICE}/Ping", pb.PingRequest.SerializeToString, pb.PingReply.FromString
    )(pb.PingRequest(), timeout=5)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as exc:
        raise error_of(exc, peer="p0", phase="test") from exc


async def watch_once(channel: grpc.aio.Channel) -> Any:
    call = channel.unary_stream(
        f"/{TELEMETRY}/Watch", pb.WatchRequest.SerializeToString, pb.WatchEvent.FromString
    )(pb.WatchRequest(gateway="g"), timeout=5)
    try:
        return await call.read()
    except grpc.aio.AioRpcError as exc:
        raise error_of(exc, peer="p0", phase="test") from exc
    finally:
        call.cancel()


# --- settings ---


@pytest.mark.parametrize(
    ("tls", "authorised", "says"),
    [
        (True, (), r"prefill\.authorised: with tls, name the clients"),
        (False, (ANY,), r"prefill\.authorised: without tls nobody"),
        (True, (ANY, ANY), r"prefill\.authorised: an identity is there twice"),
    ],
)
def test_the_list_of_clients_and_tls_go_together(
    pki: Pki, tls: bool, authorised: Any, says: str
) -> None:
    settings = PrefillSettings(tls=pki.settings("p0") if tls else None, authorised=authorised)
    with pytest.raises(ConfigError, match=says):
        Access(settings, Limits())


@pytest.mark.parametrize("name", ["", "localhost", "*", "10.0.0.1", "*.example"])
def test_a_client_is_named_by_what_identifies_it(name: str) -> None:
    with pytest.raises(ValueError, match="identifies nobody"):
        PrefillSettings(authorised=({"identity": name},))


def test_models_and_tenants_are_exact_names_or_all() -> None:
    client = Client("d0", ("a", "b"), ("acme", ""), 4)
    client.require_model("a")
    client.require_tenant("")
    for wrong in ("c", "A", "", "*"):
        with pytest.raises(Forbidden, match="d0 may not use model"):
            client.require_model(wrong)
    for wrong in ("other", "ACME", "*"):
        with pytest.raises(Forbidden, match="d0 may not act for tenant"):
            client.require_tenant(wrong)
    Client("d0", ("*",), ("*",), 4).require_tenant("anything")
    with pytest.raises(Forbidden, match="129 characters"):
        Client("d0", ("*",), ("*",), 4).require_tenant("x" * 129)


def test_tenants_that_nobody_configured_are_counted_together() -> None:
    client = Client("d0", ("*",), ("*", "acme"), 4)
    assert [client.counted_tenant(name) for name in ("acme", "", "x1", "x2")] == [
        "acme",
        "",
        "other",
        "other",
    ]


# --- sessions over real TLS ---


async def test_d_prefills_at_p_over_mutual_tls(
    start: Any, decode_site: Any, pki: Pki, tokens: Any
) -> None:
    p = await start({"identity": "d0", "models": [MODEL], "tenants": ["", "acme"]})
    d = await decode_site({"fra/p0": p}, tls=pki.settings("d0"))
    await d.ready("fra/p0")
    for tenant in ("acme", ""):
        prompt = tokens(22, len(tenant))
        done = await d.engine.fetch(d.params("fra/p0", tenant=tenant), prompt)
        assert done.status == "staged"
        assert d.engine.staged_is_right(done, prompt)
        d.engine.release(done)
    await d.clean(p)
    sealed = p.agent.metrics.client_sessions.labels("d0", "acme", "complete")
    assert sealed._value.get() == 1
    assert p.agent.metrics.client_wire_bytes.labels("d0", "acme")._value.get() > 0
    for name, site in (("p0", p), ("d0", d)):
        end = check_files(pki.settings(name), "both").not_after.timestamp()
        (sample,) = site.agent.metrics.certificate_end.collect()[0].samples
        assert sample.value == end


async def test_a_tenant_that_is_not_the_clients_is_served_at_d_with_the_reason(
    start: Any, decode_site: Any, pki: Pki, tokens: Any
) -> None:
    p = await start({"identity": "d0", "tenants": ["acme"]})
    d = await decode_site({"fra/p0": p}, tls=pki.settings("d0"))
    await d.ready("fra/p0")  # the probe is nobody's prompt and needs no tenant
    params = d.params("fra/p0", tenant="rival")
    done = await d.engine.fetch(params, tokens(22))
    assert (done.status, done.reason) == ("local", "permission_error")
    assert "d0 may not act for tenant 'rival'" in done.message
    assert (await d.outcome(params)).reason == "permission_error"
    assert p.agent.metrics.sessions.labels("refused", "permission_error")._value.get() == 1
    assert d.link("fra/p0").ready
    await d.clean(p)


@pytest.mark.parametrize(
    ("client", "says"),
    [
        ({"identity": "d1"}, "d0 may not prefill here: it is not in prefill.authorised"),
        ({"identity": "d0", "models": ["another"]}, "d0 may not use model 'scripted-model' here"),
    ],
)
async def test_a_client_without_the_right_is_told_and_serves_itself(
    start: Any, decode_site: Any, pki: Pki, tokens: Any, client: dict[str, Any], says: str
) -> None:
    p = await start(client)
    d = await decode_site({"fra/p0": p}, tls=pki.settings("d0"))
    await eventually(lambda: says in d.link("fra/p0").detail)
    done = await d.engine.fetch(d.params("fra/p0"), tokens(22))
    assert (done.status, done.reason) == ("local", "peer_unavailable")
    assert says in done.message
    pairings = d.agent.metrics.pairings.labels("fra", "p0", "permission_error")
    assert pairings._value.get() >= 1
    assert not p.engine.prefills
    await d.clean(p)


async def test_a_stranger_of_the_ca_gets_nothing_but_telemetry(
    start: Any, dial: Any, tokens: Any
) -> None:
    p = await start(ANY, engine={})
    gateway = dial(p, "gateway")
    assert (await watch_once(gateway)).full
    with pytest.raises(Forbidden, match="gateway may not prefill here"):
        await Stream(gateway, tokens(22)).open()
    with pytest.raises(Forbidden, match="gateway may not prefill here"):
        await unary_of(gateway, "Handshake", pb.HandshakeRequest(), pb.HandshakeReply)
    with pytest.raises(Forbidden, match="gateway may not prefill here"):
        await cancel(gateway, 5)
    with pytest.raises(Forbidden, match="gateway may not prefill here"):
        await ping(gateway)
    assert not p.engine.prefills


async def test_telemetry_and_health_are_behind_the_gate_too(
    start: Any, dial: Any, decode_site: Any, pki: Pki
) -> None:
    p = await start(ANY, peers=("d0", "gateway"))
    d = await decode_site({}, tls=pki.settings("d-agent", peers=("gateway",)))
    for site in (p, d):
        assert (await watch_once(dial(site, "gateway"))).full
        stranger = dial(site, "stranger")
        with pytest.raises(Unauthorized, match="stranger is not among the peers"):
            await watch_once(stranger)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stranger.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(PrfaasError):  # site.channel speaks plain text
            await watch_once(site.channel)


async def test_sessions_of_two_clients_under_one_number_never_meet(
    start: Any, dial: Any, tokens: Any
) -> None:
    script = PrefillScript()
    script.stop_before = (1, 1)
    p = await start(ANY, {"identity": "d1"}, engine={"script": script})
    first, second = dial(p, "d0"), dial(p, "d1")
    one = Stream(first, tokens(22, 1))
    assert await one.open() is FrameType.ACCEPT
    assert await cancel(second, 5) == 0
    two = Stream(second, tokens(22, 2))
    assert await two.open() is FrameType.ACCEPT
    assert set(p.agent.sessions) == {("d0", 5), ("d1", 5)}
    assert await cancel(second, 5) == 1
    await eventually(lambda: set(p.agent.sessions) == {("d0", 5)})
    script.go.set()
    while await one.next() is not FrameType.SEAL:
        pass
    assert await cancel(first, 5) == 1
    await p.clean()


async def test_a_client_that_holds_all_its_sessions_leaves_room_for_others(
    start: Any, dial: Any, tokens: Any
) -> None:
    script = PrefillScript()
    script.stop_before = (0, 0)
    p = await start({**ANY, "max_sessions": 2}, {"identity": "d1"}, engine={"script": script})
    greedy, other = dial(p, "d0"), dial(p, "d1")
    held = [Stream(greedy, tokens(22, n), session=n) for n in (1, 2)]
    for stream in held:
        await stream.open()
    with pytest.raises(Overloaded, match="2 sessions of d0 are open already"):
        await Stream(greedy, tokens(22, 3), session=3).open()
    assert await Stream(other, tokens(22, 4), session=3).open() is FrameType.ACCEPT
    script.go.set()


# --- limits before memory ---


async def test_messages_and_metadata_over_the_limit_are_refused_by_the_transport(
    start: Any, dial: Any
) -> None:
    p = await start(ANY, limits={"max_prompt_tokens": 1000})
    channel = dial(p, "d0")
    call = channel.stream_stream(SESSION)(timeout=5)
    await call.write(b"\0" * (1 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Cancel")(
            b"", timeout=5, metadata=[("x", "y" * (64 << 10))]
        )
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await cancel(channel, 1) == 0


@pytest.mark.parametrize("tls", [True, False])
async def test_a_connection_that_says_nothing_is_closed(
    pki: Pki, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 0.2)
    files = open_files(pki.settings("p0") if tls else None, "server", "tls")
    server = grpc.aio.server(options=transport.server_options(1000))
    port = transport.bind(server, "127.0.0.1", 0, files)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(3):
        while await reader.read(1000):
            pass
    writer.close()
    await server.stop(None)


async def test_a_stream_that_opens_no_session_is_closed(
    start: Any, dial: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "OPEN_TIMEOUT_S", 0.1)
    p = await start(ANY)
    idle = Stream(dial(p, "d0"), tokens(22))
    with pytest.raises(PrefillTimeout, match="no OPEN or RESUME frame came"):
        await idle.next()
    assert await idle.call.read() is grpc.aio.EOF


async def test_without_tls_every_caller_is_the_same_nobody(prefill_site: Any, tokens: Any) -> None:
    script = PrefillScript()
    script.stop_before = (0, 0)
    p = await prefill_site(engine={"script": script})
    LINKS[p.channel] = p.agent.links.open("", "nobody", b"").token
    first = Stream(p.channel, tokens(22))
    assert await first.open() is FrameType.ACCEPT
    with pytest.raises(PrfaasError, match="session 5 is open already"):
        await Stream(p.channel, tokens(22)).open()
    script.go.set()


@pytest.mark.parametrize("address", ["10.0.0.1:1", "p.example:1", "[2001:db8::1]:1", "0.0.0.0:1"])
async def test_without_tls_d_dials_loopback_only(tmp_path: Path, address: str) -> None:
    instances = [{"name": "p0", "address": address}]
    agent = {"socket": tmp_path / "s", "peers": [{"name": "fra", "instances": instances}]}
    settings = Settings.model_validate({"agent": agent})
    with pytest.raises(ConfigError, match=r"agent\.peers fra/p0: .* not a loopback address"):
        AgentServer(settings)


@pytest.mark.parametrize(
    ("section", "server"), [("agent", AgentServer), ("prefill", PrefillServer)]
)
async def test_an_expired_certificate_or_a_wrong_ca_stops_the_start(
    tmp_path: Path, pki: Pki, section: str, server: Any
) -> None:
    expired = pki.issue("old", begins_s=-2000, ends_s=-1000)
    foreign = pki.settings("p0").model_copy(
        update={"ca": Pki(tmp_path / "stranger").settings("x").ca}
    )
    for tls, says in ((expired, "expired at"), (foreign, "is not signed by")):
        fields = {"tls": tls, "socket": tmp_path / "s", "host": "0.0.0.0"}
        if section == "prefill":
            fields["authorised"] = (ANY,)
        with pytest.raises(ConfigError, match=rf"{section}\.tls\.cert: .* {says}"):
            server(Settings.model_validate({section: fields}))


# --- certificates that change ---


async def test_certificates_change_at_both_ends_while_transfers_run(
    start: Any, decode_site: Any, pki: Pki, tokens: Any
) -> None:
    script = PrefillScript()
    p = await start(ANY, engine={"script": script})
    d = await decode_site({"fra/p0": p}, tls=pki.settings("d0"), limits={"watch_stale_s": 0.4})
    await d.ready("fra/p0")
    link = d.link("fra/p0")
    script.stop_before = (1, 1)
    prompt = tokens(22)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), prompt)
    await eventually(lambda: link.open_streams == 1)
    before = link._channels._set
    pki.rotate("p0")
    pki.rotate("d0")
    await eventually(lambda: link._channels._set is not before)
    assert link.ready
    assert (link.open_streams, before.streams) == (0, 1)  # it ends where it began
    script.go.set()
    done = await asyncio.wait_for(answer, 5)
    assert done.status == "staged"
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await eventually(lambda: not link._channels._retiring)
    done = await d.engine.fetch(d.params("fra/p0"), tokens(22, 9))
    assert done.status == "staged"
    d.engine.release(done)
    assert d.agent.metrics.pairings.labels("fra", "p0", "ok")._value.get() == 1
    await d.clean(p)


async def test_new_certificates_that_p_refuses_leave_the_old_channels_in_use(
    start: Any,
    decode_site: Any,
    pki: Pki,
    tokens: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    p = await start(ANY)
    stranger = Pki(tmp_path / "stranger")
    mine = pki.settings("d0")
    d = await decode_site({"fra/p0": p}, tls=mine, limits={"watch_stale_s": 0.4})
    await d.ready("fra/p0")
    theirs = stranger.settings("d0")
    target = mine.cert.parent
    target.unlink()
    target.symlink_to(theirs.cert.parent.resolve())
    mine.ca.write_bytes(stranger.authority.pem)
    await eventually(lambda: "no connection with the new certificates" in caplog.text)
    done = await d.engine.fetch(d.params("fra/p0"), tokens(22))
    assert done.status == "staged"
    d.engine.release(done)
    assert d.link("fra/p0").ready
    await d.clean(p)
