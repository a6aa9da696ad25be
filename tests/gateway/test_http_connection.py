"""The client on real sockets, under asyncio and uvloop: every answer, cut, close and silence."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from gateway.http1 import KnownHeads
from gateway.http_connection import MERGE_S, Connection
from gateway.outbox import Outbox
from gateway.upstream import HttpUpstream, UpstreamResponse
from prfaas.errors import EngineUnavailable
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import until
from prfaas.testing.raw_http import HELLO, OK, Peer, Play, RawServer, answering, raw_server
from prfaas.testing.virtual_time import run_virtually

CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt":"hi"}'

Loop = Callable[[Awaitable[object]], object]
loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


def played(
    run: Loop,
    play: Play,
    story: Callable[[HttpUpstream, RawServer], Awaitable[None]],
    **limits: float,
) -> None:
    """Run `story` with a client of a server that plays `play`; nothing may be open afterwards."""

    async def main() -> None:
        async with raw_server(play) as server:
            upstream = HttpUpstream(server.url, "d-0", Limits(**limits))
            try:
                async with asyncio.timeout(20):
                    await story(upstream, server)
            finally:
                await upstream.close()
                await until(lambda: upstream.pool.open == 0, "the sockets to close")

    run(main())


async def ask(
    upstream: HttpUpstream, method: str = "POST", body: bytes = BODY
) -> tuple[int, bytes]:
    async with upstream.request(method, "/x", {}, body) as response:
        return response.status, await response.read(10 << 20)


@loops
def test_an_answer_is_read_whole_however_the_network_cuts_it(run: Loop) -> None:
    """Split at every byte: each piece in a segment of its own."""
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        + CHUNKED + b'5;a="b"\r\nhello\r\n1\r\n!\r\n0\r\nx-sum: 1\r\n\r\n'
    )  # fmt: skip

    async def play(peer: Peer) -> None:
        for cut in range(1, len(answer)):
            await peer.request()
            await peer.say(answer[:cut])
            await asyncio.sleep(0.001)
            await peer.say(answer[cut:])
        await peer.request()
        for at in range(len(answer)):
            await peer.say(answer[at : at + 1])
            await asyncio.sleep(0)

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        for _ in range(len(answer)):
            assert await ask(upstream) == (200, b"hello!")
        assert server.plays == 1

    played(run, play, story)


@loops
@pytest.mark.parametrize(
    ("answer", "method", "expected"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", "POST", (204, b"")),
        (b"HTTP/1.1 304 Same\r\ncontent-length: 5\r\n\r\n", "GET", (304, b"")),
        (OK + b"content-length: 5\r\n\r\n", "HEAD", (200, b"")),
        (HELLO, "POST", (200, b"hello")),
    ],
)
def test_answers_with_and_without_a_body_keep_the_connection(
    run: Loop, answer: bytes, method: str, expected: tuple[int, bytes]
) -> None:
    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        body = BODY if method == "POST" else b""
        for _ in range(3):
            assert await ask(upstream, method, body) == expected
        assert await ask(upstream) == (200, b"hello")
        assert server.plays == 1

    played(run, answering(answer, answer, answer, HELLO), story)


@loops
@pytest.mark.parametrize(
    "answer",
    [
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        HELLO + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        HELLO + b"garbage",
        CHUNKED + b"5\r\nhello\r\n0\r\n\r\n0\r\n\r\n",
    ],
)
def test_a_connection_with_more_to_say_is_not_used_again(run: Loop, answer: bytes) -> None:
    """An answer nobody asked for must never be taken for that of the next request."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer if peer.number == 1 else HELLO)
        await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        assert await ask(upstream) == (200, b"hello")
        assert upstream.pool.idle == 0
        assert await ask(upstream) == (200, b"hello")
        assert server.plays == 2

    played(run, play, story)


@loops
def test_what_comes_while_nobody_asked_closes_the_connection(run: Loop) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(HELLO)
        if peer.number == 1:
            await asyncio.sleep(0.05)
            await peer.say(HELLO.replace(b"hello", b"evil!"))
        await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        assert await ask(upstream) == (200, b"hello")
        assert upstream.pool.idle == 1
        await until(lambda: upstream.pool.open == 0, "it to be closed")
        assert await ask(upstream) == (200, b"hello")
        assert server.plays == 2

    played(run, play, story)


@loops
def test_a_body_without_length_ends_with_the_connection(run: Loop) -> None:
    """Also where the engine only shuts its half and goes on reading."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"\r\nhel")
        await asyncio.sleep(0.01)
        await peer.say(b"lo")
        peer.writer.write_eof()
        await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        for _ in range(2):
            assert await ask(upstream) == (200, b"hello")
        assert server.plays == 2

    played(run, play, story)


@loops
@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200",
        OK + b"content-length: 10\r\n\r\nhello",
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"5\r\nhello\r\n0\r\n",
    ],
)
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_an_answer_that_breaks_off_is_an_error_not_an_end(run: Loop, said: bytes, how: str) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(said)
        await asyncio.sleep(0.02)
        if how == "reset":
            peer.cut()
        elif how == "half-close":
            peer.writer.write_eof()
            await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        with pytest.raises(EngineUnavailable, match="engine d-0 broke off") as caught:
            await ask(upstream)
        assert caught.value.phase == "progress"
        assert server.plays == 1  # the engine was at work: not sent again

    played(run, play, story)


@loops
@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"content-length: 99999999999999999999\r\n\r\n",
        OK + b"a: b\r\n c\r\ncontent-length: 5\r\n\r\nhello",
        OK + b"a: b\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nraw",
        b"\x16\x03\x01",
    ],
)
def test_what_has_two_readings_is_refused_and_the_connection_cut(run: Loop, answer: bytes) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer)
        await peer.reader.read()
        peer.writer.close()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        with pytest.raises(EngineUnavailable, match="broke off"):
            await ask(upstream)
        await until(lambda: upstream.pool.open == 0, "it to be closed")
        assert server.plays == 1

    played(run, play, story)


@loops
def test_an_early_refusal_is_heard_though_the_body_was_not_read(run: Loop) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"

    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(refusal)
        await asyncio.sleep(60)

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        for _ in range(2):
            assert await ask(upstream, body=b"x" * (16 << 20)) == (413, b"no")
        assert upstream.pool.idle == 0  # half a request is still on its way out
        assert server.plays == 2

    played(run, play, story)


@loops
def test_a_large_body_arrives_as_it_was(run: Loop) -> None:
    body = bytes(range(256)) * (12 << 10)
    got = []

    async def play(peer: Peer) -> None:
        got.append(await peer.request())
        await peer.say(HELLO)

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        assert await ask(upstream, body=body) == (200, b"hello")
        assert got[0].endswith(b"\r\n\r\n" + body)
        assert got[0].startswith(b"POST /x HTTP/1.1\r\nhost: 127.0.0.1:")

    played(run, play, story)


@loops
def test_a_reader_that_waits_stops_the_engine_not_our_memory(run: Loop) -> None:
    sent = 0
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"

    async def play(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        peer.writer.write(CHUNKED)
        for _ in range(1000):
            await peer.say(piece)
            sent += 65536
        await peer.say(b"0\r\n\r\n")
        await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        async with upstream.request("POST", "/x", {}, BODY) as response:
            await asyncio.sleep(0.3)  # longer than the silence that is allowed: it is ours
            stalled = sent
            await asyncio.sleep(0.3)
            assert sent == stalled
            assert stalled < 32 << 20  # what the sockets of both sides hold
            size, largest = 0, 0
            while piece := await response.next_piece():
                size += len(piece)
                largest = max(largest, len(piece))
            assert size == 1000 * 65536
            assert largest <= (64 << 10) + (256 << 10)
        assert upstream.pool.idle == 1

    played(run, play, story, engine_silence_timeout_s=0.2)


@loops
def test_whoever_follows_gets_every_byte_in_order(run: Loop) -> None:
    """However fast they come, also with the end, and with stops in between."""
    pieces = [b"%03d," % n for n in range(300)]

    async def play(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED)
        for number, piece in enumerate(pieces):
            peer.writer.write(b"4\r\n" + piece + b"\r\n")
            if number % 50 == 0:
                await peer.writer.drain()
                await asyncio.sleep(0.003)
            elif number % 7 == 0:
                await asyncio.sleep(0)
        await peer.say(b"0\r\n\r\n")
        await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        got: list[bytes] = []

        def taker(piece: bytes) -> bool:
            got.append(piece)
            return len(got) % 3 == 0

        async with upstream.request("POST", "/x", {}, BODY) as response:
            while piece := await response.next_piece():
                got.append(piece)
                await response.follow(taker)
        assert b"".join(got) == b"".join(pieces)
        assert upstream.pool.idle == 1

    played(run, play, story)


class Wire(asyncio.Transport):
    """Notes when it is read from."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.reading = True

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        pass


def test_pieces_that_come_fast_are_read_together_and_slow_ones_at_once() -> None:
    """In virtual time: only what comes within a millisecond of what was before waits one."""

    async def main() -> None:
        wire, got = Wire(sock), []
        connection = Connection(Limits(), lambda closed: None, KnownHeads(), Outbox())
        connection.connection_made(wire)
        connection.send("POST", b"", BODY)
        connection.data_received(CHUNKED)
        task = asyncio.create_task(connection.follow(lambda piece: bool(got.append(piece))))
        for number in range(10):
            await asyncio.sleep(2 * MERGE_S)
            connection.data_received(b"1\r\n%d\r\n" % number)
            assert wire.reading
        assert b"".join(got) == b"0123456789"
        await asyncio.sleep(MERGE_S / 4)
        connection.data_received(b"1\r\nx\r\n")
        assert (got[-1], wire.reading) == (b"x", False)
        await asyncio.sleep(MERGE_S / 2)
        assert not wire.reading
        await asyncio.sleep(MERGE_S)
        assert wire.reading
        assert not task.done()
        connection.data_received(b"0\r\n\r\n")
        await task
        assert connection.take() == b""

    with socket.socket() as sock:
        run_virtually(main())


@loops
def test_what_a_taker_raises_is_raised_where_it_is_followed(run: Loop) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"1\r\nx\r\n")
        await until(lambda: got, "the first piece to be taken")
        await peer.say(b"1\r\ny\r\n")
        await peer.reader.read()

    got: list[bytes] = []

    def taker(piece: bytes) -> bool:
        raise EngineUnavailable(f"not for me: {piece!r}")

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        async with upstream.request("POST", "/x", {}, BODY) as response:
            got.append(await response.next_piece())
            with pytest.raises(EngineUnavailable, match="not for me: b'y'"):
                await response.follow(taker)
        assert upstream.pool.idle == 0

    played(run, play, story)


@loops
def test_whoever_follows_hears_that_the_engine_broke_off(run: Loop) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"1\r\nx\r\n")
        await peer.say(b"1\r\ny\r\n")

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        got: list[bytes] = []
        async with upstream.request("POST", "/x", {}, BODY) as response:
            got.append(await response.next_piece())
            await response.follow(lambda piece: bool(got.append(piece)))
            with pytest.raises(EngineUnavailable, match="in the middle of an answer"):
                await response.next_piece()
        assert b"".join(got) == b"xy"

    played(run, play, story)


@loops
def test_an_engine_that_falls_silent_in_its_answer_is_cut(run: Loop) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await asyncio.sleep(0.45)
        await peer.say(CHUNKED + b"1\r\nx\r\n")
        for _ in range(3):
            await asyncio.sleep(0.15)
            await peer.say(b"1\r\nx\r\n")
        await peer.reader.read()

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        got: list[bytes] = []

        async def read(response: UpstreamResponse) -> None:
            while piece := await response.next_piece():
                got.append(piece)

        async with upstream.request("POST", "/x", {}, BODY) as response:
            with pytest.raises(EngineUnavailable, match=r"said nothing for 0\.3 s"):
                await read(response)
        # The wait for the head is bounded by the request, not by this.
        assert b"".join(got) == b"xxxx"

    played(run, play, story, engine_silence_timeout_s=0.3)


@loops
def test_an_engine_that_takes_no_request_is_cut(run: Loop) -> None:
    async def play(peer: Peer) -> None:
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.writer.transport.pause_reading()
        await asyncio.sleep(60)

    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        with pytest.raises(EngineUnavailable, match="took nothing of the request") as caught:
            await ask(upstream, body=b"x" * (32 << 20))
        assert caught.value.phase == "send"
        assert server.plays == 1

    played(run, play, story, engine_send_timeout_s=0.3)


@loops
def test_sockets_are_told_not_to_wait(run: Loop) -> None:
    async def story(upstream: HttpUpstream, server: RawServer) -> None:
        assert await ask(upstream) == (200, b"hello")
        (connection,) = upstream.pool._idle
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert repr(connection) == "<Connection idle exchanges=1>"

    played(run, answering(HELLO, HELLO), story)
