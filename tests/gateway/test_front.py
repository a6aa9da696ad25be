"""The short way over real sockets: whatever a client does with its connection comes out right."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from gateway import app
from gateway.front import AHEAD_BYTES, ClientConnection
from prfaas.errors import Overloaded
from prfaas.testing.gateway_setup import MODEL, until
from prfaas.testing.scripted_engine import Script

PATH = "/v1/completions"


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}).encode()


def request(body: bytes, *fields: str, path: str = PATH, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", *fields]
    lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0.001)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer; chunks are joined."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in pairs}
        if headers.get("transfer-encoding") != "chunked":
            length = int(headers.get("content-length", "0"))
            return int(head[0].split()[1]), headers, await self.reader.readexactly(length)
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return int(head[0].split()[1]), headers, body

    async def ask(self, body: bytes, *fields: str) -> tuple[int, dict[str, str], bytes]:
        await self.say(request(body, *fields))
        return await self.answer()


@contextlib.asynccontextmanager
async def client_of(cluster: Any) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    try:
        async with asyncio.timeout(10):
            yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def text_of(answer: tuple[int, dict[str, str], bytes]) -> str:
    status, headers, body = answer
    assert status == 200, body
    assert headers["date"].endswith("GMT")
    return json.loads(body)["choices"][0]["text"]


async def test_one_connection_carries_many_requests(cluster: Any) -> None:
    async with client_of(cluster) as client:
        for number in range(5):
            answer = await client.ask(body_of(), f"x-request-id: r{number}")
            assert text_of(answer) == "Hello, world."
            assert answer[1]["x-request-id"] == f"r{number}"
            assert answer[1]["x-prfaas-target"] == "local"


async def test_requests_sent_ahead_are_answered_in_order(cluster: Any) -> None:
    asked = [request(body_of(user=str(i)), f"x-request-id: r{i}") for i in range(6)]
    async with client_of(cluster) as client:
        await client.say(b"".join(asked[:4]) + asked[4][:40])
        await asyncio.sleep(0.05)
        await client.say(asked[4][40:] + asked[5])
        for number in range(6):
            answer = await client.answer()
            assert text_of(answer) == "Hello, world."
            assert answer[1]["x-request-id"] == f"r{number}"
    assert [seen.body["user"] for seen in cluster.engine.seen] == list("012345")


async def test_heads_and_bodies_may_come_in_any_pieces(cluster: Any) -> None:
    whole = request(body_of(user="é"), "authorization: Bearer k")
    async with client_of(cluster) as client:
        for cut in range(1, len(whole), 7):
            await client.say(whole[:cut], whole[cut:])
            assert text_of(await client.answer()) == "Hello, world."
        await client.say(*[whole[at : at + 1] for at in range(len(whole))])
        assert text_of(await client.answer()) == "Hello, world."
    assert {seen.headers["authorization"] for seen in cluster.engine.seen} == {"Bearer k"}


async def test_what_is_not_plain_goes_to_aiohttp_with_the_connection(cluster: Any) -> None:
    """In the middle of a connection, sent ahead as well."""
    body = body_of()
    chunked = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        f"{len(body):x}\r\n".encode()
        + body + b"\r\n0\r\n\r\n"
    )  # fmt: skip
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with client_of(cluster) as client:
        await client.say(request(body) + chunked + health + request(body))
        for _ in range(2):
            assert text_of(await client.answer()) == "Hello, world."
        assert json.loads((await client.answer())[2]) == {"status": "ok"}
        assert text_of(await client.answer()) == "Hello, world."
        expecting = request(body, "expect: 100-continue")
        await client.say(expecting[: -len(body)])
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.say(body)
        assert text_of(await client.answer()) == "Hello, world."


@pytest.mark.parametrize(
    "bad",
    [
        b"nonsense\r\n\r\n",
        request(body_of(), "transfer-encoding: chunked"),
        request(body_of(), "content-length: 3"),
        request(body_of(), "bad name: x"),
        b"POST /v1/completions HTTP/1.1\nhost: x\n\n",
    ],
    ids=["nonsense", "both lengths", "two lengths", "name", "bare line feeds"],
)
async def test_what_is_no_http_never_reaches_the_engine(cluster: Any, bad: bytes) -> None:
    async with client_of(cluster) as client:
        await client.ask(body_of())
        await client.say(bad)
        status, _, _ = await client.answer()
        assert status == 400
    assert len(cluster.engine.seen) == 1


async def test_a_body_over_the_limit_is_refused_before_it_comes(make_cluster: Any) -> None:
    async with make_cluster(limits={"max_body_bytes": 1000}) as cluster, client_of(cluster) as c:
        await c.say(request(b"x" * 100, length=2000) + b"x" * 1900)
        assert (await c.answer())[0] == 413


async def test_a_refused_request_is_read_to_its_end(make_cluster: Any) -> None:
    """So that its client hears why, and may go on with the connection."""
    async with make_cluster(limits={"gateway_max_in_flight": 1}) as cluster:
        cluster.gateway.admission.enter()
        async with client_of(cluster) as client:
            whole = request(body_of(user="u" * 2000))
            await client.say(whole[:300], whole[300:])
            status, headers, body = await client.answer()
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["type"] == Overloaded.kind
            cluster.gateway.admission.leave()
            assert text_of(await client.ask(body_of())) == "Hello, world."
        assert await cluster.metric("prfaas_gateway_refused_total", reason="full") == 1


async def test_a_body_that_does_not_arrive_gives_its_place_back(make_cluster: Any) -> None:
    async with make_cluster(limits={"slow_client_timeout_s": 0.2}) as cluster:
        async with client_of(cluster) as client:
            await client.say(request(body_of()[:20], length=100))
            await until(lambda: cluster.gateway.admission.in_flight == 1, "the request")
            status, headers, body = await client.answer()
            assert (status, headers["connection"]) == (400, "close")
            assert "did not arrive in time" in body.decode()
            assert await client.reader.read() == b""
        async with client_of(cluster) as client:
            await client.say(request(body_of()[:20], length=100))
            await until(lambda: cluster.gateway.admission.in_flight == 1, "the request")
    assert not cluster.engine.seen


async def test_a_stream_is_relayed_byte_for_byte(cluster: Any) -> None:
    cluster.engine.script = Script(texts=("a", "é", "\n\n", "data: x"))
    async with client_of(cluster) as client:
        status, headers, streamed = await client.ask(body_of(stream=True))
        assert (status, headers["cache-control"]) == (200, "no-cache")
        assert headers["content-type"].startswith("text/event-stream")
        async with cluster.client.post(
            cluster.engine.url + PATH, data=body_of(stream=True)
        ) as response:
            direct = await response.read()
        assert events(streamed) == events(direct)
        assert text_of(await client.ask(body_of()))


def events(stream: bytes) -> list[Any]:
    """Payloads of a stream, without what differs from answer to answer."""
    payloads = [line[6:] for line in stream.splitlines() if line.startswith(b"data: ")]
    assert payloads.pop() == b"[DONE]"
    return [{**json.loads(each), "id": "", "created": 0} for each in payloads]


async def test_a_client_that_leaves_in_a_stream_stops_the_engine(cluster: Any) -> None:
    cluster.engine.script = Script(texts=("a",) * 1000, token_delay_s=0.01)
    async with client_of(cluster) as client:
        await client.say(request(body_of(stream=True, max_tokens=1000), "x-request-id: gone"))
        await client.reader.readuntil(b"data: ")
    await until(lambda: cluster.engine.seen[0].cancelled, "the engine to be told")
    record = cluster.gateway.records.get("gone")
    await until(lambda: record.status, "the record to end")
    assert (record.status, record.error, record.committed) == ("499", "cancelled", True)


async def test_a_client_that_leaves_with_all_of_its_stream_has_not_given_up(cluster: Any) -> None:
    cluster.engine.script = Script(end_delay_s=60)
    async with client_of(cluster) as client:
        await client.say(request(body_of(stream=True), "x-request-id: all"))
        await client.reader.readuntil(b"data: [DONE]")
    await until(lambda: cluster.engine.seen[0].cancelled, "the engine to be told")
    record = cluster.gateway.records.get("all")
    await until(lambda: record.status, "the record to end")
    assert (record.status, record.error, record.committed) == ("200", "", True)


@pytest.mark.parametrize("reads_on", [True, False])
async def test_a_client_that_does_not_read_stops_the_stream(
    make_cluster: Any, reads_on: bool
) -> None:
    """Back-pressure reaches the engine; who reads on gets all of it, who does not is cut."""
    text = "x" * 60_000
    limit_s = 20.0 if reads_on else 0.4
    async with make_cluster(limits={"slow_client_timeout_s": limit_s}) as cluster:
        cluster.engine.script = Script(texts=(text,) * 400)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", cluster.gateway.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 14)
        client = Client(reader, writer)
        await client.say(request(body_of(stream=True, max_tokens=400), "x-request-id: slow"))
        await until(lambda: cluster.engine.seen, "the request")
        record = await until(lambda: cluster.gateway.records.get("slow"), "the record")
        if reads_on:
            seen = -1
            while record.events != seen:
                seen = record.events
                await asyncio.sleep(0.3)
            assert seen < 350
            _, _, streamed = await asyncio.wait_for(client.answer(), 60)
            assert streamed.count(text.encode()) == 400
            await until(lambda: record.status, "the end")
            assert (record.status, record.error) == ("200", "")
        else:
            await until(lambda: record.status, "the end")
            assert (record.status, record.error) == ("499", "cancelled")
            await until(lambda: cluster.engine.seen[0].cancelled, "the engine to be told")
        writer.close()


async def test_what_is_sent_ahead_is_bounded(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ClientConnection] = []
    opened = cluster.gateway.front.opened
    monkeypatch.setattr(
        cluster.gateway.front, "opened", lambda c, t: (made.append(c), opened(c, t))
    )
    cluster.engine.script = Script(first_delay_s=0.4)
    async with client_of(cluster) as client:
        client.writer.write(request(body_of()) + request(body_of(user="u" * 3_000_000)))
        await until(lambda: made and made[0]._reading_paused, "reading to stop")
        assert len(made[0]._held) < AHEAD_BYTES + (1 << 20)
        for _ in range(2):
            assert text_of(await client.answer()) == "Hello, world."


async def test_a_client_that_sent_much_ahead_and_leaves_stops_the_engine(
    make_cluster: Any,
) -> None:
    async with make_cluster(limits={"slow_client_timeout_s": 0.4}) as cluster:
        cluster.engine.script = Script(first_delay_s=60)
        async with client_of(cluster) as client:
            ahead = request(body_of(user="u" * (AHEAD_BYTES + 1000)))
            client.writer.write(request(body_of()) + ahead)
            await until(lambda: cluster.engine.seen, "the request")
        await until(lambda: cluster.engine.seen[0].cancelled, "the engine to be told")


async def test_idle_connections_are_closed(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "IDLE_CLIENT_S", 0.2)
    async with make_cluster() as cluster, client_of(cluster) as client:
        await client.ask(body_of())
        await client.say(b"POST /v1/comp")  # the start of a head keeps nobody either
        assert await client.reader.read() == b""
        assert cluster.gateway.front.open == 0


async def test_a_drain_lets_answers_end_and_closes(cluster: Any) -> None:
    cluster.engine.script = Script(first_delay_s=0.3)
    async with client_of(cluster) as busy, client_of(cluster) as late:
        await busy.say(request(body_of()))
        await until(lambda: cluster.gateway.admission.in_flight, "the request")
        drained = asyncio.create_task(cluster.gateway.drain())
        await until(lambda: cluster.gateway.admission.draining, "the drain")
        status, headers, _ = await late.ask(body_of())
        assert (status, headers["connection"]) == (503, "close")
        assert await late.reader.read() == b""
        status, headers, _ = await busy.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await busy.reader.read() == b""
        assert await drained


async def test_what_still_runs_when_the_gateway_stops_is_cut(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        cluster.engine.script = Script(first_delay_s=60)
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
        _, other = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
        writer.write(request(body_of(), "x-request-id: cut"))
        await until(lambda: cluster.engine.seen, "the request")
        await cluster.gateway.front.close(0.1)
        assert await reader.read() == b""
        assert cluster.gateway.front.open == 0
        record = cluster.gateway.records.get("cut")
        assert record.status == "499"
        for each in (writer, other):
            each.close()


async def test_a_whole_answer_goes_out_before_the_books_are_done(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    say, end = ClientConnection.say, cluster.gateway.generation._end

    def saying(connection: ClientConnection, *args: Any, **named: Any) -> None:
        order.append("said")
        say(connection, *args, **named)

    def ending(record: Any) -> None:
        order.append("ended")
        end(record)

    monkeypatch.setattr(ClientConnection, "say", saying)
    monkeypatch.setattr(cluster.gateway.generation, "_end", ending)
    status, _, response = await cluster.post(body_of())
    assert (status, order) == (200, ["said", "ended"])
    assert response.headers["x-prfaas-target"] == "local"
    order.clear()
    cluster.engine.script = Script(error=Overloaded("full"))
    status, _, response = await cluster.post(body_of())
    assert (status, order) == (503, ["ended", "said"])


async def test_an_error_of_ours_after_the_answer_cuts_the_connection(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second answer would be taken for that to the next request."""
    end = cluster.gateway.generation._end

    def ending(record: Any) -> None:
        end(record)
        raise ValueError("a mistake of ours")

    async with client_of(cluster) as client:
        assert (await client.ask(body_of()))[0] == 200
        monkeypatch.setattr(cluster.gateway.generation, "_end", ending)
        assert (await client.ask(body_of()))[0] == 200
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
