"""What an engine may say over a socket: hostile bytes, in any pieces, never become an answer."""

from __future__ import annotations

import asyncio
import random

from gateway.http1 import KnownHeads, ResponseParser
from gateway.upstream import HttpUpstream
from prfaas.errors import EngineUnavailable, ProtocolError
from prfaas.limits import Limits
from prfaas.testing.fuzz import fuzz, mutate_bytes
from prfaas.testing.raw_http import OK, Peer, raw_server

BODY = b"data: 1\n\n" * 20
ANSWERS = [
    OK + b"content-length: 180\r\ncontent-type: text/event-stream\r\n\r\n" + BODY,
    OK + b"transfer-encoding: chunked\r\n\r\n" + b"9;x=1\r\ndata: 1\n\n\r\n" * 20 + b"0\r\n\r\n",
    OK + b"transfer-encoding: chunked\r\n\r\nb4\r\n" + BODY + b"\r\n0\r\nx-sum: 1\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 180\r\n\r\n" + BODY,
    b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
]
PARTS = [
    *ANSWERS,
    b"content-length: 7\r\n", b"transfer-encoding: chunked\r\n", b"\r\n\r\n", b"\r\n", b"\n",
    b" folded\r\n", b"-1", b"ffffffffffffffff\r\n", b"18446744073709551615", b"\x00",
    b"connection: upgrade\r\nupgrade: h2c\r\n", b"HTTP/1.1 101 Go\r\n",
]  # fmt: skip
LIMIT = 2000


def hostile(rng: random.Random) -> list[bytes]:
    data = rng.choice(ANSWERS)
    if rng.random() < 0.8:
        data = mutate_bytes(data, PARTS, rng)
    if rng.random() < 0.3:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(PARTS) + data[at:]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def read(pieces: list[bytes], known: KnownHeads | None = None) -> tuple[object, ...]:
    parser = ResponseParser("POST", LIMIT, known)
    for piece in pieces:
        if piece:
            parser.feed(piece)
    parser.eof()
    headers = dict(parser.headers or {})
    return parser.status, headers, b"".join(parser.body), parser.reusable


def test_bytes_of_an_engine_read_the_same_in_any_pieces() -> None:
    """Also that nothing is readable one way in one piece, and another way in others or where its
    head was read before.
    """
    known = KnownHeads()

    def run(pieces: list[bytes]) -> None:
        data = b"".join(pieces)
        try:
            whole: tuple[object, ...] | None = read([data])
        except ProtocolError:
            whole = None
        try:
            cut: tuple[object, ...] | None = read(pieces, known)
        except ProtocolError:
            cut = None
        if len(data) <= LIMIT:  # beyond, the bound may fall on either side of a piece
            assert cut == whole
        if cut is None:
            raise ProtocolError("refused")

    fuzz("http answers", run, hostile, (ProtocolError,))


def test_hostile_engines_on_a_socket_get_errors_and_leave_no_connection() -> None:
    """Requests that follow are answered from connections that were not spoiled."""

    async def main() -> None:
        said: list[list[bytes]] = []

        async def play(peer: Peer) -> None:
            while True:
                request = await peer.request()
                if b"POST /good" in request:
                    await peer.say(ANSWERS[0])
                    continue
                for piece in said[-1]:
                    await peer.say(piece)
                    await asyncio.sleep(0)
                if b"".join(said[-1]) not in ANSWERS[:4]:
                    return

        async def ask(upstream: HttpUpstream, path: str) -> bytes:
            async with upstream.post(path, {}, b"{}") as response:
                return await response.read(100_000)

        async with raw_server(play) as server:
            upstream = HttpUpstream(server.url, "d-0", Limits(engine_head_bytes=LIMIT))
            outcomes = {True: 0, False: 0}
            rng = random.Random("hostile engines")
            for at in range(300):
                said.append(hostile(rng))
                async with asyncio.timeout(5):
                    try:
                        await ask(upstream, "/bad")
                        outcomes[True] += 1
                    except EngineUnavailable:
                        outcomes[False] += 1
                    if at % 10 == 0:
                        assert await ask(upstream, "/good") == BODY
            assert min(outcomes.values()) > 20
            await upstream.close()

    asyncio.run(main())
