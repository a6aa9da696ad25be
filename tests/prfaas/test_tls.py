"""Real mutual TLS on loopback: who gets in, who does not, and rotation that drops no RPC."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prfaas.errors import ConfigError, Overloaded, Unauthorized
from prfaas.rpc.status import error_of
from prfaas.settings import TlsSettings
from prfaas.testing.pki import Pki
from prfaas.tls import (
    PeerGate,
    channel_credentials,
    is_loopback,
    peer_identity,
    require_tls_or_loopback,
    server_credentials,
    server_name_options,
)
from prfaas.tls_files import TlsFiles, parse_certificates

DAY_S = 86400.0
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


class Echo:
    """Answers each kind of RPC with what came, after the caller's name."""

    def __init__(self) -> None:
        self.served = 0

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.served += 1
        return peer_identity(context).encode() + request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.served += 1
        yield peer_identity(context).encode()
        yield request

    async def duplex(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.served += 1
        await context.write(peer_identity(context).encode())
        async for request in requests:
            await context.write(request)

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.served += 1
        return peer_identity(context).encode() + b"".join([each async for each in requests])

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "Echo",
            {
                "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
                "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
                "Duplex": grpc.stream_stream_rpc_method_handler(self.duplex),
                "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            },
        )


@asynccontextmanager
async def serving(
    settings: TlsSettings, echo: Echo | None = None, **gate: Any
) -> AsyncIterator[int]:
    server = grpc.aio.server(
        interceptors=[PeerGate(settings.peers, **{"max_rpcs_each": 100, **gate})],
        options=[("grpc.so_reuseport", 0)],
    )
    server.add_generic_rpc_handlers(((echo or Echo()).handlers(),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(TlsFiles(settings, "server")))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def dial(port: int, settings: TlsSettings, name: str | None = None) -> grpc.aio.Channel:
    """A connection of its own, as `settings`; files are not checked, so they may be bad."""
    credentials = grpc.ssl_channel_credentials(
        settings.ca.read_bytes(), settings.key.read_bytes(), settings.cert.read_bytes()
    )
    return secure(port, credentials, name)


def secure(
    port: int, credentials: grpc.ChannelCredentials, name: str | None = None
) -> grpc.aio.Channel:
    options = [_OWN_CONNECTION, *(server_name_options(name) if name else [])]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


async def call(channel: grpc.aio.Channel, payload: bytes = b"!") -> bytes:
    async with channel:
        return await channel.unary_unary("/Echo/Unary")(payload, timeout=5)


async def refused(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel)
    return caught.value


async def test_both_sides_of_the_ca_meet_and_the_server_knows_the_name(pki: Pki) -> None:
    async with serving(pki.settings("p")) as port:
        files = TlsFiles(pki.settings("gateway-d"), "client")
        assert await call(secure(port, channel_credentials(files.current()))) == b"gateway-d!"


async def test_a_client_of_another_ca_is_refused(pki: Pki, tmp_path: Path) -> None:
    stranger = Pki(tmp_path / "other").settings("gateway-d")
    trusting = stranger.model_copy(update={"ca": pki.settings("p").ca})
    echo = Echo()
    async with serving(pki.settings("p"), echo) as port:
        assert (await refused(dial(port, trusting))).code() == grpc.StatusCode.UNAVAILABLE
        # The server of another CA is refused as well, by the client.
        assert (await refused(dial(port, stranger))).code() == grpc.StatusCode.UNAVAILABLE
    assert echo.served == 0


async def test_a_client_without_a_certificate_is_refused(pki: Pki) -> None:
    settings, echo = pki.settings("p"), Echo()
    async with serving(settings, echo) as port:
        anonymous = grpc.ssl_channel_credentials(settings.ca.read_bytes())
        error = await refused(secure(port, anonymous))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert echo.served == 0


@pytest.mark.parametrize(("begins_s", "ends_s"), [(-2 * DAY_S, -DAY_S), (DAY_S / 2, DAY_S)])
async def test_a_client_certificate_out_of_its_time_is_refused(
    pki: Pki, begins_s: float, ends_s: float
) -> None:
    echo = Echo()
    bad = pki.issue("gateway-d", begins_s=begins_s, ends_s=ends_s)
    async with serving(pki.settings("p"), echo) as port:
        assert (await refused(dial(port, bad))).code() == grpc.StatusCode.UNAVAILABLE
    assert echo.served == 0


async def test_a_plaintext_client_is_refused_and_the_server_goes_on(pki: Pki) -> None:
    settings, echo = pki.settings("p"), Echo()
    async with serving(settings, echo) as port:
        plain = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[_OWN_CONNECTION])
        assert (await refused(plain)).code() == grpc.StatusCode.UNAVAILABLE
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01\xff\xff"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                sock.sendall(junk)
        assert echo.served == 0
        assert await call(dial(port, pki.settings("gateway-d"))) == b"gateway-d!"


async def test_a_name_that_is_not_allowed_is_refused_by_every_kind_of_rpc(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    echo = Echo()
    async with (
        serving(pki.settings("p", peers=("gateway-d", "agent-d")), echo) as port,
        dial(port, pki.settings("mallory")) as channel,
    ):
        unary = channel.unary_unary("/Echo/Unary")
        stream = channel.unary_stream("/Echo/Stream")
        duplex = channel.stream_stream("/Echo/Duplex")
        collect = channel.stream_unary("/Echo/Collect")
        attempts: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: unary(b"x", timeout=5),
            lambda: anext(aiter(stream(b"x", timeout=5))),
            lambda: anext(aiter(duplex(iter([b"x"]), timeout=5))),
            lambda: collect(iter([b"x"]), timeout=5),
        )
        for attempt in attempts:
            code = grpc.StatusCode.INTERNAL
            # gRPC says INTERNAL where the refusal overtakes what is still being sent.
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await attempt()
                code = caught.value.code()
                if code is not grpc.StatusCode.INTERNAL:
                    break
            assert code == grpc.StatusCode.UNAUTHENTICATED
            error = error_of(caught.value, peer="p", phase="connect")
            assert isinstance(error, Unauthorized)
            assert error.message == "mallory is not among the peers allowed here"
    assert echo.served == 0
    assert caplog.text.count("mallory is not among the peers") >= 4


async def test_an_allowed_name_passes_the_gate_by_every_kind_of_rpc(pki: Pki) -> None:
    async with (
        serving(pki.settings("p", peers=("GATEWAY-D", "agent-d"))) as port,
        dial(port, pki.settings("agent-d")) as channel,
    ):
        assert await channel.unary_unary("/Echo/Unary")(b"x", timeout=5) == b"agent-dx"
        stream = channel.unary_stream("/Echo/Stream")(b"x", timeout=5)
        assert [each async for each in stream] == [b"agent-d", b"x"]
        duplex = channel.stream_stream("/Echo/Duplex")(iter([b"x", b"y"]), timeout=5)
        assert [each async for each in duplex] == [b"agent-d", b"x", b"y"]
        collect = channel.stream_unary("/Echo/Collect")(iter([b"x", b"y"]), timeout=5)
        assert await collect == b"agent-dxy"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/Echo/None")(b"x", timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_certificate_that_expires_on_an_open_connection_is_refused(pki: Pki) -> None:
    """Channels stay open for days: the handshake alone would let an expired peer stay."""

    class Tomorrow:
        ahead_s = 0.0

        def now(self) -> float:
            return 0.0

        def wall(self) -> float:
            return time.time() + self.ahead_s

    clock = Tomorrow()
    async with (
        serving(pki.settings("p"), clock=clock) as port,
        dial(port, pki.settings("gateway-d")) as channel,
    ):
        assert await channel.unary_unary("/Echo/Unary")(b"x", timeout=5) == b"gateway-dx"
        clock.ahead_s = 2 * DAY_S
        with pytest.raises(grpc.aio.AioRpcError, match="gateway-d has expired"):
            await channel.unary_unary("/Echo/Unary")(b"x", timeout=5)


async def test_a_server_of_the_ca_under_another_name_is_refused_by_the_client(pki: Pki) -> None:
    """A compromised peer must not be able to stand in for another one."""
    async with serving(pki.settings("q")) as port:
        client = pki.settings("gateway-d")
        assert (await refused(dial(port, client, "p"))).code() == grpc.StatusCode.UNAVAILABLE
        assert await call(dial(port, client, "q")) == b"gateway-d!"


async def test_rotation_under_a_running_server_drops_no_rpc(pki: Pki) -> None:
    settings = pki.settings("p")
    client = TlsFiles(pki.settings("gateway-d"), "client")
    serials = {file_serial(settings)}
    async with serving(settings) as port:
        warm = secure(port, channel_credentials(client.current()))
        done, moved = asyncio.Event(), asyncio.Condition()
        counts = {"warm": 0, "fresh": 0}

        async def over_one_connection() -> None:
            async with warm:
                while not done.is_set():
                    answer = await warm.unary_unary("/Echo/Unary")(b"!", timeout=5)
                    assert answer == b"gateway-d!"
                    counts["warm"] += 1

        async def over_fresh_connections() -> None:
            while not done.is_set():
                answer = await call(secure(port, channel_credentials(client.current())))
                assert answer == b"gateway-d!"
                counts["fresh"] += 1
                async with moved:
                    moved.notify_all()

        async def rotate() -> None:
            for turn in range(4):
                name = ("p", "gateway-d")[turn % 2]
                await asyncio.to_thread(pki.rotate, name)
                served = await asyncio.to_thread(served_serial, port, pki.settings("gateway-d"))
                assert served == file_serial(settings)
                serials.add(served)
                reached = counts["fresh"] + 2
                async with moved:
                    await moved.wait_for(lambda reached=reached: counts["fresh"] >= reached)
            done.set()

        async with asyncio.timeout(20):
            await asyncio.gather(over_one_connection(), over_fresh_connections(), rotate())
    assert len(serials) == 3
    assert counts["warm"] > 8
    assert counts["fresh"] >= 8


async def test_a_broken_rotation_under_a_running_server_drops_no_rpc(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pki.settings("p")
    settings = pair.model_copy(update={"cert": tmp_path / "c.pem", "key": tmp_path / "k.pem"})
    shutil.copy(pair.cert, settings.cert)
    shutil.copy(pair.key, settings.key)
    client = pki.settings("gateway-d")
    async with serving(settings) as port:
        before = await asyncio.to_thread(served_serial, port, client)
        settings.cert.write_bytes(pair.cert.read_bytes()[:300])
        for _ in range(3):
            assert await call(dial(port, client)) == b"gateway-d!"
        assert await asyncio.to_thread(served_serial, port, client) == before
        assert len([each for each in caplog.records if "keeps <Tls" in each.message]) == 1
        pki.rotate("p")
        shutil.copy(pair.key, settings.key)
        shutil.copy(pair.cert, settings.cert)
        assert await call(dial(port, client)) == b"gateway-d!"
        assert await asyncio.to_thread(served_serial, port, client) != before


async def test_a_ca_taken_out_of_the_file_ends_its_certificates(pki: Pki, tmp_path: Path) -> None:
    successor = Pki(tmp_path / "new")
    both = tmp_path / "both.pem"
    old_client, new_client = pki.settings("d"), successor.settings("d")
    both.write_bytes(old_client.ca.read_bytes())
    settings = pki.settings("p").model_copy(update={"ca": both})
    new_client = new_client.model_copy(update={"ca": old_client.ca})
    async with serving(settings) as port:
        assert await call(dial(port, old_client)) == b"d!"
        await refused(dial(port, new_client))
        both.write_bytes(old_client.ca.read_bytes() + successor.settings("d").ca.read_bytes())
        assert await call(dial(port, old_client)) == b"d!"
        assert await call(dial(port, new_client)) == b"d!"
    # Only what signs its own certificate may be left as the only CA: the server's stays the old.
    settings = successor.settings("p").model_copy(update={"ca": both})
    async with serving(settings) as port:
        old_trusting = old_client.model_copy(update={"ca": both})
        assert await call(dial(port, old_trusting)) == b"d!"
        keep = tmp_path / "keep.pem"
        shutil.copy(both, keep)
        both.write_bytes(successor.settings("d").ca.read_bytes())
        await refused(dial(port, old_trusting.model_copy(update={"ca": keep})))


def test_an_rpc_without_tls_has_no_identity() -> None:
    class Plain:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

    class Garbled:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_pem_cert": [b"-----BEGIN CERTIFICATE-----\nAAAA\n"]}

    with pytest.raises(Unauthorized, match="a client certificate is required"):
        peer_identity(Plain())
    with pytest.raises(Unauthorized, match="cannot be read"):
        peer_identity(Garbled())


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST", "::1", "[::1]", "::ffff:127.0.0.1"],
)
def test_loopback_needs_no_tls(host: str) -> None:
    assert is_loopback(host)
    require_tls_or_loopback(host, None, "agent.host")


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "",
        "10.0.0.1",
        "192.168.1.7",
        "fe80::1",
        "::ffff:10.0.0.1",
        "127.0.0.1.nip.io",
        "localhost.example",
        "p.example",
        "2130706433",
        "127.1",
        "*",
    ],
)
def test_everything_else_needs_tls(pki: Pki, host: str) -> None:
    with pytest.raises(ConfigError, match=r"^prefill\.host: .* without TLS"):
        require_tls_or_loopback(host, None, "prefill.host")
    require_tls_or_loopback(host, pki.settings("p"), "prefill.host")


def file_serial(settings: TlsSettings) -> int:
    return parse_certificates(settings.cert.read_bytes())[0].serial_number


def served_serial(port: int, client: TlsSettings) -> int:
    """Serial number of the certificate that the server shows now."""
    context = ssl.create_default_context(cafile=str(client.ca))
    context.load_cert_chain(client.cert, client.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as sock,
    ):
        shown = sock.getpeercert()
    assert shown is not None
    return int(shown["serialNumber"], 16)


async def test_one_client_cannot_take_every_rpc(pki: Pki) -> None:
    async with serving(pki.settings("p"), max_rpcs_each=2) as port:
        greedy, other = (dial(port, pki.settings(name)) for name in ("d0", "d1"))
        held = [greedy.stream_stream("/Echo/Duplex")(timeout=5) for _ in range(2)]
        for stream in held:
            await stream.write(b"!")
            assert await stream.read() == b"d0"
        for kind in ("Unary", "Stream"):
            make = greedy.unary_unary if kind == "Unary" else greedy.unary_stream
            call_ = make(f"/Echo/{kind}")(b"!", timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call_ if kind == "Unary" else call_.read())
            error = error_of(caught.value, peer="p", phase="test")
            assert isinstance(error, Overloaded)
            assert error.message == "d0 has 2 RPCs running already"
        assert await call(other) == b"d1!"
        held[0].cancel()
        await held[1].done_writing()
        while await held[1].read() is not grpc.aio.EOF:
            pass
        for _ in range(100):
            try:
                assert await greedy.unary_unary("/Echo/Unary")(b"!", timeout=5) == b"d0!"
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
        else:
            pytest.fail("what has ended still counts")
        await greedy.close()
