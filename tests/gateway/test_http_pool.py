"""The pool: connections are used again while they are fresh, never beyond a bound, never twice."""

import asyncio
import ssl
from pathlib import Path

import pytest

from gateway.http_pool import CONTROL_CONNECTIONS, Address
from gateway.upstream import HttpUpstream
from prfaas.errors import ConfigError, EngineUnavailable, Overloaded
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import until
from prfaas.testing.pki import Pki
from prfaas.testing.raw_http import HELLO, Peer, answering, raw_server


async def serve_on(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.say(HELLO)


async def ask(upstream: HttpUpstream) -> bytes:
    async with upstream.post("/x", {}, b"{}") as response:
        return await response.read(1000)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://d:8000", Address("d", 8000, False, "", "d:8000")),
        ("http://d/", Address("d", 80, False, "", "d")),
        ("https://d/a/b/", Address("d", 443, True, "/a/b", "d")),
        ("http://[::1]:8000", Address("::1", 8000, False, "", "[::1]:8000")),
    ],
)
def test_an_url_is_an_address(url: str, expected: Address) -> None:
    assert Address.of_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "d:8000",
        "ftp://d",
        "http://",
        "http://d:x",
        "http://d:99999",
        "http://u:secret@d",
        "http://d?a",
        "http://a..b",
        f"http://{64 * 'a'}:80",
        "http://d/a b",
        "http://d/\r\nhost: e",
        "http://d/\u00e4",
        "http://u:secret@d/ ",
    ],
)
def test_another_url_is_a_mistake_in_the_configuration(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.of_url(url)
    assert "secret" not in caught.value.message


async def test_a_burst_is_bounded_and_grows_old() -> None:
    limits = Limits(engine_idle_connections=3, engine_idle_s=0.3)
    async with raw_server(serve_on) as server:
        upstream = HttpUpstream(server.url, "d-0", limits)
        assert await asyncio.gather(*(ask(upstream) for _ in range(20))) == [b"hello"] * 20
        assert upstream.pool.peak == server.plays == 20
        assert upstream.pool.idle == 3
        assert repr(upstream.pool) == f"<Pool d-0 open={upstream.pool.open} idle=3 peak=20>"
        await until(lambda: upstream.pool.open == 0, "them to grow old", 2)
        assert upstream.pool.idle == 0
        await upstream.close()


async def test_one_after_another_keeps_one_connection_alive_and_lets_the_others_go() -> None:
    async with raw_server(serve_on) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits(engine_idle_s=0.3))
        await asyncio.gather(*(ask(upstream) for _ in range(5)))
        for _ in range(12):
            await asyncio.sleep(0.05)
            await ask(upstream)
        assert (server.plays, upstream.pool.open) == (5, 1)
        await upstream.close()


async def test_beyond_the_bound_is_overloaded_at_once() -> None:
    async def never(peer: Peer) -> None:
        await peer.reader.read()

    async with raw_server(never) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits(gateway_max_in_flight=2))
        bound = 2 + CONTROL_CONNECTIONS
        tasks = [asyncio.create_task(ask(upstream)) for _ in range(bound)]
        await until(lambda: upstream.pool.open == bound, "all to be open")
        with pytest.raises(Overloaded) as caught:
            await ask(upstream)
        assert caught.value.retry_after_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: upstream.pool.open == 0, "all to be closed")
        await upstream.close()


async def test_connections_that_are_being_made_count() -> None:
    async with raw_server(serve_on) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits(gateway_max_in_flight=2))
        found = await asyncio.gather(*(ask(upstream) for _ in range(40)), return_exceptions=True)
        assert found.count(b"hello") == 2 + CONTROL_CONNECTIONS
        assert sum(isinstance(f, Overloaded) for f in found) == 40 - 2 - CONTROL_CONNECTIONS
        await upstream.close()


async def test_a_connection_closed_while_idle_costs_nobody_an_error() -> None:
    """The server's timeout is shorter than ours, and its close crosses our request."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(HELLO)
        if peer.number == 1:
            await peer.reader.readexactly(1)
            peer.cut()  # as a kernel does for a request to a socket that is closed
            return
        await serve_on(peer)

    async with raw_server(play) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        for _ in range(3):
            assert await ask(upstream) == b"hello"
        assert server.plays == 2
        await upstream.close()


async def test_a_request_is_sent_again_once_at_most() -> None:
    async def play(peer: Peer) -> None:
        if peer.number == 1:
            await peer.request()
            await peer.say(HELLO)
        await peer.reader.readexactly(1)
        peer.cut()

    async with raw_server(play) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        assert await ask(upstream) == b"hello"
        with pytest.raises(EngineUnavailable, match="broke off"):
            await ask(upstream)
        assert server.plays == 2
        await upstream.close()


@pytest.mark.parametrize("before_cut", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_new_connection_that_breaks_is_not_tried_again(before_cut: bytes) -> None:
    """The engine may have died of this very request."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(before_cut)
        peer.cut()

    async with raw_server(play) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        with pytest.raises(EngineUnavailable):
            await ask(upstream)
        assert server.plays == 1
        await upstream.close()


@pytest.mark.parametrize(("said", "wait_s"), [(b"HTTP/1.1 200", 0.0), (b"", 1.2)])
async def test_a_request_that_was_at_work_is_not_sent_again(said: bytes, wait_s: float) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(HELLO)
        await peer.request()
        await peer.say(said)
        await asyncio.sleep(wait_s)
        peer.cut()

    async with raw_server(play) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        assert await ask(upstream) == b"hello"
        with pytest.raises(EngineUnavailable, match="broke off"):
            await ask(upstream)
        assert server.plays == 1
        await upstream.close()


async def test_an_idle_connection_that_the_engine_closed_is_not_taken() -> None:
    async with raw_server(answering(HELLO)) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        for at in range(3):
            assert await ask(upstream) == b"hello"
            await until(lambda: upstream.pool.open == 0, "the close to be seen")
            assert server.plays == at + 1
        await upstream.close()


async def test_nothing_is_open_after_a_thousand_cancelled_requests() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await asyncio.sleep(0.005 * (peer.number % 3))
        await peer.say(HELLO[: 10 * (peer.number % 7)])
        await peer.reader.read()

    async with raw_server(play) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        for _ in range(20):
            tasks = [asyncio.create_task(ask(upstream)) for _ in range(50)]
            for at, task in enumerate(tasks):
                asyncio.get_running_loop().call_later(0.0004 * at, task.cancel)
            await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: upstream.pool.open == 0, "all to be closed")
        assert upstream.pool.idle == upstream.pool._connecting == 0
        await upstream.close()


async def test_a_closed_pool_opens_nothing() -> None:
    async with raw_server(serve_on) as server:
        upstream = HttpUpstream(server.url, "d-0", Limits())
        assert await ask(upstream) == b"hello"
        await upstream.close()
        with pytest.raises(EngineUnavailable, match="stops") as caught:
            await ask(upstream)
        assert caught.value.phase == "connect"
        assert server.plays == 1


async def test_an_engine_behind_tls_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    named = pki.settings("d-0")
    context.load_cert_chain(named.cert, named.key)
    async with raw_server(serve_on, context) as server:
        stranger = HttpUpstream(server.url, "d-0", Limits())
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await ask(stranger)
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(named.ca))
        upstream = HttpUpstream(server.url, "d-0", Limits())
        for _ in range(3):
            assert await ask(upstream) == b"hello"
        assert upstream.pool.open == 1
        await upstream.close()
        await until(lambda: upstream.pool.open == 0, "it to be closed")
